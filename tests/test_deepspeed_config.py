"""A DeepSpeed JSON beside the flags: what is filled in, what is refused and in which words."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightseq.checkpoint.checkpoints import TRAINER_STATE
from lightseq.checkpoint.resume import check_engine
from lightseq.config.deepspeed import deepspeed_settings
from lightseq.config.train_config import TrainConfig

HIDDEN, DATA_RANKS = 64, 2


def settings(folder: Path, content: Any, **flags: Any) -> dict[str, Any]:
    """Returns the settings that DeepSpeed would get."""
    (folder / "ds.json").write_text(content if isinstance(content, str) else json.dumps(content))
    config = TrainConfig(
        model_name_or_path="m", data_path="d", output_dir="o", deepspeed=str(folder / "ds.json"), **flags
    )
    found = deepspeed_settings(config, DATA_RANKS, HIDDEN)
    assert found is not None
    return found.settings


def zero(stage: int = 2, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def adamw(**params: Any) -> dict[str, Any]:
    return zero() | {"optimizer": {"type": "AdamW", "params": params}}


@pytest.mark.parametrize("value", ["auto", None])
def test_auto_values_of_the_deepspeed_file_come_from_the_flags(tmp_path: Path, value: str | None) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    content = zero(3) | (dict.fromkeys(keys, value) | {"bf16": {"enabled": value}} if value else {})
    found = settings(
        tmp_path, content, per_device_train_batch_size=3, gradient_accumulation_steps=5, max_grad_norm=0.25, bf16=True
    )
    assert "train_batch_size" not in found  # of all ranks, DeepSpeed would say, whichever share a sequence
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (3, 5)
    assert (found["gradient_clipping"], found["bf16"], found["fp16"]) == (0.25, {"enabled": True}, {"enabled": False})
    assert found["data_types"]["grad_accum_dtype"] == found["communication_data_type"] == "fp32"
    assert found["log_level"] == "error"


def test_values_in_the_deepspeed_file_stay(tmp_path: Path) -> None:
    content = zero(3, reduce_bucket_size=7, stage3_prefetch_bucket_size="auto", overlap_comm=False)
    content |= {"communication_data_type": "bf16", "steps_per_print": 1, "train_batch_size": 4, "bf16": {"x": 1}}
    found = settings(tmp_path, content, per_device_train_batch_size=2)
    expected = {"stage": 3, "reduce_bucket_size": 7, "stage3_prefetch_bucket_size": 3686, "overlap_comm": False}
    assert found["zero_optimization"] == expected
    assert (found["communication_data_type"], found["log_level"], found["bf16"]["x"]) == ("bf16", "info", 1)


def test_an_optimizer_section_that_agrees_with_the_flags_is_accepted(tmp_path: Path) -> None:
    params = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": "auto", "weight_decay": 0.1}
    for kind in ("Adam", "AdamW"):
        content = adamw(**params)
        content["optimizer"]["type"] = kind
        assert "optimizer" not in settings(tmp_path, content, learning_rate=1e-3, weight_decay=0.1)
    content["optimizer"]["params"] |= {"betas": [0.8, 0.95], "eps": 1e-6}
    adam = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    assert "optimizer" not in settings(tmp_path, content, learning_rate=1e-3, weight_decay=0.1, **adam)


@pytest.mark.parametrize(
    ("content", "flags", "parts"),
    [
        ("{", {}, [" cannot be read (Expecting ", "); give a DeepSpeed JSON file"]),
        ([], {}, ["is not a JSON object; give a DeepSpeed JSON file"]),
        ({}, {}, ["zero_optimization has no stage; give 1, 2 or 3", "--fsdp"]),
        (zero(0), {}, ["zero_optimization has stage 0; give 1, 2 or 3"]),
        ({"zero_optimization": 3}, {}, ["zero_optimization is 3; give an object"]),
        (zero() | {"bf16": True}, {}, ["bf16 is true; give an object"]),
        (zero(2, offload_optimizer="cpu"), {}, ['zero_optimization.offload_optimizer is "cpu"; give an object']),
        (zero(3, offload_param=True), {}, ["zero_optimization.offload_param is true; give an object"]),
        (zero() | {"optimizer": {"type": "AdamW", "params": []}}, {}, ["optimizer.params is []; give an object"]),
        (zero() | {"scheduler": {}}, {}, ["scheduler is not supported", "--lr_scheduler_type", "remove it"]),
        (zero() | {"activation_checkpointing": {}}, {}, ["activation_checkpointing is not", "--remat", "remove it"]),
        (zero() | {"prescale_gradients": True}, {}, ["prescale_gradients is not supported", "summed", "remove it"]),
        (zero() | {"no_such": 1}, {}, ["no_such is not supported (it would have no effect); remove it"]),
        (zero(offload_optimizer={"device": "disk"}), {}, ["offload_optimizer has the device 'disk'; give cpu or none"]),
        (zero(3, offload_param={"device": "nvme"}), {}, ["offload_param to 'nvme' is not supported; give cpu"]),
        (zero(3, offload_optimizer={"device": "nvme"}), {}, ["offload_optimizer to 'nvme' is not", "or use --offload"]),
        (zero() | {"aio": {}}, {}, ["aio is not supported (it would have no effect); remove it"]),
        (zero(offload_param={"device": "cpu"}), {}, ["offload_param needs stage 3, not 2"]),
        (zero() | {"zero_force_ds_cpu_optimizer": True}, {}, ["zero_force_ds_cpu_optimizer is true", "give false"]),
        (zero() | {"gradient_clipping": 0.5}, {}, ["gradient_clipping is 0.5, but --max_grad_norm is 1.0", '"auto"']),
        (zero() | {"bf16": {"enabled": True}}, {}, ["bf16.enabled is true, but --bf16 is false; make them equal"]),
        (zero() | {"fp16": {"enabled": False}}, {"fp16": True}, ["fp16.enabled is false, but --fp16 is true"]),
        (zero() | {"train_micro_batch_size_per_gpu": 2}, {}, ["is 2, but --per_device_train_batch_size is 1"]),
        (
            zero() | {"train_batch_size": 16}, {"gradient_accumulation_steps": 4},
            ["train_batch_size is 16, but --per_device_train_batch_size 1 x --gradient_accumulation_steps 4 x 2 data"
             " ranks is 8; make them equal"],
        ),
        (adamw(lr=1e-3), {}, ["optimizer.params: lr is 0.001, but --learning_rate is 5e-05; make them equal"]),
        (adamw(betas=[0.9, 0.95]), {}, ["betas is [0.9, 0.95], but [--adam_beta1, --adam_beta2] is [0.9, 0.999]"]),
        (adamw(eps=1e-8), {"adam_epsilon": 1e-6}, ["eps is 1e-08, but --adam_epsilon is 1e-06; make them equal"]),
        (zero() | {"optimizer": {"type": "Lamb"}}, {}, ['optimizer is {"type": "Lamb"}; give AdamW, or remove']),
        (zero() | {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {}, ["give AdamW, or remove it"]),
        (zero() | {"optimizer": {"type": "AdamW"}}, {"optim": "sgd"}, ["optimizer is AdamW, but --optim is sgd"]),
        (adamw(amsgrad=True), {}, ["optimizer.params.amsgrad is not supported; remove it"]),
        (zero(allgather_bucket_size="auto"), {}, ['allgather_bucket_size is "auto", but no flag sets it']),
        (zero(3), {"torch_compile": True}, ["--torch_compile does not run with ZeRO-3; use stage 1 or 2"]),
    ],
)  # fmt: skip
def test_unsupported_values_in_the_deepspeed_file_are_refused(
    tmp_path: Path, content: Any, flags: dict, parts: list[str]
) -> None:
    with pytest.raises(ValueError) as refusal:
        settings(tmp_path, content, **flags)
    assert str(refusal.value).startswith(f"--deepspeed {tmp_path}/ds.json") and "\n" not in str(refusal.value)
    for part in parts:
        assert part in str(refusal.value)


def test_a_checkpoint_resumes_under_the_engine_and_ranks_that_saved_it(tmp_path: Path) -> None:
    (tmp_path / TRAINER_STATE).write_text(json.dumps({"step": 1, "engine": "DeepSpeed ZeRO-2", "ranks": 2}))
    check_engine(tmp_path, "DeepSpeed ZeRO-2", 2)
    for engine, ranks, this in (
        (None, 2, "FSDP2"),
        ("DeepSpeed ZeRO-3", 2, "ZeRO-3 on 2 ranks"),
        ("DeepSpeed ZeRO-2", 4, "on 4 ranks"),
    ):
        with pytest.raises(
            ValueError, match=f"saved by DeepSpeed ZeRO-2 on 2 ranks, but this run uses .*{this}; resume as"
        ):
            check_engine(tmp_path, engine, ranks)
    (tmp_path / TRAINER_STATE).write_text(json.dumps({"step": 1, "scaler": None}))
    check_engine(tmp_path, None, 4)
    with pytest.raises(
        ValueError, match=r"saved by FSDP2, but this run uses DeepSpeed ZeRO-1 on 2 ranks; .* --model_name_or_path"
    ):
        check_engine(tmp_path, "DeepSpeed ZeRO-1", 2)
