"""verl's updates with sequences split over ranks give the numbers of verl's own FSDP2 engine."""

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import spawn

try:
    version("verl")  # the name alone could also be a folder
except PackageNotFoundError:
    pytest.skip("needs verl (`make test-verl`)", allow_module_level=True)

# Before verl is imported, here and in the processes that this file starts.
os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_USE_EXTERNAL_MODULES"] = "lightseq.integrations.verl_on_cpu"

import hydra
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3_5TextConfig
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl_numbers import (
    CONFIG,
    EXPERTS,
    LENGTHS,
    SIZES,
    TIED,
    Case,
    batch,
    exported,
    loss_function,
    make_engine,
    nested,
    numbers,
    save_model,
    update,
    weights,
)

CASES = {
    "sft": Case(),
    "ppo": Case("ppo", temperature=0.7),
    "sft, adapters": Case(lora_rank=4),
    "ppo, adapters": Case("ppo", lora_rank=4, checkpointing=True),
}


def _numbers_of_both(rank: int, folder: str, cases: dict[str, Case], *settings: Any) -> dict[str, tuple[Any, Any]]:
    sequence_ranks, changes = settings
    return {
        name: tuple(
            numbers(make_engine(folder, case, size, **changes), case)  # one after the other
            for size in (sequence_ranks, None)
        )
        for name, case in cases.items()
    }


