"""The examples in examples/ are run as their readers will, and train as plain transformers does."""

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from transformers import LlamaForCausalLM
from worlds import spawn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import distill  # noqa: E402
import dpo  # noqa: E402
import images  # noqa: E402
import sft  # noqa: E402
import shared_prefix  # noqa: E402
import train_loop  # noqa: E402
import with_accelerate  # noqa: E402
import with_fsdp2  # noqa: E402
import with_trainer  # noqa: E402

from lightseq.distributed.world import World  # noqa: E402

Batch = dict[str, torch.Tensor]
LOOPS: dict[str, Any] = {"images": images, "distill": distill, "shared_prefix": shared_prefix}


def fresh_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(train_loop.CONFIG)


def plain_steps(
    model: LlamaForCausalLM, steps: Sequence[Sequence[Batch]], optimizer: torch.optim.Optimizer, clip: float = math.inf,
    decays: bool = False,
) -> Iterator[float]:  # fmt: skip
    """Plain torch on whole batches: a step's loss is the sum over its targets, of all its batches, over their count."""
    peak = optimizer.param_groups[0]["lr"]
    for number, batches in enumerate(steps):
        targets = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        optimizer.param_groups[0]["lr"] = peak * (1 - number / len(steps) if decays else 1)
        shares = [model(**batch, num_items_in_batch=targets).loss for batch in batches]
        sum(shares).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        yield sum(shares).item()


def loops(rank: int, size: int) -> list[list[float]]:
    world = World(rank, size, rank, size, torch.device("cpu"))
    return [train_loop.train(world), with_fsdp2.train(world)]


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    """Losses of both loops without lightseq: the same seed draws the same weights, then the same batch."""
    found = []
    # SGD, because AdamW would hide gradients of another scale, as FSDP2's mean in place of a sum.
    for optimizer, learning_rate in ((torch.optim.AdamW, 3e-3), (torch.optim.SGD, with_fsdp2.LEARNING_RATE)):
        model = fresh_model()
        ids = torch.randint(train_loop.CONFIG.vocab_size, (train_loop.BATCH, train_loop.LENGTH))
        steps = [[{"input_ids": ids, "labels": ids}]] * train_loop.STEPS
        found.append([*plain_steps(model, steps, optimizer(model.parameters(), lr=learning_rate))])
        assert found[-1][-1] < found[-1][0] - 0.3, "a loop that learns nothing would agree with anything"
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_loops_equal_plain_transformers_on_every_rank(world: int, expected: list[list[float]]) -> None:
    for by_loop in spawn(world, loops, world):
        for losses, wanted in zip(by_loop, expected, strict=True):
            assert losses == pytest.approx(wanted, abs=1e-5)


def example(rank: int, name: str, size: int) -> list[float]:
    return LOOPS[name].train(World(rank, size, rank, size, torch.device("cpu")))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "learnt"), [("images", 0.3), ("distill", 0.049)])
def test_other_loops_give_the_same_losses_on_two_ranks(name: str, learnt: float) -> None:
    (wanted,) = spawn(1, example, name, 1)
    assert wanted[-1] < wanted[0] - learnt
    for losses in spawn(2, example, name, 2):
        assert losses == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_the_loop_over_answers_to_one_prompt_equals_answers_one_by_one() -> None:
    (wanted,) = spawn(1, answers_one_by_one)
    for losses in spawn(2, example, "shared_prefix", 2):
        assert losses == pytest.approx(wanted, abs=1e-5)


def answers_one_by_one(rank: int) -> list[float]:
    """Trains as the example does in plain transformers, which computes the prompt for every answer."""
    model, losses = fresh_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompt = torch.randint(256, (shared_prefix.PROMPT,)).tolist()
    rows = torch.tensor(
        [prompt + torch.randint(256, (shared_prefix.LENGTH,)).tolist() for _ in range(shared_prefix.ANSWERS)]
    )
    advantages = torch.linspace(-1, 1, shared_prefix.ANSWERS)
    for _ in range(shared_prefix.STEPS):
        log_p = model(rows).logits[:, shared_prefix.PROMPT - 1 : -1].log_softmax(-1)
        log_probs = log_p.gather(-1, rows[:, shared_prefix.PROMPT :, None]).squeeze(-1)
        loss = -(advantages[:, None] * log_probs).sum() / log_probs.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- Trainer, TRL and accelerate -----------------------------------------------------------------------------------


def others(rank: int) -> dict[str, list[float]]:
    """Returns the losses of the examples that use `lightseq.integrations`."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            "Trainer": with_trainer.train(folder),
            "accelerate": with_accelerate.train(),
            "SFT": sft.train(folder),
            "DPO": dpo.train(folder),
        }


def sgd(model: LlamaForCausalLM) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=with_trainer.LEARNING_RATE)


def loader(**options: object) -> DataLoader:
    return DataLoader(with_trainer.documents(), 2, collate_fn=with_trainer.collate, **options)


def in_order_of_trainer() -> Iterator[Batch]:
    """Yields the batches of three epochs, shuffled as Trainer does with its default seed."""
    for epoch in range(3):
        order = RandomSampler(with_trainer.documents(), generator=torch.Generator().manual_seed(42 + epoch))
        yield from loader(sampler=order)


def plain_losses() -> tuple[list[float], list[float]]:
    """Returns the losses of `with_trainer` and of `with_accelerate` by a plain loop."""
    batches = [*in_order_of_trainer()]
    pairs = list(zip(batches[::2], batches[1::2], strict=True))
    model = fresh_model()
    by_trainer = [*plain_steps(model, pairs, sgd(model), clip=1.0, decays=True)]
    with torch.no_grad():
        by_trainer.append(model(**next(iter(loader()))).loss.item())
    in_order = [[batch] for _ in range(with_accelerate.EPOCHS) for batch in loader()]
    model = fresh_model()
    return by_trainer, [*plain_steps(model, in_order, sgd(model), clip=1.0)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_the_other_examples_equal_one_process_on_every_rank(world: int) -> None:
    by_trainer, by_accelerate = plain_losses()
    (wanted,) = spawn(1, others)
    assert wanted["Trainer"] == pytest.approx(by_trainer, abs=1e-5)
    assert wanted["accelerate"] == pytest.approx(by_accelerate, abs=1e-5)
    for name in ("SFT", "DPO"):
        assert wanted[name][-2] < 0.95 * wanted[name][0], "a trainer that learns nothing would agree with anything"
    for got in spawn(world, others):
        for name, losses in wanted.items():
            assert got[name] == pytest.approx(losses, abs=1e-5), name


# ---- as scripts -----------------------------------------------------------------------------------------------------

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], LAUNCHER])
def test_the_loop_runs_uninstalled_and_prints_its_losses(launcher: list[str], expected: list[list[float]]) -> None:
    lines = [line.split() for line in printed("train_loop.py", launcher)]
    assert [int(words[1]) for words in lines] == list(range(1, train_loop.STEPS + 1))
    assert [float(words[3]) for words in lines] == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], LAUNCHER])
@pytest.mark.parametrize(
    "script", ["distill.py", "with_fsdp2.py", "with_trainer.py", "with_accelerate.py", "sft.py", "dpo.py", "grpo.py"]
)
def test_the_other_scripts_run_uninstalled(script: str, launcher: list[str]) -> None:
    assert sum("loss" in line for line in printed(script, launcher)) >= 5


def printed(script: str, launcher: list[str]) -> list[str]:
    command = [sys.executable, *launcher, f"examples/{script}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
