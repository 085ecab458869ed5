"""Ends of runs that cannot go on: one line, or the memory's table, on one rank; and all ranks end."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from lightseq.checkpoint.checkpoints import list_checkpoints
from lightseq.distributed.environment import report_error
from lightseq.distributed.mesh import World, exit_process, is_first_to, mark_done, wait_until_done
from lightseq.distributed.watchdog import RankNotResponding
from lightseq.training.terminal import Terminal
from lightseq.utils.formatting import first_line

RANK_0_SECONDS = 5.0  # that other ranks leave it to begin to explain an end
EXPLAINING_SECONDS = 60.0  # that they stay for it: the launcher ends all ranks once one has ended
# What others than torch's allocator say of a GPU that is full: the driver, Triton, cuBLAS, cuDNN, NCCL.
LIBRARIES_ENDED = re.compile(r"(?i:cuda|triton|nccl).*out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED")


@contextmanager
def explained_out_of_memory(
    world: World, terminal: Terminal | None, explain: Callable[[], Sequence[str]]
) -> Iterator[None]:
    """Says once what the memory was for and what to turn, and ends this process; the launcher ends the others.

    Mostly memory ends on all ranks alike: rank 0 then speaks, and another one only where that has none of it.
    `explain` gives the lines: what it was for, if that is known, and last the remedy.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        what = _memory_that_ended(error)
        if what is None:
            raise
        if terminal is not None:
            terminal.close()
        if not world.is_main:
            time.sleep(RANK_0_SECONDS)
        with suppress(Exception):  # a plan finds no memory either, the store ends with the rank that holds it
            if is_first_to("explain"):
                # Before what a plan takes seconds to find.
                report_error(f"rank {world.rank}: {what}")
                try:
                    print("\n".join(explain()), file=sys.stderr, flush=True)
                finally:
                    mark_done("explain")
            else:
                wait_until_done("explain", EXPLAINING_SECONDS)
        exit_process(1)


def _memory_that_ended(error: Exception) -> str | None:
    """Returns what ran out, and for how many bytes; None for other errors. torch has no class for the host's memory."""
    said = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return ". ".join(said.split(". ")[:2])
    if asked := re.search(r"DefaultCPUAllocator: .* allocate (\d+) bytes", said):
        return f"host out of memory. Tried to allocate {int(asked[1]) / 2**30:.2f} GiB"
    if isinstance(error, MemoryError):
        return ". ".join(filter(None, ["host out of memory", said]))
    return next((line.strip() for line in said.splitlines() if LIBRARIES_ENDED.search(line)), None)


@contextmanager
def explained_data(world: World, terminal: Terminal) -> Iterator[None]:
    """Ends this rank, with one line, on an example that cannot be read."""
    try:
        yield
    except (ValueError, OSError) as error:
        terminal.close()
        if is_first_to("explain the data"):
            report_error(f"rank {world.rank}: {error}")
        raise SystemExit(1) from error


@contextmanager
def explained_writing(path: Path, world: World, terminal: Terminal) -> Iterator[None]:
    """Ends this rank, with one line, on a disk that takes no more of a file."""
    try:
        yield
    except OSError as error:
        terminal.close()
        why = f"rank {world.rank}: {path} cannot be written: {error.strerror}"
        report_error(f"{why}; make room, and go on with --resume_from_checkpoint auto")
        raise SystemExit(1) from error


@contextmanager
def explained_silence() -> Iterator[None]:
    """Ends this rank, with one line, on a rank that lives but did not answer: the watchdog has nothing to say then."""
    try:
        yield
    except RankNotResponding as error:
        first = True
        with suppress(RuntimeError):  # the store may be gone
            first = is_first_to("explain a silence")
        why = f"{error}: {first_line(error.__cause__ or error)}"
        report_error(f"{why}; go on with --resume_from_checkpoint auto", prints=first)
        raise SystemExit(1) from error


def end_for_skipped_steps(
    step: int, skipped: int, what: str, output_dir: Path, world: World, terminal: Terminal
) -> None:
    """Ends the run, on every rank, after `skipped` steps in a row, the last of them `step`, that changed no weight."""
    if world.is_main:
        terminal.close()
        saved = list_checkpoints(output_dir)
        go_on = f"go on from {saved[-1]}, whose weights no skipped step has changed," if saved else "begin anew"
        which = f"steps {step - skipped + 1} to {step} were skipped, the last because {what}"
        report_error(f"{which}; {go_on} with other data or a lower --learning_rate")
    raise SystemExit(1)
