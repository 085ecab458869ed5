"""Interface of transports, and the transport over send and recv. No transport makes the host wait for a GPU.

A rank sends from its outbox. The outboxes of all ranks have the same layout, so an offset is valid in all of them. A
transport over shared memory reads the other rank's outbox; others send the tensor.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

BLOCKING = "-blocking"  # suffix of a transport without overlap
WITHOUT_CUDA_GRAPHS = "-unrecorded"  # suffix of a transport without CUDA graphs of short passes

# Copies pairs (to, from) of tensors in one launch. The key identifies their addresses; the function returns the pairs,
# and is called for a new key only.
Copy = Callable[[Hashable, Callable[[], Sequence[tuple[Tensor, Tensor]]]], None]


def base_transport_name(name: str) -> str:
    """Returns a transport's name without suffixes. For a routed transport, returns the slower of its two."""
    while name.endswith((BLOCKING, WITHOUT_CUDA_GRAPHS)):
        name = name.rsplit("-", 1)[0]
    return name.rsplit("+", 1)[-1]


class Send(NamedTuple):
    """A tensor of this rank's outbox, to be sent to rank `dst` of the group."""

    dst: int
    tensor: Tensor


class Receive(NamedTuple):
    """A tensor in the outbox of `src`, a view from `Transport.peer_view`. Without `into` it may be read in place."""

    src: int
    remote: Tensor
    into: Tensor | None


class Exchange(NamedTuple):
    """All messages of one step. Both ends list the messages between them in the same order."""

    sends: Sequence[Send]
    receives: Sequence[Receive]
    # Called with the received tensors, in the order of `receives`. It may run on another stream, beside the caller's
    # next work.
    on_received: Callable[[list[Tensor]], None] | None = None
    outboxes_written: bool = True  # some rank has written to its outbox since the last exchange
    copy: Copy | None = None  # fused copy of many small tensors
    idle: bool = False  # the caller's stream waits for this exchange, so the transport may use it


@dataclass(frozen=True)
class Outbox:
    """Memory (uint8) to send from. `cache` holds the caller's programs and graphs, which contain addresses in it."""

    memory: Tensor
    cache: dict[Any, Any] = field(default_factory=dict)


class Transport(Protocol):
    """Interface of a transport. A pass opens the outbox and exchanges its contents step by step."""

    name: str
    fallback_reason: str  # why a faster transport cannot work here; empty if this is the fastest

    @property
    def supports_graphs(self) -> bool:
        """True if passes may run as CUDA graphs: only the device waits, never the host."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the transport was made."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Bytes of device memory outside torch's caching allocator."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Bytes of device memory held by CUDA graphs of passes, which torch does not count as allocated."""
        ...

    def outbox(self, size: int) -> AbstractContextManager[Outbox]:
        """Yields an outbox of at least `size` bytes. All ranks ask for the same size."""
        ...

    def peer_view(self, rank: int, here: Tensor) -> Tensor:
        """Returns the view of another rank's outbox at the offset that `here` has in this rank's own, for `Receive`."""
        ...

    def exchange(self, exchange: Exchange) -> Callable[[], None]:
        """Starts all messages, and returns a function that waits until the received tensors may be used.

        Sent memory may be overwritten after two more exchanges with `outboxes_written`, once the caller has waited for
        one of the two.
        """
        ...

    def after_replay(self, bytes_sent: int, graph_bytes: int) -> None:
        """Counts a replayed pass and orders the transport's stream after it. Call it before the outbox closes.

        `bytes_sent` are not counted yet; `graph_bytes` is the memory of all graphs.
        """
        ...


class SendRecvTransport:
    """Transport over send and recv of torch.distributed: nccl between GPUs, gloo between CPU processes."""

    buffer_bytes = graph_bytes = 0
    supports_graphs = False

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device, fallback_reason: str = "") -> None:
        self.name, self.fallback_reason = name, fallback_reason
        self.bytes_sent = 0
        self._group, self._device, self._rank = group, device, dist.get_rank(group)
        self._peers = dist.get_process_group_ranks(group)
        self._outbox = Outbox(torch.empty(0, dtype=torch.uint8, device=device))
        if len(self._peers) > 1:
            # The first operation makes the communicator and needs all ranks; the messages of a step involve only some.
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    @contextmanager
    def outbox(self, size: int) -> Iterator[Outbox]:
        if size > self._outbox.memory.numel():
            self._outbox = Outbox(torch.empty(size, dtype=torch.uint8, device=self._device))
        yield self._outbox  # one outbox for all layers, so that cached programs stay valid

    def peer_view(self, rank: int, here: Tensor) -> Tensor:
        return here

    def exchange(self, exchange: Exchange) -> Callable[[], None]:
        ops = [dist.P2POp(dist.isend, s.tensor, self._peers[s.dst], self._group) for s in exchange.sends]
        received = []
        for src, remote, into in exchange.receives:
            into = torch.empty_like(remote) if into is None else into
            if src == self._rank:
                into.copy_(remote)
            else:
                ops.append(dist.P2POp(dist.irecv, into, self._peers[src], self._group))
            received.append(into)
        self.bytes_sent += sum(s.tensor.nbytes for s in exchange.sends)
        works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> None:
            for work in works:
                work.wait()
            if exchange.on_received is not None:
                exchange.on_received(received)

        return wait

    def after_replay(self, bytes_sent: int, graph_bytes: int) -> None:
        raise AssertionError("a pass over send and recv is never a CUDA graph")
