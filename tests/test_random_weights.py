"""Random weights are those of the model's own initialization."""

import copy
import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import programs
from small import losses
from transformers import AutoModelForCausalLM, PreTrainedModel
from worlds import spawn

from benchmarks.tiny_models import ids, tiny_config
from lightseq.models import random_weights, weights
from lightseq.models.build import build
from lightseq.parts.chosen_experts import build_to_train

CPU = torch.device("cpu")
UNUSUAL: dict[str, dict[str, Any]] = {
    "gemma3": {},  # norms zero, and a text decoder inside
    "qwen3_moe": {},  # routers and experts are parameters of their own
    "gpt_oss": {},  # sinks
    "granite": {"pad_token_id": 3},  # a row of zeros in the embeddings
    "olmo": {},  # norms without weights
    "gpt_bigcode": {},  # projections into the residual stream are smaller
    "opt": {},  # init_std
    "apertus": {},  # parameters of the activation
}


def drawn(config: Any, seed: int = 5) -> PreTrainedModel:
    model = build_to_train(config)
    weights.materialize(model, CPU)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    state = torch.get_rng_state()
    random_weights.initialize(model, seed)
    assert torch.equal(torch.get_rng_state(), state)
    return model


def wide(model_type: str) -> Any:
    """Returns a config with parameters that are large enough to compare their spread."""
    return tiny_config(model_type, initializer_range=0.05, **UNUSUAL[model_type])


@pytest.mark.parametrize("model_type", UNUSUAL)
def test_mean_and_spread_are_those_of_transformers(model_type: str) -> None:
    torch.manual_seed(0)  # some parameters have four numbers, whose spread is off by much in a few draws
    ours, theirs = drawn(wide(model_type)), build(wide(model_type))
    for (name, mine), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if right.std(correction=0) < 1e-8:
            assert torch.equal(mine, right), name
            continue
        samples, spread = right.numel(), right.std().item()  # each estimate is off by spread / sqrt(2n)
        assert mine.std().item() == pytest.approx(spread, rel=8 / math.sqrt(2 * samples)), name
        assert mine.mean().item() == pytest.approx(right.mean().item(), abs=8 * spread / math.sqrt(samples)), name
    for (name, mine), right in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(mine, right), name


def test_rows_of_padding_are_zero() -> None:
    embeddings = drawn(wide("granite")).get_input_embeddings().weight
    assert [i for i, row in enumerate(embeddings) if not row.any()] == [3]


def test_weights_of_llama_are_normal_numbers_from_a_generator_for_each_name() -> None:
    model = drawn(tiny_config("llama"))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"5 {name}".encode()))
        assert torch.equal(parameter, torch.empty(parameter.shape).normal_(0.0, 0.2, generator=generator)), name


def test_an_initialization_draws_from_other_memory_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("llama")
    kind = AutoModelForCausalLM._model_mapping[type(config)]

    def init(model: PreTrainedModel, module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.copy_(torch.rand(parameter.shape))

    monkeypatch.setattr(kind.__mro__[1], "_init_weights", init)
    first, second, other = drawn(config), drawn(copy.deepcopy(config)), drawn(config, seed=6)
    for (name, x), y, z in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(x, y) and not torch.equal(x, z), name


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("deepseek_v3", {"n_shared_experts": 0}),
        ("lfm2", {"block_ff_dim": 1}),  # which it rounds to 0
    ],
)
def test_empty_parameters_need_no_draw(model_type: str, changes: dict[str, int]) -> None:
    model = drawn(tiny_config(model_type, **changes))
    assert any(not parameter.numel() for parameter in model.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.compat("5.20")
def test_a_model_with_empty_parameters_trains_and_resumes_on_any_number_of_ranks(tmp_path: Path) -> None:
    tiny_config("deepseek_v3", n_shared_experts=0).save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": ids()[0].tolist()}) + "\n")
    run = f"--model_name_or_path {tmp_path} --random_init --data_path {tmp_path}/rows.jsonl --model_max_length 50"
    run += f" --max_steps 3 --save_strategy steps --save_steps 1 --output_dir {tmp_path}"
    resumed = f"{run}/resumed --resume_from_checkpoint {tmp_path}/two/checkpoint-1"
    (one,), (two, _) = spawn(1, programs, "any", [f"{run}/one"]), spawn(2, programs, "any", [f"{run}/two", resumed])
    assert [end.status for end in (*one, *two)] == [0, 0, 0], [end.err for end in (*one, *two)]
    expected = losses(tmp_path, "one")
    assert losses(tmp_path, "two") == pytest.approx(expected, abs=1e-5)
    assert losses(tmp_path, "resumed") == pytest.approx(expected[1:], abs=1e-5)
