"""Results that all ranks share, and tasks that one rank does for all."""

import socket
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lightseq.distributed.world import World, report_error
from lightseq.utils.formatting import first_line

T = TypeVar("T")


def on_all_ranks(world: World, prepare: Callable[[], T]) -> T:
    """Returns `prepare()` on every rank; if it raises ValueError or OSError on any, all ranks exit with status 2.

    The lowest failing rank prints its error in one line. `prepare` must not wait for other ranks unless it fails on all
    of them alike.
    """
    refusal, result = None, None
    try:
        result = prepare()
    except (ValueError, OSError) as error:
        where = f" (rank {world.rank} on {socket.gethostname()})" if world.rank else ""
        refusal = (first_line(error) if isinstance(error, OSError) else " ".join(str(error).split())) + where
    refusals: list[str | None] = [None] * world.size
    dist.all_gather_object(refusals, refusal)
    first = next((rank for rank, line in enumerate(refusals) if line is not None), None)
    if first is None:
        assert refusal is None
        return result  # type: ignore[return-value]
    report_error(str(refusals[first]), prints=world.rank == first)
    dist.barrier()  # a launcher ends all processes as soon as one ends: print first
    raise SystemExit(2)


def from_rank_0(value: T) -> T:
    """Returns rank 0's value on every rank. `value` must pickle."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def is_first_to(task: str) -> bool:
    """Returns True on the rank that calls this first for `task`. Waits for no rank, so a failing one may call it."""
    return dist.distributed_c10d._get_default_store().add(f"lightseq: {task}", 1) == 1


def mark_done(task: str) -> None:
    """Marks a task as done for the ranks in `wait_until_done`."""
    dist.distributed_c10d._get_default_store().set(f"lightseq: {task}: done", "")


def wait_until_done(task: str, seconds: float) -> None:
    """Waits until another rank has marked the task as done, at most `seconds`."""
    store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + seconds
    while time.monotonic() < until and not store.check([f"lightseq: {task}: done"]):
        time.sleep(0.1)
