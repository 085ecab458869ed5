"""CUDA graphs of short passes that run again in the same memory.

A pass is tens of kernels, copies and waits. Launching them one by one takes the host one to two milliseconds, longer
than a short pass runs on the GPU. A graph is one launch. Training uses the same memory again in every step, so graphs
can be replayed. Their temporary memory comes from a separate pool, so only small passes are captured.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import NamedTuple

import torch

from lightseq.attention.pass_spec import PassSpec
from lightseq.comm.transport import Transport
from lightseq.kernels.fused.launches import Launch, Launches
from lightseq.utils.process import without_collection

MAX_FLOPS = 2e12  # about three milliseconds on an H100, long enough to hide the launches of the next pass
MAX_OUTBOX_BYTES = 2**28  # a pass needs about twice as much temporary memory
RUNS_BEFORE_CAPTURE = 2  # in the same memory
MAX_GRAPHS = 512  # two passes of every layer
MAX_SEEN = 4096


class CapturedPass(NamedTuple):
    graph: torch.cuda.CUDAGraph
    bytes_sent: int
    launches: list[Launch]  # their tables must live as long as the graph


class GraphCache:
    """Cache of the graphs that use one outbox. They contain addresses in it, and are dropped with it."""

    def __init__(self) -> None:
        self.graphs: dict[Hashable, CapturedPass] = {}
        self._seen: Counter[Hashable] = Counter()
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._bytes = 0
        self._disabled = torch.cuda.get_allocator_backend() != "native"  # others cannot report a pool's size
        self._failed_graph: torch.cuda.CUDAGraph | None = None

    def run(
        self, spec: PassSpec, memory_key: Hashable, run: Callable[[], None], launches: Launches, transport: Transport
    ) -> None:
        """Runs a pass, as a graph if one is captured. `memory_key` identifies its memory and its computation."""
        key = (spec, memory_key, torch.cuda.current_stream().stream_id)
        if (known := self.graphs.get(key)) is not None:
            known.graph.replay()
            transport.after_replay(known.bytes_sent, self._bytes)
        elif self._should_capture(key) and (made := self._capture(spec, run, launches, transport)) is not None:
            self.graphs[key] = made
            made.graph.replay()
            transport.after_replay(0, self._bytes)
        else:
            run()

    def _should_capture(self, key: Hashable) -> bool:
        if self._disabled or len(self.graphs) >= MAX_GRAPHS or torch.cuda.is_current_stream_capturing():
            return False
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key] > RUNS_BEFORE_CAPTURE

    def _capture(
        self, spec: PassSpec, run: Callable[[], None], launches: Launches, transport: Transport
    ) -> CapturedPass | None:
        """Captures a pass. Returns None if something in it cannot be captured, such as a kernel of another library."""
        graph, sent = torch.cuda.CUDAGraph(), transport.bytes_sent
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            # The collector could free mapped memory or a graph, which would wait for the device.
            with without_collection(), torch.cuda.stream(self._stream), launches.collect() as collected:
                graph.capture_begin(self._pool, "relaxed")  # other threads may go on
                try:
                    run()
                except BaseException:
                    with suppress(RuntimeError):  # the first error matters
                        graph.capture_end()
                    raise
                graph.capture_end()
        except RuntimeError as error:
            self._give_up(graph, error, spec.rank)
            transport.after_replay(sent - transport.bytes_sent, self._bytes)  # nothing was sent
            return None
        self._bytes = sum(piece["total_size"] for piece in torch.cuda.memory_snapshot(self._pool))
        return CapturedPass(graph, transport.bytes_sent - sent, collected)

    def _give_up(self, graph: torch.cuda.CUDAGraph, error: RuntimeError, rank: int) -> None:
        """Turns capture off, and ends it in torch's allocator, which would otherwise never release cached memory."""
        self._disabled, self._failed_graph = True, graph
        with suppress(RuntimeError):  # capture may have ended already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        if rank == 0:
            why = str(error).splitlines()[0]
            warnings.warn(f"short attention passes run without CUDA graphs: recording one failed ({why})", stacklevel=2)


def is_short(spec: PassSpec) -> bool:
    """Returns whether launching a pass may take longer than running it. Tables of packed documents do not repeat."""
    small = spec.flops <= MAX_FLOPS and spec.outbox_bytes <= MAX_OUTBOX_BYTES
    return small and spec.schedule.nodes is None and all(spec.in_final_dtype.values())
