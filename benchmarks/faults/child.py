"""The training program inside a rank that is to break, and the faults that are planted in it."""

import resource
import threading
import time
from typing import Any

import torch

import llama2
from lightseq.checkpoint import state_files
from lightseq.training import journal, trainer
from lightseq.training.command import main as train_family
from lightseq.training.engine import FsdpEngine, Update


def train(command: list[str]) -> None:
    torch.set_num_threads(1)
    train_family(llama2.FAMILY, command)


def slow(rank: int, seconds: float) -> None:
    """Makes every step take longer, so that a moment can be chosen."""
    step = trainer.Trainer._step

    def slower(self: trainer.Trainer, index: int) -> Any:
        time.sleep(seconds)
        return step(self, index)

    trainer.Trainer._step = slower  # type: ignore


def slow_disk(rank: int, seconds: float) -> None:
    """Makes files take longer to write, so that saving is under way for a while."""
    write = state_files.write

    def slower(*args: Any) -> Any:
        time.sleep(seconds / 2)
        found = write(*args)
        time.sleep(seconds / 2)
        return found

    state_files.write = slower  # type: ignore[assignment]


def raises(rank: int, culprit: int, at: int, while_saving: bool) -> None:
    """Makes one rank fail in a step, as a bug or a broken library would."""
    if rank != culprit:
        return
    step = trainer.Trainer._step

    def failing(self: trainer.Trainer, index: int) -> Any:
        saving = any(thread.name == "saving" for thread in threading.enumerate())
        if index + 1 >= at and (saving or not while_saving):
            raise RuntimeError("planted")
        return step(self, index)

    trainer.Trainer._step = failing  # type: ignore


def nonfinite(rank: int, culprit: int, first: int, last: int, most: int) -> None:
    """Makes one rank's gradient of one parameter NaN from one step to another."""
    update, seen = FsdpEngine.update, [0]
    journal.MOST_SKIPPED = most

    def planted(self: FsdpEngine) -> Update:
        seen[0] += 1
        if rank == culprit and first <= seen[0] <= last:
            gradient = dict(self.model.named_parameters())["model.layers.1.mlp.up_proj.weight"].grad
            assert gradient is not None
            gradient.to_local().flatten()[:1] = float("nan")  # type: ignore[attr-defined]
        return update(self)

    FsdpEngine.update = planted  # type: ignore[method-assign]


def skips(rank: int, at: int) -> None:
    """Leaves a step out, as if its gradient were not finite."""
    nonfinite(rank, 0, at, at, 20)


def short_files(rank: int, culprit: int, most_bytes: int) -> None:
    """Keeps one rank's files from growing beyond a size."""
    if rank == culprit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
