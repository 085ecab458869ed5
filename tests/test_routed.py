"""A transport over several hosts, with ranks that map each other's files in the place of peer memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_comm import mapped_files
from torch import Tensor
from worlds import spawn

from lightseq.comm import routed, symmetric, transport_choice
from lightseq.comm.symmetric import SymmetricTransport
from lightseq.comm.transport import Exchange, Receive, Send, SendRecvTransport, Transport, base_transport_name
from lightseq.comm.transport_choice import make_transport

SCHEDULES = ("ring", "striped", "zigzag", "balanced", "prefix", "ulysses")
GPU = torch.device("cuda", 0)


class Gloo(SendRecvTransport):
    """Send and recv between hosts, of CPU tensors; counts messages by peer."""

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device, fallback_reason: str = "") -> None:
        super().__init__(name, group, torch.device("cpu"), fallback_reason)
        self.counts = Counter[int]()

    def exchange(self, exchange: Exchange) -> Callable[[], None]:
        self.counts.update(s.dst for s in exchange.sends)
        return super().exchange(exchange)


class Mapped(SymmetricTransport):
    """Counts messages by the peer's rank in the world."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.counts, self.ranks = Counter[int](), dist.get_process_group_ranks(group)

    def exchange(self, exchange: Exchange) -> Callable[[], None]:
        self.counts.update(self.ranks[s.dst] for s in exchange.sends)
        return super().exchange(exchange)


@contextmanager
def on_hosts(names: str, folder: Path) -> Iterator[dict[str, list[Transport]]]:
    """Puts rank r on the host of the name `names[r]`; yields the inner transports that are made."""
    made: dict[str, list[Transport]] = {"symmetric": [], "nccl": []}

    def mapped(*args: object) -> Mapped:
        made["symmetric"].append(Mapped(*args))  # type: ignore[arg-type]
        return made["symmetric"][-1]  # type: ignore[return-value]

    def gloo(*args: object) -> Gloo:
        made["nccl"].append(Gloo(*args))  # type: ignore[arg-type]
        return made["nccl"][-1]  # type: ignore[return-value]

    with (
        mapped_files(folder),
        patch("socket.gethostname", return_value=names[dist.get_rank()]),
        patch.object(symmetric, "SymmetricTransport", mapped),
        patch.object(routed, "SendRecvTransport", gloo),
        patch.object(transport_choice, "SendRecvTransport", gloo),
    ):
        yield made


def attention(schedule: str, transport: Transport) -> list[Tensor]:
    """Returns out, dq, dk and dv of a whole sequence."""
    from test_attention import _context, _distributed, _whole

    with patch("lightseq.attention.context.make_transport", return_value=transport):
        context = _context(schedule, "auto", torch.float64, 8, heads=(8, 4))
    return _distributed(context, _whole(24, (8, 4), 8))


def every_schedule(rank: int, folder: Path, names: str) -> None:
    from test_attention import _expected, _whole

    expected = _expected(_whole(24, (8, 4), 8))
    plain = make_transport("auto", dist.group.WORLD, torch.device("cpu"))
    wanted = {schedule: attention(schedule, plain) for schedule in SCHEDULES}
    with on_hosts(names, folder) as made:
        transport = make_transport("auto", dist.group.WORLD, GPU)
        (far,), near = made["nccl"], made["symmetric"]
        here = {r for r, name in enumerate(names) if name == names[rank]}
        assert transport.name == "symmetric+nccl" and not transport.supports_graphs
        assert len(near) == (len(here) > 1)
        for schedule in SCHEDULES:
            found = attention(schedule, transport)
            for got, same, want in zip(found, wanted[schedule], expected, strict=True):
                assert torch.equal(got, same), schedule
                assert (got - want).abs().max() < 1e-12, schedule
        assert transport.bytes_sent == plain.bytes_sent == sum(x.bytes_sent for x in (far, *near))
        assert {*far.counts} == {*range(4)} - here
        for x in near:
            assert {*x.counts} == here - {rank}
        assert transport.buffer_bytes == (near[0].buffer_bytes if near else 0)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param("abcc", marks=pytest.mark.slow),
        pytest.param("aabb", marks=pytest.mark.slow),
        pytest.param("abab", marks=pytest.mark.slow),
        "aaab",
    ],
)
def test_each_peer_is_reached_its_own_way_with_the_results_of_one_transport(names: str, tmp_path: Path) -> None:
    spawn(4, every_schedule, tmp_path, names)


