"""Moves bytes between the ranks of a group; knows nothing of attention, and never makes the host wait for a GPU.

What a rank sends lies in its outbox. Every rank's outbox is laid out alike, so a place in one's own names the same
place in any other: a transport that can reads there, one that cannot is sent the tensor.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

BLOCKING = "-blocking"  # ends the name of a transport that hides nothing
UNRECORDED = "-unrecorded"  # and of one whose short passes are launched one by one, each time

# Copies tensors (to, from) in one launch: a key that stands for where they lie, and what makes the pairs for a new key.
Copy = Callable[[Hashable, Callable[[], Sequence[tuple[Tensor, Tensor]]]], None]


def base_transport_name(name: str) -> str:
    """A transport's name without what ends it."""
    while name.endswith((BLOCKING, UNRECORDED)):
        name = name.rsplit("-", 1)[0]
    return name


class Send(NamedTuple):
    """A tensor of this rank's outbox, for another rank (its number in the group)."""

    dst: int
    tensor: Tensor


class Receive(NamedTuple):
    """A tensor in the outbox of `src`, as `Transport.at` finds it. Without `into` it may be read where it lies."""

    src: int
    remote: Tensor
    into: Tensor | None


class Exchange(NamedTuple):
    """What one step moves. Messages between two ranks arrive in the order in which both ends list them."""

    sends: Sequence[Send]
    receives: Sequence[Receive]
    # Gets the received tensors, in the order of `receives`; it may run beside what the caller does next. A transport
    # that reads in place begins with the first of them too.
    then: Callable[[list[Tensor]], None] | None = None
    fresh: bool = True  # some rank wrote to its outbox since the last exchange
    copy: Copy | None = None  # for a transport that has many small tensors to copy
    idle: bool = False  # the caller's stream has nothing to do until everything is there, and may be given work


@dataclass(frozen=True)
class Outbox:
    """Bytes (uint8) to send from. `cache` keeps what the caller works out about places in it, as long as it lasts."""

    memory: Tensor
    cache: dict[Any, Any] = field(default_factory=dict)


class Transport(Protocol):
    """One pass of attention opens the outbox, and exchanges step by step what lies in it."""

    name: str
    fallback_reason: str  # why a faster transport cannot work here; empty where this is the fastest

    @property
    def supports_graphs(self) -> bool:
        """Whether a pass may run as a recording of an earlier one, for all waiting is the device's."""
        ...

    @property
    def bytes_sent(self) -> int:
        """By this rank, since the transport was made."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Device memory held outside torch's caching allocator."""
        ...

    @property
    def recorded_bytes(self) -> int:
        """Device memory of torch's allocator that recordings of passes hold, where it does not count as allocated."""
        ...

    def outbox(self, size: int) -> AbstractContextManager[Outbox]:
        """At least `size` bytes, the same on every rank, until the context ends."""
        ...

    def at(self, rank: int, here: Tensor) -> Tensor:
        """What lies in another rank's outbox where `here` lies in this rank's: for `Receive`, and of its shape."""
        ...

    def exchange(self, asked: Exchange) -> Callable[[], None]:
        """Starts every message, and returns a function after which what was received may be used.

        What was sent may be overwritten after the second next fresh exchange, once that or the one before it has been
        waited for.
        """
        ...

    def count_replay(self, bytes_sent: int, recorded_bytes: int) -> None:
        """To be called after a pass that ran as a recording, before its outbox closes: what it sent and was not counted
        yet, and what all recordings hold."""
        ...


class SendRecvTransport:
    """send/recv of torch.distributed: nccl between GPUs, gloo between CPU processes."""

    buffer_bytes = recorded_bytes = 0
    supports_graphs = False

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device, fallback_reason: str = "") -> None:
        self.name, self.fallback_reason = name, fallback_reason
        self.bytes_sent = 0
        self._group, self._device, self._rank = group, device, dist.get_rank(group)
        self._peers = dist.get_process_group_ranks(group)
        self._outbox = Outbox(torch.empty(0, dtype=torch.uint8, device=device))
        if len(self._peers) > 1:
            # A communicator is made at its first collective, which all ranks have to join; a step's messages join some.
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    @contextmanager
    def outbox(self, size: int) -> Iterator[Outbox]:
        if size > self._outbox.memory.numel():
            self._outbox = Outbox(torch.empty(size, dtype=torch.uint8, device=self._device))
        yield self._outbox  # the same from layer to layer: what is known of its places stays true

    def at(self, rank: int, here: Tensor) -> Tensor:
        return here

    def exchange(self, asked: Exchange) -> Callable[[], None]:
        ops = [dist.P2POp(dist.isend, s.tensor, self._peers[s.dst], self._group) for s in asked.sends]
        received = []
        for src, remote, into in asked.receives:
            into = torch.empty_like(remote) if into is None else into
            if src == self._rank:
                into.copy_(remote)
            else:
                ops.append(dist.P2POp(dist.irecv, into, self._peers[src], self._group))
            received.append(into)
        self.bytes_sent += sum(s.tensor.nbytes for s in asked.sends)
        works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> None:
            for work in works:
                work.wait()
            if asked.then is not None:
                asked.then(received)

        return wait

    def count_replay(self, bytes_sent: int, recorded_bytes: int) -> None:
        raise AssertionError("a pass over messages is never recorded")
