"""Every transport by its name, those that move less or hide less among them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.comm.symmetric import make_symmetric
from lightseq.comm.transport import BLOCKING, UNRECORDED, Exchange, Outbox, SendRecvTransport, Transport


class _Carried:
    """A transport that leaves the work to another one."""

    def __init__(self, carrier: Transport, ending: str) -> None:
        self.name, self.passed_over = carrier.name + ending, carrier.passed_over
        self._carrier = carrier

    @property
    def records(self) -> bool:
        return self._carrier.records

    @property
    def bytes_sent(self) -> int:
        return self._carrier.bytes_sent

    @property
    def buffer_bytes(self) -> int:
        return self._carrier.buffer_bytes

    @property
    def recorded_bytes(self) -> int:
        return self._carrier.recorded_bytes

    def outbox(self, size: int) -> AbstractContextManager[Outbox]:
        return self._carrier.outbox(size)

    def at(self, rank: int, here: Tensor) -> Tensor:
        return self._carrier.at(rank, here)

    def exchange(self, asked: Exchange) -> Callable[[], None]:
        return self._carrier.exchange(asked)

    def recorded(self, bytes_sent: int, recorded_bytes: int) -> None:
        self._carrier.recorded(bytes_sent, recorded_bytes)


class Blocking(_Carried):
    """A transport whose messages have arrived before the device computes on: it shows what overlap is worth."""

    def __init__(self, carrier: Transport) -> None:
        super().__init__(carrier, BLOCKING)

    def exchange(self, asked: Exchange) -> Callable[[], None]:
        self._carrier.exchange(asked)()
        return lambda: None


class Unrecorded(_Carried):
    """A transport whose short passes are launched one by one, each time: it shows what recording them is worth."""

    records = False

    def __init__(self, carrier: Transport) -> None:
        super().__init__(carrier, UNRECORDED)


class NoTransport:
    """Moves nothing and computes with whatever memory holds: the time of a schedule without its communication.

    Fresh memory holds zeros, on which a GPU at its power limit computes a tenth faster than on what would have come: a
    place that is seen for the first time gets data of this rank's own.
    """

    name, passed_over = "none", ""
    buffer_bytes = recorded_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.bytes_sent = 0
        self._seen: set[tuple[int, int]] = set()
        self._device, self.records = device, device.type == "cuda"
        self._outbox = Outbox(torch.empty(0, dtype=torch.uint8, device=device))

    @contextmanager
    def outbox(self, size: int) -> Iterator[Outbox]:
        if size > self._outbox.memory.numel():
            self._outbox = Outbox(torch.randint(256, (size,), dtype=torch.uint8, device=self._device))
        yield self._outbox

    def at(self, rank: int, here: Tensor) -> Tensor:
        return here

    def exchange(self, asked: Exchange) -> Callable[[], None]:
        received = [r.there if r.into is None else r.into for r in asked.receives]
        for _, there, into in asked.receives:
            if into is not None and (place := (into.data_ptr(), into.nbytes)) not in self._seen:
                self._seen.add(place)
                if into.is_cuda and torch.cuda.is_current_stream_capturing():
                    _copy_once(into, there)
                else:
                    into.copy_(there)
        return lambda: asked.then(received) if asked.then is not None else None

    def recorded(self, bytes_sent: int, recorded_bytes: int) -> None:
        pass


def _copy_once(into: Tensor, there: Tensor) -> None:
    """Now, and not whenever what is being recorded runs."""
    aside = torch.cuda.Stream(into.device)
    while True:  # torch hands a few streams out again and again, the one that records among them
        with torch.cuda.stream(aside):
            if not torch.cuda.is_current_stream_capturing():
                into.copy_(there)
                aside.synchronize()
                return
        aside = torch.cuda.Stream(into.device)


def make_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> Transport:
    """`auto`, or a transport by name. Raises ValueError for one that cannot work here.

    `auto` is gloo on CPU, symmetric where every rank can map the others' memory, nccl otherwise. Each, with `-blocking`
    behind its name, is the same without overlap, and with `-unrecorded` without recordings of passes.
    """
    for ending, change in ((BLOCKING, Blocking), (UNRECORDED, Unrecorded)):
        if name.endswith(ending):
            return change(make_transport(name.removesuffix(ending), group, device))
    if name == "none":
        return NoTransport(device)
    here = ("nccl", "symmetric") if device.type == "cuda" else ("gloo",)
    if name not in ("auto", *here):
        raise ValueError(f"transport {name} does not run on {device.type}; use {' or '.join(here)}, or auto")
    if device.type == "cpu" or name == "nccl":
        return SendRecvTransport(here[0], group, device)
    made, reason = make_symmetric(group, device)
    if made is not None:
        return made
    if name == "symmetric":
        raise ValueError(f"transport symmetric cannot work here: {reason}; use nccl, or auto")
    return SendRecvTransport(here[0], group, device, f"symmetric: {reason}")
