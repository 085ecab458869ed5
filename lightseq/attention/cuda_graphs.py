"""Short passes that a GPU repeats by itself: recorded as a CUDA graph where they come in the same memory again.

A pass is some tens of kernels, copies and waits. Launched one by one they take the host one to two milliseconds, which
is more than a short pass takes the GPU; a recording is one launch. Memory repeats from step to step in training, layer
by layer. What a pass needs besides is in a pool of the recordings, so only passes that are small are recorded.
"""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from lightseq.attention.passes import Pass
from lightseq.comm.transport import Transport
from lightseq.kernels.launches import Launch, Launches

MOST_FLOPS = 2e12  # of a pass: some three milliseconds of an H100, which hide what the host does for the next one
MOST_OUTBOX_BYTES = 2**28  # and of memory that a pass needs besides, some twice as much
TIMES_BEFORE = 2  # in the same places: who runs in ever other places shall record nothing
MOST_RECORDINGS = 512  # two passes of every layer
MOST_SEEN = 4096


class Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    bytes_sent: int
    launches: list[Launch]  # of which it reads tables


class Recordings:
    """Of the passes over one outbox. They hold addresses in it, and go with it."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Recording] = {}
        self._seen: Counter[Hashable] = Counter()
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._bytes, self._fails = 0, torch.cuda.get_allocator_backend() != "native"  # others tell nothing of a pool
        self._failed: torch.cuda.CUDAGraph | None = None

    def run(
        self, asked: Pass, places: Hashable, run: Callable[[], None], launches: Launches, transport: Transport
    ) -> None:
        """Runs a pass, by a recording if there is one. `places` stands for all that it touches and does."""
        key = (asked, places, torch.cuda.current_stream().stream_id)
        if (known := self.known.get(key)) is not None:
            known.graph.replay()
            transport.recorded(known.bytes_sent, self._bytes)
        elif self._comes_again(key) and (made := self._record(asked, run, launches, transport)) is not None:
            self.known[key] = made
            made.graph.replay()
            transport.recorded(0, self._bytes)
        else:
            run()

    def _comes_again(self, key: Hashable) -> bool:
        if self._fails or len(self.known) >= MOST_RECORDINGS or torch.cuda.is_current_stream_capturing():
            return False
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key] > TIMES_BEFORE

    def _record(
        self, asked: Pass, run: Callable[[], None], launches: Launches, transport: Transport
    ) -> Recording | None:
        """None where something in a pass cannot be recorded, as a kernel of somebody else's may hold."""
        graph, sent = torch.cuda.CUDAGraph(), transport.bytes_sent
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with _nothing_freed(), torch.cuda.stream(self._stream), launches.noted() as noted:
                graph.capture_begin(self._pool, "relaxed")  # other threads go on with what they are at
                try:
                    run()
                except BaseException:
                    with suppress(RuntimeError):  # what went wrong before is the reason
                        graph.capture_end()
                    raise
                graph.capture_end()
        except RuntimeError as error:
            self._give_up(graph, error, asked.rank)
            transport.recorded(sent - transport.bytes_sent, self._bytes)  # of what was not sent nothing counts
            return None
        self._bytes = sum(piece["total_size"] for piece in torch.cuda.memory_snapshot(self._pool))
        return Recording(graph, transport.bytes_sent - sent, noted)

    def _give_up(self, graph: torch.cuda.CUDAGraph, error: RuntimeError, rank: int) -> None:
        """torch leaves its allocator recording where the end of a recording fails: without care it would never give
        cached memory back again."""
        self._fails, self._failed = True, graph
        with suppress(RuntimeError):  # where it did end
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        if rank == 0:
            why = str(error).splitlines()[0]
            warnings.warn(
                f"short passes of attention are launched one by one, for recording failed: {why}", stacklevel=2
            )


@contextmanager
def _nothing_freed() -> Iterator[None]:
    """Of what only a search for cycles finds: memory that others map, or a graph, waits for the device as it goes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def is_short(asked: Pass) -> bool:
    """Whether the host may take longer for a pass than the GPU. Tables of packed documents do not come again."""
    small = asked.flops <= MOST_FLOPS and asked.outbox_bytes <= MOST_OUTBOX_BYTES
    return small and not asked.schedule.boundaries and all(asked.at_once.values())
