"""Transport over several hosts: symmetric memory between the ranks of a host, send and recv between hosts."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.comm.symmetric import SymmetricTransport, first_reason, make_symmetric
from lightseq.comm.transport import Exchange, Outbox, SendRecvTransport

Hosts = Sequence[tuple[int, ...]]  # the ranks of each


class RoutedTransport:
    """Transport that uses symmetric memory inside a host and send and recv between hosts.

    `near_ranks` maps a rank of this host to its number in `near`. Both transports send from the outbox of `near`. A
    rank alone on its host has no `near`, and sends from the outbox of `far`.
    """

    supports_graphs = False  # send and recv cannot be replayed
    graph_bytes = 0

    def __init__(
        self,
        near: SymmetricTransport | None,
        near_ranks: Mapping[int, int],
        far: SendRecvTransport,
        fallback_reason: str,
    ) -> None:
        self.name, self.fallback_reason = f"symmetric+{far.name}", fallback_reason
        self._near, self._near_ranks, self._far = near, near_ranks, far

    @property
    def bytes_sent(self) -> int:
        return self._far.bytes_sent + (self._near.bytes_sent if self._near is not None else 0)

    @property
    def buffer_bytes(self) -> int:
        return self._near.buffer_bytes if self._near is not None else 0

    @contextmanager
    def outbox(self, size: int) -> Iterator[Outbox]:
        if self._near is None:
            with self._far.outbox(size) as outbox:
                yield outbox
            return
        with self._near.outbox(size) as outbox:
            yield outbox
            # `exchange` reads near ranks' outboxes on the current stream, so closing them has to wait for it.
            self._near.after_replay(bytes_sent=0, graph_bytes=0)

    def peer_view(self, rank: int, here: Tensor) -> Tensor:
        if self._near is not None and rank in self._near_ranks:
            return self._near.peer_view(self._near_ranks[rank], here)
        return self._far.peer_view(rank, here)

    def exchange(self, exchange: Exchange) -> Callable[[], None]:
        near, far = self._split(exchange)
        from_near, from_far = list[Tensor](), list[Tensor]()
        # Far messages first, because they take longer.
        waits = [self._far.exchange(far._replace(on_received=from_far.extend))]
        if self._near is not None:  # even without messages, because near ranks wait for each other
            waits.append(self._near.exchange(near._replace(on_received=from_near.extend)))

        def wait() -> None:
            for wait_for_part in waits:
                wait_for_part()
            if exchange.on_received is not None:
                nears, fars = iter(from_near), iter(from_far)
                received = [next(nears if r.src in self._near_ranks else fars) for r in exchange.receives]
                exchange.on_received(received)

        return wait

    def _split(self, exchange: Exchange) -> tuple[Exchange, Exchange]:
        """Returns the messages of near and of far ranks, in the order in which both ends list them."""
        numbers = self._near_ranks
        near = exchange._replace(
            sends=[s._replace(dst=numbers[s.dst]) for s in exchange.sends if s.dst in numbers],
            receives=[r._replace(src=numbers[r.src]) for r in exchange.receives if r.src in numbers],
        )
        far = exchange._replace(
            sends=[s for s in exchange.sends if s.dst not in numbers],
            receives=[r for r in exchange.receives if r.src not in numbers],
        )
        return near, far

    def after_replay(self, bytes_sent: int, graph_bytes: int) -> None:
        raise AssertionError("a pass over send and recv is never a CUDA graph")


def ranks_by_host(group: dist.ProcessGroup) -> Hosts:
    """Returns the ranks of every host, the same on all ranks of the group, which all call it."""
    names = [""] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return [tuple(rank for rank, name in enumerate(names) if name == host) for host in dict.fromkeys(names)]


def make_routed(group: dist.ProcessGroup, device: torch.device, hosts: Hosts) -> tuple[RoutedTransport | None, str]:
    """Makes the transport for a group on several hosts, where some hosts hold several of its ranks.

    Every rank passes the same hosts. Returns None and a reason, the same on every rank, if it cannot work here.
    """
    near, near_ranks, reason = _make_near(group, device, hosts)
    if reason := first_reason(group, reason):
        return None, reason
    far = SendRecvTransport("nccl", group, device)
    reason = f"nccl between hosts, which hold the ranks {'; '.join(map(_shown, hosts))}"
    return RoutedTransport(near, near_ranks, far, reason), ""


def _make_near(
    group: dist.ProcessGroup, device: torch.device, hosts: Hosts
) -> tuple[SymmetricTransport | None, dict[int, int], str]:
    """Makes the transport of this rank's host and numbers its ranks. Returns None without a reason for a lone rank."""
    rank = dist.get_rank(group)
    global_ranks = {r: dist.get_global_rank(group, r) for ranks in hosts if rank in ranks for r in ranks}
    if len(global_ranks) == 1:
        return None, {}, ""
    try:
        # Gloo, because NCCL may split an existing communicator, for which all its ranks would have to join.
        near_group = dist.new_group([*global_ranks.values()], backend="gloo", use_local_synchronization=True)
        assert isinstance(near_group, dist.ProcessGroup)
        near, reason = make_symmetric(near_group, device)
    except RuntimeError as error:
        return None, {}, str(error).splitlines()[0]
    return near, {r: dist.get_group_rank(near_group, number) for r, number in global_ranks.items()}, reason


def _shown(ranks: tuple[int, ...]) -> str:
    is_range = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]} to {ranks[-1]}" if is_range else ", ".join(map(str, ranks))
