"""The benchmark of GRPO's training part."""

import json
from pathlib import Path

import pytest
from programs import refusal
from transformers import Qwen3Config

from benchmarks import grpo


def save_model(path: Path) -> Path:
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    Qwen3Config(**sizes, **heads).save_pretrained(path)
    return path


def test_completions_that_processes_cannot_share_are_refused(tmp_path: Path) -> None:
    said = refusal(grpo.main, "--model", tmp_path, "--generations", 6, "--nproc_per_node", 4)
    assert "--generations 6 is not divisible by --rows x --nproc_per_node = 4" in said


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--lora_rank=2", "--rows=2"])
def test_both_trainers_have_the_same_losses_and_log_probabilities(tmp_path: Path, more: str) -> None:
    output = tmp_path / "grpo.jsonl"
    words = ["--model", str(save_model(tmp_path / "model")), "--prompt", "16", "--completions", "32", more]
    assert grpo.main([*words, "--updates", "1", "--output", str(output)]) == 0
    theirs, ours = map(json.loads, output.read_text().splitlines())
    assert theirs["skipped"] is None and ours["skipped"] is None
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
    assert ours["grad_norms"] == pytest.approx(theirs["grad_norms"], rel=1e-4)
    assert ours["log_probs_beside_trl"]["completions"] == 8
    assert ours["log_probs_beside_trl"]["max"] < 1e-5
