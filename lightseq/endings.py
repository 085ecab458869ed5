"""How a run ends that cannot go on: one line, or the memory's table, on one rank; and all of them end."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from lightseq.checkpoint import checkpoints
from lightseq.config import TrainConfig
from lightseq.memory import Breakdown
from lightseq.mesh import World, first_to, leave
from lightseq.plan_training import out_of_memory
from lightseq.terminal import Terminal
from lightseq.tokens import first_line
from lightseq.watchdog import Unanswered

RANK_0_SECONDS = 5.0  # that other ranks leave it to explain an end


@contextmanager
def explained_out_of_memory(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    world: World,
    terminal: Terminal,
    measured: Callable[[], Breakdown | None],
) -> Iterator[None]:
    """Says once what the memory was for and what to turn, and ends this process; the launcher ends the others.

    Mostly memory ends on all ranks alike: rank 0 then speaks, and another one only where that has none of it.
    `measured` is what the peak was made of, where that is known already.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        terminal.close()
        if not world.is_main:
            time.sleep(RANK_0_SECONDS)
        if first_to("explain"):
            what = ". ".join(str(error).split(". ")[:2])  # what happened, and for how many bytes
            *parts, remedy = out_of_memory(config, model_config, world, measured())
            print("\n".join([*parts, f"error: rank {world.rank}: {what}", remedy]), file=sys.stderr, flush=True)
        leave(1)


@contextmanager
def explained_data(world: World, terminal: Terminal) -> Iterator[None]:
    """What is wrong with an example shows when it is read: one line, and this rank ends."""
    try:
        yield
    except (ValueError, OSError) as error:
        terminal.close()
        if first_to("explain the data"):
            print(f"error: rank {world.rank}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


@contextmanager
def explained_writing(path: Path, world: World, terminal: Terminal) -> Iterator[None]:
    """A disk that takes no more of a file: one line, and this rank ends."""
    try:
        yield
    except OSError as error:
        terminal.close()
        why = f"error: rank {world.rank}: {path} cannot be written: {error.strerror}"
        print(f"{why}; make room, and go on with --resume_from_checkpoint auto", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


@contextmanager
def explained_silence() -> Iterator[None]:
    """A rank did not answer and yet lives, so that the watchdog has nothing to say: one line, and this rank ends."""
    try:
        yield
    except Unanswered as error:
        first = True
        with suppress(RuntimeError):  # the store may be gone
            first = first_to("explain a silence")
        if first:
            why = f"error: {error}: {first_line(error.__cause__ or error)}"
            print(f"{why}; go on with --resume_from_checkpoint auto", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def end_for_skipped_steps(
    step: int, skipped: int, what: str, output_dir: Path, world: World, terminal: Terminal
) -> None:
    """Ends the run, on every rank, after `skipped` steps in a row, the last of them `step`, that changed no weight."""
    if world.is_main:
        terminal.close()
        saved = checkpoints(output_dir)
        go_on = f"go on from {saved[-1]}, whose weights no skipped step has changed," if saved else "begin anew"
        which = f"steps {step - skipped + 1} to {step} were skipped, the last because {what}"
        print(f"error: {which}; {go_on} with other data or a lower --learning_rate", file=sys.stderr, flush=True)
    raise SystemExit(1)
