"""Evaluations across ranks equal plain transformers on one process: loss by position, and what is found in a text."""

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import Ended
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import spawn

from lightseq import evaluate
from lightseq.__main__ import BOTH
from lightseq.mesh import World
from lightseq.perplexity import bin_starts, perplexity
from lightseq.tokens import write_token_directory

LENGTH, VOCABULARY = 61, 64  # a length that divides by no number of chunks
SIZES = (150, 2, 61, 62, 1, 40)
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=2048,
)  # fmt: skip


def evaluation(rank: int, words: str) -> Ended:
    """One evaluation on this rank, in the process group that the test has joined already."""
    size = dist.get_world_size()
    world = World(rank, size, rank, size, torch.device("cpu"))
    evaluate.start = lambda timeout_seconds: contextlib.nullcontext(world)  # type: ignore[assignment]
    status, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = evaluate.main(BOTH, words.split())
        except SystemExit as end:
            status = int(end.code or 0)
    dist.barrier()
    return Ended(status, out.getvalue(), err.getvalue())


def evaluations(rank: int, runs: list[str]) -> list[Ended]:
    return [evaluation(rank, words) for words in runs]


class Files(NamedTuple):
    """Models and data, and where evaluations may write."""

    root: Path

    def words(self, name: str, flags: str, model: str = "model") -> str:
        return f"--model_name_or_path {self.root / model} --output_dir {self.root / name} {flags}"

    def records(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        lines = (self.root / name / evaluate.RECORD).read_text().splitlines()
        summary, *rows = [json.loads(line) for line in lines]
        return summary, rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("evaluate")
    torch.manual_seed(0)
    with torch.no_grad():
        model = LlamaForCausalLM(CONFIG)
        for parameter in model.parameters():
            parameter.mul_(3)  # so that what is predicted differs from place to place
    model.save_pretrained(root / "model")
    write_token_directory(root / "data", documents(), VOCABULARY, dict)
    return Files(root)


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCABULARY, size) for size in SIZES]


# ---- loss by position -----------------------------------------------------------------------------------------------


def plain_losses(root: Path) -> tuple[list[int], list[float]]:
    """Position and loss of every target, by nothing but transformers; windows of a document meet without a gap."""
    model = LlamaForCausalLM.from_pretrained(root / "model")
    positions, losses = [], []
    for document in map(torch.from_numpy, documents()):
        for start in range(0, len(document) - 1, LENGTH):
            targets = document[start + 1 : start + LENGTH + 1]
            with torch.no_grad():
                logits = model(document[None, start : start + len(targets)]).logits[0]
            losses += F.cross_entropy(logits, targets, reduction="none").tolist()
            positions += range(len(targets))
    return positions, losses


LOSS = {
    "powers": "--bins powers --schedule zigzag --per_device_eval_batch_size 2",
    "equal": "--bins 5 --schedule striped",
    "groups": "--schedule ring --sequence_parallel_size 2 --per_device_eval_batch_size 2",
}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_loss_by_position_is_that_of_one_process(files: Files, world: int) -> None:
    runs = {name: flags for name, flags in LOSS.items() if name != "groups" or world == 4}
    data = f"--data_path {files.root / 'data'} --model_max_length {LENGTH}"
    words = [files.words(f"{name}-{world}", f"{data} {flags}") for name, flags in runs.items()]
    for ends in spawn(world, evaluations, words):
        assert [end.status for end in ends] == [0] * len(words), ends
    positions, losses = (np.array(column) for column in plain_losses(files.root))
    for name in runs:
        summary, bins = files.records(f"{name}-{world}")
        assert summary["valid_tokens"] == len(losses) == sum(size - 1 for size in SIZES)
        assert summary["loss"] == pytest.approx(losses.mean(), rel=1e-5)
        assert summary["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
        assert [b["first"] for b in bins] == list(bin_starts("5" if name == "equal" else "powers", LENGTH))
        for b in bins:
            inside = (positions >= b["first"]) & (positions <= b["last"])
            assert b["valid_tokens"] == inside.sum() > 0
            assert b["loss"] == pytest.approx(losses[inside].mean(), rel=1e-5)
        whole = sum(b["loss"] * b["valid_tokens"] for b in bins)
        assert whole / summary["valid_tokens"] == pytest.approx(summary["loss"], rel=1e-12)


def test_bins_cover_every_position_once() -> None:
    assert bin_starts("powers", 1) == (0,)
    assert bin_starts("powers", 8) == (0, 1, 2, 4) and bin_starts("powers", 9) == (0, 1, 2, 4, 8)
    assert bin_starts("3", 10) == (0, 3, 6)
    for bins in ("0", "11", "-1", "many"):
        with pytest.raises(ValueError, match=f"--bins {bins}: give powers, or a number of equal bins from 1 to 10"):
            bin_starts(bins, 10)


def test_a_perplexity_too_large_for_a_number_is_none() -> None:
    assert perplexity(None) is None and perplexity(1e4) is None
    assert perplexity(2.0) == pytest.approx(math.exp(2))