def in_order(rank: int, folder: Path, members: tuple[int, ...], names: str) -> None:
    """Three messages from every rank, this one too, some read in place, arrive in the order of the receives."""
    any_order = (
        {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
    )  # since torch 2.12
    group = dist.new_group(list(members), **any_order)
    if rank not in members:
        return
    members = tuple(dist.get_process_group_ranks(group))
    world, mine_is = len(members), members.index(rank)
    with on_hosts(names, folder):
        transport = make_transport("auto", group, GPU)
        assert transport.name == "symmetric+nccl"
        for start in (0, 100):  # the second pass must not overwrite what the first still reads
            with transport.outbox(3 * 64) as outbox:
                mine = outbox.memory[: 3 * 64].split(64)
                for i, x in enumerate(mine):
                    x.fill_(start + 10 * mine_is + i)
                sends = [Send(dst, x) for x in mine for dst in range(world) if dst != mine_is]
                expected = [(src, i) for i in range(3) for src in reversed(range(world))]
                receives = [
                    Receive(src, transport.peer_view(src, mine[i]), None if i == 1 else torch.empty_like(mine[i]))
                    for src, i in expected
                ]
                calls: list[list[int]] = []
                transport.exchange(
                    Exchange(sends, receives, lambda received, calls=calls: calls.append([int(x[0]) for x in received]))
                )()
            assert calls == [[start + 10 * src + i for src, i in expected]]


@pytest.mark.compat
@pytest.mark.parametrize(
    ("members", "names"),
    [
        ((0, 1, 2, 3), "abcc"),
        pytest.param((3, 0, 2), "a ba", marks=pytest.mark.slow),
        pytest.param((2, 3, 1), " aab", marks=pytest.mark.slow),
    ],
)
def test_received_tensors_come_once_and_in_order(members: tuple[int, ...], names: str, tmp_path: Path) -> None:
    """Also in a group of some ranks, whose order differs from the world's."""
    spawn(4, in_order, tmp_path, members, names)


def falls_back(rank: int, folder: Path, names: str, broken: int) -> tuple[str, str]:
    with on_hosts(names, folder):
        if rank == broken:
            symmetric.symmetric_memory.error = "CUDA driver error: operation not permitted\nwhere"
        transport = make_transport("auto", dist.group.WORLD, GPU)
        return transport.name, transport.fallback_reason


@pytest.mark.parametrize(
    ("names", "broken", "name", "reason"),
    [
        ("aaaa", -1, "symmetric", ""),
        ("abcd", -1, "nccl", "symmetric: the ranks are on 4 hosts"),
        ("aabc", -1, "symmetric+nccl", "nccl between hosts, which hold the ranks 0, 1; 2; 3"),
        ("abbb", -1, "symmetric+nccl", "nccl between hosts, which hold the ranks 0; 1 to 3"),
        ("aabb", 3, "nccl", "symmetric: CUDA driver error: operation not permitted"),
    ],
)
def test_all_ranks_agree_on_who_maps_whose_memory(
    names: str, broken: int, name: str, reason: str, tmp_path: Path
) -> None:
    assert spawn(4, falls_back, tmp_path, names, broken) == [(name, reason)] * 4


def asked_for(rank: int, folder: Path) -> None:
    with on_hosts("aab", folder), pytest.raises(ValueError, match="cannot work here: the ranks are on 2 hosts"):
        make_transport("symmetric", dist.group.WORLD, GPU)


def test_symmetric_memory_that_is_asked_for_is_not_mixed_with_nccl(tmp_path: Path) -> None:
    spawn(3, asked_for, tmp_path)


def chosen(rank: int) -> tuple[str, int]:
    """Returns the schedule, and the GPUs of a host for which it was chosen, where hosts hold 3, 3, 3 and 1 ranks."""
    from test_attention import _context

    from lightseq.attention import context as contexts

    over_nccl = SendRecvTransport("nccl", dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    with (
        patch.object(contexts, "make_transport", return_value=over_nccl),
        patch.object(contexts, "choose", wraps=contexts.choose) as choose,
    ):
        context = _context("auto", "auto", torch.float32, 8, gpus_per_host=1 if rank == 3 else 3)
    return context.schedule.name, choose.call_args.args[0].gpus_per_host


def test_ranks_of_hosts_of_different_sizes_choose_one_schedule() -> None:
    ((schedule, per_host), *others) = spawn(4, chosen)
    assert per_host == 1 and others == [(schedule, 1)] * 3


def test_the_slower_link_decides_the_schedule() -> None:
    assert base_transport_name("symmetric+nccl") == "nccl"
    assert base_transport_name("symmetric+nccl-blocking") == "nccl"
    assert base_transport_name("symmetric-unrecorded") == "symmetric"
