"""The example in examples/ is run as its readers will, and trains as plain transformers does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from worlds import spawn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_loop  # noqa: E402

from lightseq.mesh import World  # noqa: E402


def example(rank: int, world: int) -> list[float]:
    return train_loop.train(World(rank, world, rank, world, torch.device("cpu")))


def plain() -> list[float]:
    """The same loop without lightseq: the same seed draws the same weights, then the same batch."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(train_loop.CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    input_ids = torch.randint(train_loop.CONFIG.vocab_size, (train_loop.BATCH, train_loop.LENGTH))
    losses = []
    for _ in range(train_loop.STEPS):
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def expected() -> list[float]:
    losses = plain()
    assert losses[-1] < losses[0] - 0.3, "a loop that learns nothing would agree with anything"
    return losses


@pytest.mark.parametrize("world", [2, 3])
def test_the_loop_equals_plain_transformers_on_every_rank(world: int, expected: list[float]) -> None:
    for losses in spawn(world, example, world):
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]])
def test_the_script_runs_uninstalled_and_prints_its_losses(launcher: list[str], expected: list[float]) -> None:
    command = [sys.executable, *launcher, "examples/train_loop.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [int(words[1]) for words in lines] == list(range(1, train_loop.STEPS + 1))
    assert [float(words[3]) for words in lines] == pytest.approx(expected, abs=1e-5)
