"""Choice of a transport by name, and variants that turn off overlap, CUDA graphs or communication to measure them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.comm.routed import make_routed, ranks_by_host
from lightseq.comm.symmetric import make_symmetric
from lightseq.comm.transport import BLOCKING, WITHOUT_CUDA_GRAPHS, Exchange, Outbox, SendRecvTransport, Transport


class _WrappedTransport:
    """Base of transports that wrap another one and change one thing about it."""

    def __init__(self, inner: Transport, suffix: str) -> None:
        self.name, self.fallback_reason = inner.name + suffix, inner.fallback_reason
        self._inner = inner

    @property
    def supports_graphs(self) -> bool:
        return self._inner.supports_graphs

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent

    @property
    def buffer_bytes(self) -> int:
        return self._inner.buffer_bytes

    @property
    def graph_bytes(self) -> int:
        return self._inner.graph_bytes

    def outbox(self, size: int) -> AbstractContextManager[Outbox]:
        return self._inner.outbox(size)

    def peer_view(self, rank: int, here: Tensor) -> Tensor:
        return self._inner.peer_view(rank, here)

    def exchange(self, exchange: Exchange) -> Callable[[], None]:
        return self._inner.exchange(exchange)

    def after_replay(self, bytes_sent: int, graph_bytes: int) -> None:
        self._inner.after_replay(bytes_sent, graph_bytes)


class Blocking(_WrappedTransport):
    """Transport that waits for every exchange before the next tile, to measure the gain of overlap."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, BLOCKING)

    def exchange(self, exchange: Exchange) -> Callable[[], None]:
        self._inner.exchange(exchange)()
        return lambda: None


class WithoutCudaGraphs(_WrappedTransport):
    """Transport without CUDA graphs of short passes, to measure their gain."""

    supports_graphs = False

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, WITHOUT_CUDA_GRAPHS)


class NoTransport:
    """Transport that moves nothing, to measure a schedule without its communication.

    Memory is filled with this rank's own data when it is first used, because a GPU at its power limit computes 10%
    faster on zeros.
    """

    name, fallback_reason = "none", ""
    buffer_bytes = graph_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.bytes_sent = 0
        self._seen: set[tuple[int, int]] = set()
        self._device, self.supports_graphs = device, device.type == "cuda"
        self._outbox = Outbox(torch.empty(0, dtype=torch.uint8, device=device))

    @contextmanager
    def outbox(self, size: int) -> Iterator[Outbox]:
        if size > self._outbox.memory.numel():
            self._outbox = Outbox(torch.randint(256, (size,), dtype=torch.uint8, device=self._device))
        yield self._outbox

    def peer_view(self, rank: int, here: Tensor) -> Tensor:
        return here

    def exchange(self, exchange: Exchange) -> Callable[[], None]:
        received = [r.remote if r.into is None else r.into for r in exchange.receives]
        for _, remote, into in exchange.receives:
            if into is not None and (memory := (into.data_ptr(), into.nbytes)) not in self._seen:
                self._seen.add(memory)
                if into.is_cuda and torch.cuda.is_current_stream_capturing():
                    _copy_once(into, remote)
                else:
                    into.copy_(remote)
        return lambda: exchange.on_received(received) if exchange.on_received is not None else None

    def after_replay(self, bytes_sent: int, graph_bytes: int) -> None:
        pass


def _copy_once(into: Tensor, remote: Tensor) -> None:
    """Copies now, outside the CUDA graph that is being captured."""
    aside = torch.cuda.Stream(into.device)
    while True:  # torch reuses a few streams, among them the capturing one
        with torch.cuda.stream(aside):
            if not torch.cuda.is_current_stream_capturing():
                into.copy_(remote)
                aside.synchronize()
                return
        aside = torch.cuda.Stream(into.device)


def make_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Makes a transport by name. Raises ValueError for one that cannot work here.

    `auto` is gloo on CPU. On GPUs it is symmetric between ranks that can map each other's memory, and nccl between
    others. `none` moves nothing. The suffix `-blocking` turns off overlap, `-unrecorded` CUDA graphs of passes.
    """
    for suffix, change in ((BLOCKING, Blocking), (WITHOUT_CUDA_GRAPHS, WithoutCudaGraphs)):
        if name.endswith(suffix):
            return change(make_transport(name.removesuffix(suffix), group, device))
    if name == "none":
        return NoTransport(device)
    here = ("nccl", "symmetric") if device.type == "cuda" else ("gloo",)
    if name not in ("auto", *here):
        raise ValueError(f"transport {name} does not run on {device.type}; use {' or '.join(here)}, or auto")
    if device.type == "cpu" or name == "nccl":
        return SendRecvTransport(here[0], group, device)
    made: Transport | None
    made, reason = make_symmetric(group, device)
    if made is None and name == "auto" and 1 < len(hosts := ranks_by_host(group)) < dist.get_world_size(group):
        made, reason = make_routed(group, device, hosts)
    if made is not None:
        return made
    if name == "symmetric":
        raise ValueError(f"transport symmetric cannot work here: {reason}; use nccl, or auto")
    return SendRecvTransport(here[0], group, device, f"symmetric: {reason}")