def assert_equal(results: list[dict[str, tuple[Any, Any]]]) -> None:
    for both in results:
        for name, (got, wanted) in both.items():
            for ours, theirs in zip(got["updates"], wanted["updates"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), name
            for kind in ("rows", "weights"):
                assert got[kind].keys() == wanted[kind].keys()
                for key, values in wanted[kind].items():
                    np.testing.assert_allclose(got[kind][key], values, rtol=1e-5, atol=1e-5, err_msg=f"{name}, {key}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(str(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("ranks", "sequence_ranks"),
    [(2, 2), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_updates_equal_those_of_verls_engine(folder: str, ranks: int, sequence_ranks: int) -> None:
    assert_equal(spawn(ranks, _numbers_of_both, folder, CASES, sequence_ranks, {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "config", "changes"),
    [
        (2, TIED, {"param_offload": True, "optimizer_offload": True, "reshard_after_forward": False}),
        (2, EXPERTS, {"use_no_sync_for_gradient_accumulation": False}),
        (4, CONFIG, {"fsdp_size": 2}),
    ],
    ids=["tied embeddings, offloaded", "experts", "replicated shards"],
)
def test_updates_under_other_settings(
    tmp_path: Path, ranks: int, config: PreTrainedConfig, changes: dict[str, Any]
) -> None:
    folder = save_model(str(tmp_path), config)
    assert_equal(spawn(ranks, _numbers_of_both, folder, {"ppo": CASES["ppo"]}, 2, changes))


def _resumed(rank: int, folder: str, checkpoint: str, case: Case) -> tuple[Any, Any, Any]:
    engine = make_engine(folder, case, 2)
    update(engine, case)
    engine.save_checkpoint(checkpoint, global_step=1)
    saved, went_on = weights(engine), (update(engine, case), weights(engine))
    fresh = make_engine(folder, case, 2)
    fresh.load_checkpoint(checkpoint, del_local_after_load=False)
    return saved, went_on, (update(fresh, case), weights(fresh))


@pytest.mark.parametrize("case", [pytest.param(Case(), marks=pytest.mark.slow), Case(lora_rank=4)])
def test_a_checkpoint_resumes_bit_equal(folder: str, tmp_path: Path, case: Case) -> None:
    for saved, went_on, resumed in spawn(2, _resumed, folder, str(tmp_path), case):
        assert went_on[0] == resumed[0]
        assert all(np.array_equal(went_on[1][name], resumed[1][name]) for name in went_on[1])
        if not case.lora_rank:
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype="float32")
            assert all(np.allclose(p.detach(), saved[name], atol=1e-2) for name, p in model.named_parameters())
            assert "lightseq" not in (tmp_path / "huggingface" / "config.json").read_text()


def _exported_by_both(rank: int, folder: str, case: Case) -> list[Any]:
    """Returns the exported weights after two updates of one data-parallel batch, by both engines."""
    found = []
    for sequence_ranks in (2, None):
        engine = make_engine(folder, case, sequence_ranks)
        for _ in range(2):
            update(engine, case)
        found.append(exported(engine, base_sync_done=bool(case.lora_rank)))
    return found


@pytest.mark.parametrize("case", [Case(), pytest.param(Case(lora_rank=4), marks=pytest.mark.slow)])
def test_exported_weights_equal_those_of_verls_engine(folder: str, case: Case) -> None:
    for (ours, our_adapter), (theirs, their_adapter) in spawn(2, _exported_by_both, folder, case):
        assert ours.keys() == theirs.keys() and our_adapter == their_adapter
        for name, weight in theirs.items():
            np.testing.assert_allclose(ours[name], weight, rtol=1e-5, atol=1e-5, err_msg=name)


def _messages(rank: int, folder: str) -> dict[str, str | None]:
    """Returns what each kind of bad input raises; only rank 1 has it where ranks may differ."""
    case, found = Case(), dict[str, str | None]()
    for name, changes in {
        "ranks": {"ulysses_sequence_parallel_size": 3},
        "padded": {"pad_to_length": True},
        "option": {"attention_options": {"shedule": "zigzag"}},
    }.items():
        found[name] = _message(lambda changes=changes: make_engine(folder, case, 2, **changes))
    engine = make_engine(folder, case, 1)

    def train(change: Callable[[Any], None]) -> None:
        data = batch(engine, case)
        if rank == 1:
            change(data)
        with engine.train_mode():
            engine.train_batch(data, loss_function(case))

    for name, change in {
        "long row": lambda data: tu.assign_non_tensor(data, max_token_len_per_gpu=20),
        "no mask": lambda data: data.pop("loss_mask"),
        "positions": lambda data: data.set("position_ids", nested([torch.arange(n) + 1 for n in LENGTHS[1::2]])),
        "sums": lambda data: tu.assign_non_tensor(data, calculate_sum_pi_squared=True),
        "temperatures": lambda data: data.set("temperature", torch.tensor([1.0, 1.0, 1.0, 0.5])),
    }.items():
        found[name] = _message(lambda change=change: train(change))
    update(engine, case)  # which still works
    return found


def _message(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def test_bad_input_gets_one_line_on_every_rank(folder: str) -> None:
    of_ranks = spawn(2, _messages, folder)
    assert of_ranks[0] == of_ranks[1]
    wanted = {
        "ranks": "ulysses_sequence_parallel_size 3 does not divide 2 ranks; use 1 or 2",
        "padded": "pad_to_length is not supported by strategy=lightseq; turn it off",
        "option": "attention_options has no option shedule; did you mean schedule?",
        "long row": "rank 1: a row has 60 tokens, but a micro-batch holds 20 (max_token_len_per_gpu 20 on 1 ",
        "no mask": "rank 1: the batch has no loss_mask",
        "positions": "rank 1: position_ids do not count up from 0 in each row",
        "sums": "rank 1: calculate_sum_pi_squared is not supported",
        "temperatures": "rank 1: rows have temperatures from 0.5 to 1",
    }
    for name, start in wanted.items():
        assert (of_ranks[0][name] or "").startswith(start), (name, of_ranks[0][name])


def test_verls_ppo_config_takes_the_engine() -> None:
    actor, ours = "actor_rollout_ref.actor", "lightseq.integrations.verl.LightseqEngineConfig"
    words = [f"{actor}.strategy=lightseq", f"{actor}.fsdp_config._target_={ours}"]
    words += [f"{actor}.fsdp_config.ulysses_sequence_parallel_size=2", f"{actor}.ppo_micro_batch_size_per_gpu=1"]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=words)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine
    assert f"{type(engine).__module__}.{type(engine).__name__}" == ours
    assert (engine.strategy, engine.ulysses_sequence_parallel_size) == ("lightseq", 2)
    assert config.actor_rollout_ref.ref.strategy == "lightseq"


def _message_of_hybrid(rank: int, folder: str) -> str | None:
    return _message(lambda: make_engine(folder, Case(), 2))


def test_a_hybrid_names_the_version_it_needs(tmp_path: Path) -> None:
    config = Qwen3_5TextConfig(
        **SIZES,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    folder = save_model(str(tmp_path), config)
    for message in spawn(2, _message_of_hybrid, folder):
        assert message is not None and "is too old for" in message and message.endswith("install 5.22 or newer")
