"""Settings that a resumed run may not change, although every tensor would fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, NemotronConfig, PreTrainedConfig

from lightseq.architecture.family import apply_rope, preset_config
from lightseq.checkpoint.checkpoints import TRAINER_STATE
from lightseq.checkpoint.model_differences import check_model
from lightseq.checkpoint.resume import changed_length_note, changed_ranks_note, check_engine, check_flags
from lightseq.cli import BOTH
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.world import World
from lightseq.parts import adapter_files
from lightseq.parts.adapters import Lora

CONFIG = TrainConfig(model_name_or_path="base", data_path="d", output_dir="o")
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "yarn", "factor": 16},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
]


def model(scaling: dict[str, Any] | None = None, theta: float | None = None, **changes: Any) -> PreTrainedConfig:
    found = preset_config(BOTH, "tiny-llama3")
    found.update(changes)
    return apply_rope(found, theta, scaling)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_a_checkpoint_resumes_in_its_own_model(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    model(scaling).save_pretrained(tmp_path)
    assert check_model(tmp_path, CONFIG, model(scaling), None) == ()
    assert check_model(tmp_path / "of an engine", CONFIG, model(scaling), None) == ()


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (model(), "rope_parameters {"),
        (model({"rope_type": "yarn", "factor": 8}), "rope_parameters {"),
        (model({"rope_type": "yarn", "factor": 16}, 9e6), "rope_parameters {"),
        (model({"rope_type": "yarn", "factor": 16}, rms_norm_eps=0.5), "rms_norm_eps 1e-05, but this run has 0.5"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(now: PreTrainedConfig, named: str, tmp_path: Path) -> None:
    model({"rope_type": "yarn", "factor": 16}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was trained with ") as refused:
        check_model(tmp_path, CONFIG, now, None)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_a_model_of_another_kind_is_refused_and_a_factor_of_fewer_digits_is_not(tmp_path: Path) -> None:
    model({"rope_type": "yarn", "factor": 12.207}).save_pretrained(tmp_path)
    assert check_model(tmp_path, CONFIG, model({"rope_type": "yarn", "factor": 12.20703125}), None) == ()
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"model_type": "mistral"}))
    with pytest.raises(ValueError, match="was trained with model_type mistral, but this run has llama; "):
        check_model(tmp_path, CONFIG, model({"rope_type": "yarn", "factor": 12.207}), None)
    NemotronConfig(norm_eps=1e-5).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"was trained with norm_eps 1e-05, but this run has 0\.5; "):
        check_model(tmp_path, CONFIG, NemotronConfig(norm_eps=0.5), None)
    Gemma2Config(sliding_window=64).save_pretrained(tmp_path)
    assert check_model(tmp_path, CONFIG, Gemma2Config(sliding_window=64), None) == ()
    with pytest.raises(ValueError, match="was trained with sliding_window 64, but this run has 32; "):
        check_model(tmp_path, CONFIG, Gemma2Config(sliding_window=32), None)


def test_an_adapter_resumes_with_its_scale_and_base_model(tmp_path: Path) -> None:
    lora = Lora(4, 8.0, ("q_proj",))
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 16}}
    scaled = TrainConfig(model_name_or_path="base", data_path="d", output_dir="o", **yarn)
    changed = model(yarn["rope_scaling"])
    adapter_files.save([], tmp_path, lora, "base", None, adapter_files.changed_rope(scaled, changed))
    assert check_model(tmp_path, scaled, changed, lora) == ()
    for other, line in (
        (Lora(4, 99.0, ("q_proj",)), r"lora_alpha 8\.0, but this run has 99\.0; "),
        (Lora(8, 16.0, ("q_proj",)), "lora_rank 4, but this run has 8; "),
        (Lora(4, 8.0, ("q_proj", "k_proj")), "lora_target_modules q_proj, but this run has k_proj,q_proj; "),
    ):
        with pytest.raises(ValueError, match=f"was trained with {line}"):
            check_model(tmp_path, scaled, changed, other)
    with pytest.raises(ValueError, match=r"was trained with rope_parameters .*, but this run has the base model's; "):
        check_model(tmp_path, CONFIG, model(), lora)
    saved = json.loads((tmp_path / adapter_files.CONFIG).read_text())
    (tmp_path / adapter_files.CONFIG).write_text(json.dumps(saved | {"use_rslora": True}))
    with pytest.raises(ValueError, match=r"was trained with use_rslora True, but this run has False; "):
        check_model(tmp_path, scaled, changed, lora)
    (tmp_path / adapter_files.CONFIG).write_text(json.dumps(saved | {"base_model_name_or_path": "another"}))
    (note,) = check_model(tmp_path, scaled, changed, lora)
    assert note.startswith("warning: ") and "was trained on another and continues on base" in note


def test_flags_that_change_how_a_model_learns_are_named_and_another_optimizer_is_refused(tmp_path: Path) -> None:
    def saved(**config: Any) -> Path:
        (tmp_path / TRAINER_STATE).write_text(json.dumps({"step": 3, "config": {**CONFIG.to_json(), **config}}))
        return tmp_path

    assert check_flags(saved(), replace(CONFIG, max_steps=9, schedule="ring", output_dir="p")) == ()
    now = replace(CONFIG, learning_rate=1e-5, lora_rank=4, loraplus_lr_ratio=4.0, bf16=True)
    assert check_flags(saved(learning_rate=1e-3), now) == (
        "resumed with --learning_rate 1e-05 (was 0.001), --loraplus_lr_ratio 4.0 (was None), --bf16 True (was False)",
    )
    (note,) = check_flags(saved(), replace(CONFIG, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6))
    assert note == (
        "resumed with --adam_beta1 0.8 (was 0.9), --adam_beta2 0.95 (was 0.999), --adam_epsilon 1e-06 (was 1e-08)"
    )
    assert check_flags(saved(optim="adamw_torch"), CONFIG) == (
        f"resumed with --optim {CONFIG.optim} (was adamw_torch)",
    )
    assert check_flags(saved(optim="sgd"), replace(CONFIG, deepspeed="d.json"))
    (tmp_path / TRAINER_STATE).write_text(json.dumps({"step": 3}))
    assert check_flags(tmp_path, CONFIG) == (), "older checkpoints do not say"


def test_a_new_run_starts_from_an_adapter_by_the_flag_for_adapters(tmp_path: Path) -> None:
    (tmp_path / TRAINER_STATE).write_text(json.dumps({"step": 3, "config": {"optim": "sgd"}}))
    for file, flag in (("config.json", "model_name_or_path"), (adapter_files.CONFIG, "lora_adapter")):
        (tmp_path / file).write_text("{}")
        with pytest.raises(ValueError, match=f"start over from its weights with --{flag} {tmp_path}$"):
            check_flags(tmp_path, CONFIG)
        with pytest.raises(ValueError, match=f"start over from its weights with --{flag} {tmp_path}$"):
            check_engine(tmp_path, "DeepSpeed ZeRO-2", 2)


def test_another_number_of_ranks_is_named_with_the_flag_for_it(tmp_path: Path) -> None:
    (tmp_path / TRAINER_STATE).write_text(json.dumps({"step": 3, "ranks": 4}))
    one, four = (World(0, size, 0, local, torch.device("cpu")) for size, local in ((1, 1), (4, 2)))
    assert changed_ranks_note(tmp_path, one) == (
        "resumed on 1 rank (was 4); for as many as before, give --nproc_per_node 4 to lightseq or to the launcher",
    )
    assert changed_ranks_note(tmp_path, four) == ()
    (tmp_path / TRAINER_STATE).write_text(json.dumps({"step": 3}))
    assert changed_ranks_note(tmp_path, one) == (), "older checkpoints do not say"


def test_another_length_moves_the_learning_rate_and_is_named(tmp_path: Path) -> None:
    (tmp_path / TRAINER_STATE).write_text(json.dumps({"step": 3, "total_steps": 20}))
    assert changed_length_note(tmp_path, "cosine", 40) == (
        "resumed for 40 steps in all (was 20): the learning rate jumps to where a cosine schedule of the new length "
        "would be",
    )
    assert changed_length_note(tmp_path, "cosine", 20) == changed_length_note(tmp_path, "constant", 40) == ()
    (tmp_path / TRAINER_STATE).write_text(json.dumps({"step": 3}))
    assert changed_length_note(tmp_path, "cosine", 40) == (), "older checkpoints do not say"
