"""The training program inside a rank that is to break, and the faults that are planted in it."""

import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import llama2
from lightseq.checkpoint import state_files
from lightseq.training import metrics
from lightseq.training.command import main as train_family
from lightseq.training.engine import FsdpEngine
from lightseq.training.loop import Trainer


def train(command: list[str]) -> None:
    torch.set_num_threads(1)
    train_family(llama2.FAMILY, command)


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Replaces a function by one that first calls `action` with the same arguments."""
    function = getattr(owner, name)

    def changed(*args: Any) -> Any:
        action(*args)
        return function(*args)

    setattr(owner, name, changed)


def slow(rank: int, seconds: float) -> None:
    """Makes every step take longer, so that a moment can be chosen."""
    before(Trainer, "step", lambda *_: time.sleep(seconds))


def slow_disk(rank: int, seconds: float) -> None:
    """Makes files take longer to write, so that saving is under way for a while."""
    before(state_files, "write", lambda *_: time.sleep(seconds))


def raises(rank: int, culprit: int, at: int, while_saving: bool) -> None:
    """Makes one rank fail in a step, as a bug or a broken library would."""

    def fail(trainer: Trainer, index: int) -> None:
        saving = any(thread.name == "saving" for thread in threading.enumerate())
        if rank == culprit and index + 1 >= at and (saving or not while_saving):
            raise RuntimeError("planted")

    before(Trainer, "step", fail)


def nonfinite(rank: int, culprit: int, first: int, last: int, most: int) -> None:
    """Makes one rank's gradient of one parameter NaN from one step to another."""
    updates = [0]
    metrics.MOST_SKIPPED = most

    def plant(engine: FsdpEngine) -> None:
        updates[0] += 1
        if rank == culprit and first <= updates[0] <= last:
            gradient = dict(engine.model.named_parameters())["model.layers.1.mlp.up_proj.weight"].grad
            assert gradient is not None
            gradient.to_local().flatten()[:1] = float("nan")  # type: ignore[attr-defined]

    before(FsdpEngine, "update", plant)


def skips(rank: int, at: int) -> None:
    """Leaves a step out, as if its gradient were not finite."""
    nonfinite(rank, 0, at, at, 20)


def short_files(rank: int, culprit: int, most_bytes: int) -> None:
    """Keeps one rank's files from growing beyond a size."""
    if rank == culprit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
