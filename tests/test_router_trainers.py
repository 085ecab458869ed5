"""Router losses in trainers whose sequences are split over ranks, against the unmodified trainer on one process."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_except
from trainer_numbers import CONFIG, Numbers, assert_equal, sizes
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer
from worlds import spawn

pytest.importorskip("trl")

import test_integrations_trl as trl_tests
from trl import DPOTrainer, SFTTrainer

from lightseq.integrations import SequenceParallelDPOTrainer, SequenceParallelSFTTrainer, SequenceParallelTrainer

COEFFICIENT = 0.3
TRAINER_CASES: Mapping[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "smoothed": {"label_smoothing_factor": 0.1},
}
# Arguments of the trainer by case; all have a router loss.
TRL_CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "SFT padded": ("sft", {"max_length": 64}),
    "SFT packed": ("sft", {"max_length": 64, "packing": True, "gradient_accumulation_steps": 2}),
    "SFT padding free": ("sft", {"max_length": None, "padding_free": True}),
    "SFT packed, in rows of one length": ("sft", {"max_length": 64, "packing": True, "compile_layers": True}),
    "SFT smoothed": ("sft", {"max_length": 64, "label_smoothing_factor": 0.1}),
    "DPO": ("dpo", {"gradient_accumulation_steps": 2}),
    "KTO": ("KTO", {}),
    "ORPO": ("ORPO", {}),
}


def experts() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "pad_token_id": 0}
    sizes |= {name: getattr(CONFIG, name) for name in names} | {"router_aux_loss_coef": COEFFICIENT, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, max_position_embeddings=128, output_router_logits=True))


def with_experts(rank: int, name: str, run: str, kind: type[Trainer], case: Mapping[str, Any], *sizes: int) -> Numbers:
    """Runs a trainer's test on a mixture of experts. `sizes` are the data ranks, and those of a sequence if any."""
    module: Any = importlib.import_module(name)
    module.fresh_model = experts
    torch.compile = lambda forward, **_: forward  # type: ignore[assignment]  # takes minutes
    data_ranks, *others = sizes
    options = {"sequence_parallel_size": others[0]} if others else {}
    found: Numbers = getattr(module, run)(rank, kind, case, data_ranks, **options)
    return found


def compare(world: int, module: str, run: str, kinds: tuple[type[Trainer], type[Trainer]], cases: Any) -> None:
    plain, ours = kinds
    for size in sizes(world):
        wanted = spawn(world // size, with_experts, module, run, plain, cases[0], world // size)[0]
        for got in spawn(world, with_experts, module, run, ours, cases[1], world // size, size):
            assert_equal(got, wanted)


@pytest.mark.compat("5.20")
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_except(["accumulated"], TRAINER_CASES))
def test_trainer_adds_the_router_loss_of_one_process(case: str, world: int) -> None:
    kinds = (Trainer, SequenceParallelTrainer)
    compare(world, "test_integrations_trainer", "train", kinds, [TRAINER_CASES[case]] * 2)


@pytest.mark.compat("5.20")
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_except(["SFT packed"], TRL_CASES))
def test_trl_adds_the_router_loss_of_one_process(case: str, world: int, tmp_path: Path) -> None:
    run, changes = TRL_CASES[case]
    cases = [dict(changes), dict(changes)]
    if run == "sft":
        kinds: Any = (SFTTrainer, SequenceParallelSFTTrainer)
    else:
        kinds = (DPOTrainer, SequenceParallelDPOTrainer) if run == "dpo" else trl_tests.OTHERS[run][:2]
        for folder, case_of_kind in zip(("wanted", "got"), cases, strict=True):
            (trl_tests.judged if run == "KTO" else trl_tests.preferences)(tmp_path / folder)
            case_of_kind |= {"rows": str(tmp_path / folder)} | ({} if run == "dpo" else {"name": run})
    if run != "dpo" and run != "sft" and world != 2:
        pytest.skip("one process against two ranks, as without experts")
    compare(world, "test_integrations_trl", run if run in ("sft", "dpo") else "other", kinds, cases)
