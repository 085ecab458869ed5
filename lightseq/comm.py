"""Moves bytes between the ranks of a group; knows nothing of attention, and never makes the host wait for a GPU.

What a rank sends lies in its outbox. Every rank's outbox is laid out alike, so a place in one's own names the same
place in any other: a transport that can reads there, one that cannot is sent the tensor.
"""

import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

BLOCKING = "-blocking"  # ends the name of a transport that hides nothing
ENGINE_BYTES = 2**20  # a copy engine takes some 5 microseconds for a copy, and the host as long, however small

# Copies tensors (to, from) in one launch: a key that stands for where they lie, and what makes the pairs for a new key.
Copy = Callable[[Hashable, Callable[[], Sequence[tuple[Tensor, Tensor]]]], None]


class Send(NamedTuple):
    """A tensor of this rank's outbox, for another rank (its number in the group)."""

    dst: int
    tensor: Tensor


class Receive(NamedTuple):
    """A tensor in the outbox of `src`, as `Transport.at` finds it. Without `into` it may be read where it lies."""

    src: int
    there: Tensor
    into: Tensor | None


@dataclass(frozen=True)
class Outbox:
    """Bytes (uint8) to send from. `known` keeps what the caller works out about places in it, as long as it lasts."""

    memory: Tensor
    known: dict[Any, Any] = field(default_factory=dict)


class Transport(Protocol):
    """One pass of attention opens the outbox, and exchanges step by step what lies in it."""

    name: str
    passed_over: str  # why a faster transport cannot work here; empty where this is the fastest

    @property
    def bytes_sent(self) -> int:
        """By this rank, since the transport was made."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Device memory held outside torch's caching allocator."""
        ...

    def outbox(self, size: int) -> AbstractContextManager[Outbox]:
        """At least `size` bytes, the same on every rank, until the context ends."""
        ...

    def at(self, rank: int, here: Tensor) -> Tensor:
        """What lies in another rank's outbox where `here` lies in this rank's: for `Receive`, and of its shape."""
        ...

    def exchange(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        then: Callable[[list[Tensor]], None] | None = None,
        fresh: bool = True,
        copy: Copy | None = None,
        idle: bool = False,
    ) -> Callable[[], None]:
        """Starts every message, and returns a function after which what was received may be used.

        Messages between two ranks arrive in the order in which both ends list them. `then` gets the received tensors,
        in the order of `receives`, and may run beside what the caller does next. `fresh` says whether any rank wrote
        to its outbox since the last exchange. What was sent may be overwritten after the second next fresh exchange.
        `copy` is for a transport that has many small tensors to copy. `idle`: the caller's stream has nothing to do
        until everything is there, and may be given work.
        """
        ...


class SendRecvTransport:
    """send/recv of torch.distributed: nccl between GPUs, gloo between CPU processes."""

    buffer_bytes = 0

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device, passed_over: str = "") -> None:
        self.name, self.passed_over = name, passed_over
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

    def exchange(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        then: Callable[[list[Tensor]], None] | None = None,
        fresh: bool = True,
        copy: Copy | None = None,
        idle: bool = False,
    ) -> Callable[[], None]:
        ops = [dist.P2POp(dist.isend, _real(s.tensor), self._peers[s.dst], self._group) for s in sends]
        received = []
        for src, there, into in receives:
            into = torch.empty_like(there) if into is None else into
            if src == self._rank:
                into.copy_(there)
            else:
                ops.append(dist.P2POp(dist.irecv, _real(into), self._peers[src], self._group))
            received.append(into)
        self.bytes_sent += sum(s.tensor.nbytes for s in sends)
        works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> None:
            for work in works:
                work.wait()
            if then is not None:
                then(received)

        return wait


