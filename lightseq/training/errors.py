"""Fatal errors of a run: each is explained once, on one rank, and ends all ranks."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from lightseq.checkpoint.checkpoints import list_checkpoints, step_of
from lightseq.distributed.agreement import is_first_to, mark_done, wait_until_done
from lightseq.distributed.watchdog import RankNotResponding
from lightseq.distributed.world import World, exit_process, report_error
from lightseq.training.terminal import Terminal
from lightseq.utils.formatting import first_line

RANK_0_SECONDS = 5.0  # head start that lets rank 0 explain the error
EXPLAINING_SECONDS = 60.0  # other ranks wait this long: the launcher kills all ranks once one has ended
HOST_OUT_OF_MEMORY = "host out of memory"
# Out-of-memory messages of the driver, Triton, cuBLAS, cuDNN and NCCL, which torch's allocator does not see.
LIBRARY_OUT_OF_MEMORY = re.compile(r"(?i:cuda|triton|nccl).*out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED")


@contextmanager
def exit_on_out_of_memory(
    world: World,
    terminal: Terminal | None,
    explain: Callable[[], Sequence[str]],
    fall_back: Callable[[str], object] | None = None,
) -> Iterator[None]:
    """Prints once what used the memory and how to reduce it, and ends this process. The launcher ends the others.

    Memory usually runs out on all ranks, and rank 0 explains. Another rank does if rank 0 has no such error.
    `explain` returns the lines to print: the breakdown, if known, and the remedy last. `fall_back` is called first with
    the reason if GPU memory ran out, and returns if there is nothing left to try.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = _out_of_memory_reason(error)
        if reason is None:
            raise
        if terminal is not None:
            terminal.close()
        if fall_back is not None and not reason.startswith(HOST_OUT_OF_MEMORY):
            fall_back(reason)
        if not world.is_main:
            time.sleep(RANK_0_SECONDS)
        with suppress(Exception):  # planning may run out of memory too, and the store may be gone
            if is_first_to("explain"):
                report_error(f"rank {world.rank}: {reason}")  # before the planner, which takes seconds
                try:
                    print("\n".join(explain()), file=sys.stderr, flush=True)
                finally:
                    mark_done("explain")
            else:
                wait_until_done("explain", EXPLAINING_SECONDS)
        exit_process(1)


def _out_of_memory_reason(error: Exception) -> str | None:
    """Returns which memory ran out and the bytes requested; None for other errors.

    torch raises a plain RuntimeError for host memory.
    """
    message = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return ". ".join(message.split(". ")[:2])
    if requested := re.search(r"DefaultCPUAllocator: .* allocate (\d+) bytes", message):
        return f"{HOST_OUT_OF_MEMORY}. Tried to allocate {int(requested[1]) / 2**30:.2f} GiB"
    if isinstance(error, MemoryError):
        return ". ".join(filter(None, [HOST_OUT_OF_MEMORY, message]))
    return next((line.strip() for line in message.splitlines() if LIBRARY_OUT_OF_MEMORY.search(line)), None)


@contextmanager
def exit_on_data_error(world: World, terminal: Terminal) -> Iterator[None]:
    """Ends this rank with one line if an example cannot be read."""
    try:
        yield
    except (ValueError, OSError) as error:
        terminal.close()
        if is_first_to("explain the data"):
            report_error(f"rank {world.rank}: {error}")
        raise SystemExit(1) from error


@contextmanager
def exit_on_write_error(path: Path, world: World, terminal: Terminal, saves: bool) -> Iterator[None]:
    """Ends this rank with one line if a file cannot be written. `saves`: the run has checkpoints to resume from."""
    try:
        yield
    except OSError as error:
        terminal.close()
        reason = f"rank {world.rank}: {path} cannot be written: {error.strerror}"
        remedy = "resume with --resume_from_checkpoint auto" if saves else "start again"
        report_error(f"{reason}; free some space, then {remedy}")
        raise SystemExit(1) from error


@contextmanager
def exit_on_no_response() -> Iterator[None]:
    """Ends this rank with one line if another rank is alive but did not respond, which the watchdog cannot detect."""
    try:
        yield
    except RankNotResponding as error:
        first = True
        with suppress(RuntimeError):  # the store may be gone
            first = is_first_to("explain a silence")
        reason = f"{error}: {first_line(error.__cause__ or error)}"
        report_error(f"{reason}; resume with --resume_from_checkpoint auto", prints=first)
        raise SystemExit(1) from error


def end_for_skipped_steps(
    step: int, count: int, reason: str, output_dir: Path, world: World, terminal: Terminal
) -> None:
    """Ends the run on every rank after `count` skipped steps in a row, up to step number `step`."""
    saved = list_checkpoints(output_dir) if world.is_main else []
    remedy = f"resume from {saved[-1]}, whose weights are still good," if saved else "start over"
    _end(f"steps {step - count + 1} to {step} were skipped, the last because {reason}; {remedy}", world, terminal)


def end_for_nonfinite_losses(step: int, count: int, output_dir: Path, world: World, terminal: Terminal) -> None:
    """Ends the run on every rank after `count` losses in a row that are not finite, up to step number `step`.

    The weights of later checkpoints give such losses, so the newest one before is named.
    """
    first = step - count + 1
    saved = [path for path in list_checkpoints(output_dir) if step_of(path) < first - 1] if world.is_main else []
    remedy = f"resume from {saved[-1]}" if saved else "start over"
    _end(f"steps {first} to {step} have a loss that is not finite; {remedy}", world, terminal)


def _end(problem: str, world: World, terminal: Terminal) -> None:
    if world.is_main:
        terminal.close()
        report_error(f"{problem} with other data or a lower --learning_rate")
    raise SystemExit(1)
