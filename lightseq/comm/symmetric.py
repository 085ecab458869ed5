"""Transport between GPUs of one host, through memory that all of them map."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from lightseq.comm.transport import Copy, Exchange, Outbox, Receive

ENGINE_BYTES = 2**20  # smallest copy for a copy engine, whose launch takes about 5 microseconds


class SymmetricTransport:
    """Transport in which ranks of one host read each other's memory.

    Copy engines fetch on a side stream while kernels compute. The outbox is torch symmetric memory. Devices wait for
    each other at barriers in that memory. NVLink multicast is not used.
    """

    name = "symmetric"
    fallback_reason = ""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.bytes_sent = 0
        self.buffer_bytes = self.graph_bytes = 0
        self._group, self._device, self._rank = group, device, dist.get_rank(group)
        self._world, self.supports_graphs = dist.get_world_size(group), device.type == "cuda"
        self._side = torch.cuda.Stream(device, priority=-1)
        self._grow(1 << 20)
        self._all_read = self._side.record_event()  # all ranks have read the outbox

    def _grow(self, size: int) -> None:
        torch.cuda.synchronize(self._device)  # a kernel may still read the memory that is about to be freed
        self._peers: list[Tensor] = []
        for old in ("_outbox", "_handle", "_memory"):  # free the old outbox before the new one is allocated
            vars(self).pop(old, None)
        self.buffer_bytes = self.graph_bytes = 0
        self._memory = self._allocate(size)
        self._handle = symmetric_memory.rendezvous(self._memory, self._group)
        self._peers = [self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self._world)]
        self._outbox = Outbox(self._memory)
        self.buffer_bytes = size

    def _allocate(self, size: int) -> Tensor:
        """Allocates symmetric memory. If the driver has none left, frees torch's cache and tries again."""
        for cached in (True, False):
            try:
                return symmetric_memory.empty(size, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
                if not cached:
                    tried = f"Tried to allocate {size / 2**30:.2f} GiB of symmetric memory for attention's exchange"
                    raise torch.OutOfMemoryError(f"CUDA out of memory. {tried}") from error
                torch.cuda.empty_cache()
        raise AssertionError("unreachable: the loop returns or raises")

    @contextmanager
    def outbox(self, size: int) -> Iterator[Outbox]:
        if size > self.buffer_bytes:
            self._grow(size)
        current = self._current()
        current.wait_event(self._all_read)
        yield self._outbox
        with self._side:
            self._handle.barrier()
        self._all_read = self._side.record_event()

    def exchange(self, exchange: Exchange) -> Callable[[], None]:
        receives, on_received, copy = exchange.receives, exchange.on_received, exchange.copy
        current = self._current()
        self.bytes_sent += sum(s.tensor.nbytes for s in exchange.sends)
        own = [r for r in receives if r.src == self._rank]  # already on this rank
        self._side.wait_stream(current)
        with self._side:
            if not exchange.idle:  # an idle stream runs local copies beside the barrier and remote fetches
                _fetch(own, copy)
            if exchange.outboxes_written:
                self._handle.barrier()
            _fetch([r for r in receives if r.src != self._rank], copy)
            if on_received is not None:
                on_received([remote if into is None else into for _, remote, into in receives])
        done = self._side.record_event()
        if exchange.idle:
            _fetch(own, copy)
        in_use = [on_received]  # keep the callback's tensors alive while they are read

        def wait() -> None:
            current.wait_event(done)
            in_use.clear()

        return wait

    def after_replay(self, bytes_sent: int, graph_bytes: int) -> None:
        self.bytes_sent += bytes_sent
        self.graph_bytes = graph_bytes
        self._side.wait_stream(self._current())

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device.index)  # without an index torch looks for devices first

    def peer_view(self, rank: int, here: Tensor) -> Tensor:
        start = here.data_ptr() - self._memory.data_ptr()
        flat = self._peers[rank][start : start + here.nbytes]
        return flat.view(here.dtype).view(here.shape)


def _fetch(receives: list[Receive], copy: Copy | None) -> None:
    """Copies large tensors with copy engines, which need no SM, and all small ones with one kernel."""
    large: list[tuple[Tensor, Tensor]] = []
    small: list[tuple[Tensor, Tensor]] = []
    for _, remote, into in receives:
        if into is not None:
            (large if copy is None or into.nbytes >= ENGINE_BYTES else small).append((into, remote))
    if small and copy is not None:
        copy(tuple((into.data_ptr(), remote.data_ptr(), into.nbytes) for into, remote in small), lambda: small)
    for into, remote in large:
        into.copy_(remote)  # contiguous on both sides


def make_symmetric(group: dist.ProcessGroup, device: torch.device) -> tuple[SymmetricTransport | None, str]:
    """Makes the transport. Returns None and a reason, the same on every rank, if it cannot work here."""
    reason = first_reason(group, _why_no_peers(group, device)) or first_reason(group, _why_no_memory(device))
    made = None
    if not reason:
        try:
            made = SymmetricTransport(group, device)
        except RuntimeError as error:  # a container or a driver may forbid it
            reason = str(error).splitlines()[0]
        reason = first_reason(group, reason)
    return (None, reason) if reason else (made, "")


def _why_no_peers(group: dist.ProcessGroup, device: torch.device) -> str:
    index = device.index if device.index is not None else torch.cuda.current_device()
    everyone: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (socket.gethostname(), index), group=group)
    hosts = len({host for host, _ in everyone})
    if len(everyone) == 1:
        return "there is only one rank"
    if hosts > 1:
        return f"the ranks are on {hosts} hosts"
    unreachable = [i for _, i in everyone if i != index and not torch.cuda.can_device_access_peer(index, i)]
    return f"GPU {index} cannot access GPU {unreachable[0]}" if unreachable else ""


def _why_no_memory(device: torch.device) -> str:
    """Returns why this rank cannot allocate symmetric memory; asked first, because other ranks would wait for it."""
    try:
        symmetric_memory.empty(1, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def first_reason(group: dist.ProcessGroup, reason: str) -> str:
    """Returns the reason of the first rank that has one, the same on every rank."""
    reasons = [""] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    return next(filter(None, reasons), "")