class SymmetricTransport:
    """Ranks of one host read each other's memory: copy engines fetch on a side stream while kernels compute.

    The outbox is torch symmetric memory. All waiting is done by the devices, at barriers through that memory; NVLink
    multicast is not used.
    """

    name = "symmetric"
    passed_over = ""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.bytes_sent = 0
        self.buffer_bytes = 0
        self._group, self._device, self._rank = group, device, dist.get_rank(group)
        self._world = dist.get_world_size(group)
        self._side = torch.cuda.Stream(device, priority=-1)
        self._grow(1 << 20)
        self._all_read = self._side.record_event()  # nobody reads the outbox any more
        self._last_barrier = self._all_read

    def _grow(self, size: int) -> None:
        torch.cuda.synchronize(self._device)  # nobody may still be reading what is about to go
        self._peers: list[Tensor] = []
        for old in ("_outbox", "_handle", "_memory"):  # or it would be there beside the new one, at the worst moment
            vars(self).pop(old, None)
        self.buffer_bytes = 0
        self._memory = self._allocate(size)
        self._handle = symmetric_memory.rendezvous(self._memory, self._group)
        self._peers = [self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self._world)]
        self._outbox = Outbox(self._memory)
        self.buffer_bytes = size

    def _allocate(self, size: int) -> Tensor:
        """The driver's memory, not torch's: for what torch only caches the driver does not ask, and fails instead."""
        for cached in (True, False):
            try:
                return symmetric_memory.empty(size, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
                if not cached:
                    asked = f"Tried to allocate {size / 2**30:.2f} GiB for what ranks send each other"
                    raise torch.OutOfMemoryError(f"CUDA out of memory. {asked}") from error
                torch.cuda.empty_cache()
        raise AssertionError("it returns or raises")

    @contextmanager
    def outbox(self, size: int) -> Iterator[Outbox]:
        if size > self.buffer_bytes:
            self._grow(size)
        torch.cuda.current_stream().wait_event(self._all_read)
        yield self._outbox
        with torch.cuda.stream(self._side):
            self._handle.barrier()
        self._all_read = self._side.record_event()

    def exchange(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        then: Callable[[list[Tensor]], None] | None = None,
        fresh: bool = True,
        copy: Copy | None = None,
        idle: bool = False,
    ) -> Callable[[], None]:
        current = torch.cuda.current_stream()
        self.bytes_sent += sum(s.tensor.nbytes for s in sends)
        own = [r for r in receives if r.src == self._rank]  # lies there already
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            if not idle:  # or beside the barrier and what comes from others
                _fetch(own, copy)
            if fresh:
                self._handle.barrier()
                current.wait_event(self._last_barrier)  # the one before: everybody has read what may be overwritten
                self._last_barrier = self._side.record_event()
            # Every rank starts with its next neighbour, so that no rank is read by all others at once.
            others = [r for r in receives if r.src != self._rank]
            _fetch(sorted(others, key=lambda r: (r.src - self._rank) % self._world), copy)
            if then is not None:
                then([there if into is None else into for _, there, into in receives])
        done = self._side.record_event()
        if idle:
            _fetch(own, copy)
        in_use = [then]  # and all that it holds: freed before, its memory could be written to while still being read

        def wait() -> None:
            current.wait_event(done)
            in_use.clear()

        return wait

    def at(self, rank: int, here: Tensor) -> Tensor:
        start = here.data_ptr() - self._memory.data_ptr()
        flat = self._peers[rank][start : start + here.nbytes]
        return flat.view(here.dtype).view(here.shape)


def _fetch(receives: list[Receive], copy: Copy | None) -> None:
    """Large tensors by the copy engines, which take no kernel's place; all small ones by one kernel."""
    pairs = [(into, there) for _, there, into in receives if into is not None]
    small = [pair for pair in pairs if pair[0].nbytes < ENGINE_BYTES]
    if small and copy is not None:
        copy(tuple((into.data_ptr(), there.data_ptr(), into.nbytes) for into, there in small), lambda: small)
        pairs = [pair for pair in pairs if pair[0].nbytes >= ENGINE_BYTES]
    for into, there in pairs:
        into.copy_(there)  # contiguous on both sides


class Blocking:
    """A transport whose messages have arrived before the device computes on: it shows what overlap is worth."""

    def __init__(self, carrier: Transport) -> None:
        self.name, self.passed_over = carrier.name + BLOCKING, carrier.passed_over
        self.outbox, self.at, self._carrier = carrier.outbox, carrier.at, carrier

    @property
    def bytes_sent(self) -> int:
        return self._carrier.bytes_sent

    @property
    def buffer_bytes(self) -> int:
        return self._carrier.buffer_bytes

    def exchange(self, *messages: Any, **more: Any) -> Callable[[], None]:
        self._carrier.exchange(*messages, **more)()
        return lambda: None


class NoTransport:
    """Moves nothing and computes with whatever memory holds: the time of a schedule without its communication.

    Fresh memory holds zeros, on which a GPU at its power limit computes a tenth faster than on what would have come: a
    place that is seen for the first time gets data of this rank's own.
    """

    name, passed_over = "none", ""
    buffer_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.bytes_sent = 0
        self._seen: set[tuple[int, int]] = set()
        self._device = device
        self._outbox = Outbox(torch.empty(0, dtype=torch.uint8, device=device))

    @contextmanager
    def outbox(self, size: int) -> Iterator[Outbox]:
        if size > self._outbox.memory.numel():
            self._outbox = Outbox(torch.randint(256, (size,), dtype=torch.uint8, device=self._device))
        yield self._outbox

    def at(self, rank: int, here: Tensor) -> Tensor:
        return here

    def exchange(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        then: Callable[[list[Tensor]], None] | None = None,
        fresh: bool = True,
        copy: Copy | None = None,
        idle: bool = False,
    ) -> Callable[[], None]:
        received = [r.there if r.into is None else r.into for r in receives]
        for _, there, into in receives:
            if into is not None and (place := (into.data_ptr(), into.nbytes)) not in self._seen:
                self._seen.add(place)
                into.copy_(there)
        return lambda: then(received) if then is not None else None


def make_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> Transport:
    """`auto`, or a transport by name. Raises ValueError for one that cannot work here.

    `auto` is gloo on CPU, symmetric where every rank can map the others' memory, nccl otherwise. Each, with `-blocking`
    behind its name, is the same without overlap.
    """
    if name.endswith(BLOCKING):
        return Blocking(make_transport(name.removesuffix(BLOCKING), group, device))
    if name == "none":
        return NoTransport(device)
    here = ("nccl", "symmetric") if device.type == "cuda" else ("gloo",)
    if name not in ("auto", *here):
        raise ValueError(f"transport {name} does not run on {device.type}; use {' or '.join(here)}, or auto")
    if device.type == "cpu" or name == "nccl":
        return SendRecvTransport(here[0], group, device)
    made, reason = _make_symmetric(group, device)
    if made is not None:
        return made
    if name == "symmetric":
        raise ValueError(f"transport symmetric cannot work here: {reason}; use nccl, or auto")
    return SendRecvTransport(here[0], group, device, f"symmetric: {reason}")


def _make_symmetric(group: dist.ProcessGroup, device: torch.device) -> tuple[SymmetricTransport | None, str]:
    """The transport, or why the ranks of a group cannot read each other's memory: on every rank alike."""
    reason = _first(group, _why_no_peers(group, device))
    made = None
    if not reason:
        try:
            made = SymmetricTransport(group, device)
        except RuntimeError as error:  # what a container or a driver forbids shows only now
            reason = str(error).splitlines()[0]
        reason = _first(group, reason)
    return (None, reason) if reason else (made, "")


def _why_no_peers(group: dist.ProcessGroup, device: torch.device) -> str:
    index = device.index if device.index is not None else torch.cuda.current_device()
    everyone: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (socket.gethostname(), index), group=group)
    hosts = len({host for host, _ in everyone})
    if len(everyone) == 1:
        return "one rank has nobody to read from"
    if hosts > 1:
        return f"the ranks are on {hosts} hosts"
    strangers = [i for _, i in everyone if i != index and not torch.cuda.can_device_access_peer(index, i)]
    return f"GPU {index} cannot access GPU {strangers[0]}" if strangers else ""


def _first(group: dist.ProcessGroup, reason: str) -> str:
    """The first reason that any rank has."""
    reasons = [""] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    return next(filter(None, reasons), "")


def _real(x: Tensor) -> Tensor:
    """Neither NCCL nor gloo sends complex numbers."""
    return torch.view_as_real(x) if x.is_complex() else x
