"""Check of transferred bytes, and bandwidth, between all pairs of ranks of a sequence-parallel group."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.attention.pass_spec import REGIONS
from lightseq.comm.transport import Exchange, Receive, Send, Transport
from lightseq.distributed.world import World
from lightseq.tools.verify.report import FAIL, PASS, WARN, Row, all_gather_object, result_row, span

OUTBOXES, EXCHANGES, PATTERN_BYTES = 4, 6, 1 << 16  # outboxes; exchanges per outbox; bytes per pair and exchange
PRIME: Final = 251  # period of the pattern; no transfer width of the hardware is a multiple of it
TIMED_BYTES: Final = {"cuda": 64 << 20, "cpu": 1 << 20}
REPEATS, TRIALS = 5, 3  # messages per trial; trials, of which the fastest counts
SLOW: Final = 0.5  # a rank below this share of the median bandwidth is reported


class Wrong(NamedTuple):
    src: int
    exchange: int
    bytes: int
    place: int
    got: int
    want: int


def transport_rows(transport: Transport, group: dist.ProcessGroup, world: World) -> list[Row]:
    """Returns rows of the transfers between ranks of a sequence: correctness and bandwidth."""
    peers = dist.get_process_group_ranks(group)
    return [_bytes_row(transport, group, peers, world), _speed_row(transport, group, peers, world)]


def _bytes_row(transport: Transport, group: dist.ProcessGroup, peers: Sequence[int], world: World) -> Row:
    name = f"transport {transport.name}"
    if len(peers) == 1:
        return Row(name, PASS, "one rank per sequence: no transfers")
    found = _exchanges(transport, dist.get_rank(group), len(peers), world.device)
    found = [w._replace(src=peers[w.src]) for w in found]
    wrong = [
        f"{w.bytes:,} of {PATTERN_BYTES:,} bytes from rank {w.src} to rank {rank} wrong in exchange {w.exchange}"
        f" (byte {w.place} is {w.got}, not {w.want})"
        for rank, theirs in enumerate(all_gather_object(found))
        for w in theirs
    ]
    count = OUTBOXES * EXCHANGES
    moved = count * PATTERN_BYTES * len(peers) * (len(peers) - 1)
    right = f"{moved / 1e6:,.0f} MB between all pairs in {count} exchanges, every byte correct"
    return result_row(name, wrong, right, {"bytes": moved, "exchanges": count})


def _exchanges(transport: Transport, rank: int, ranks: int, device: torch.device) -> list[Wrong]:
    """Returns the transfers that arrived wrong on this rank. Buffers rotate as in attention, without waits."""
    base = torch.arange(PATTERN_BYTES, device=device)

    def pattern(src: int, dst: int, number: int) -> Tensor:
        return ((base + 101 * src + 31 * dst + 7 * number) % PRIME).to(torch.uint8)

    others = [r for r in range(ranks) if r != rank]
    looked: list[tuple[int, int, Tensor]] = []

    def move(number: int, mine: Tensor) -> None:
        for dst in others:
            mine[dst].copy_(pattern(rank, dst, number))
        wanted = [pattern(src, rank, number) for src in others]

        def look(received: Sequence[Tensor]) -> None:
            looked.extend((src, number, _compare(a, b)) for src, a, b in zip(others, received, wanted, strict=True))

        sends = [Send(dst, mine[dst]) for dst in others]
        there = [transport.peer_view(src, mine[rank]) for src in others]
        if number % 2:  # read in place
            transport.exchange(Exchange(sends, [Receive(*x, None) for x in zip(others, there, strict=True)], look))()
        else:
            rooms = [torch.empty_like(x) for x in wanted]
            transport.exchange(Exchange(sends, [Receive(*x) for x in zip(others, there, rooms, strict=True)]))()
            look(rooms)

    for opening in range(OUTBOXES):
        with transport.outbox(REGIONS * ranks * PATTERN_BYTES) as outbox:
            regions = outbox.memory[: REGIONS * ranks * PATTERN_BYTES].view(REGIONS, ranks, PATTERN_BYTES)
            for turn in range(EXCHANGES):
                move(opening * EXCHANGES + turn, regions[turn % REGIONS])
    return [Wrong(src, number, *x) for src, number, y in looked if (x := y.tolist())[0]]


def _compare(got: Tensor, want: Tensor) -> Tensor:
    """Returns the number of differing bytes, the offset of the first, and its two values, without a host wait."""
    differs = got != want
    place = differs.int().argmax().view(1)
    return torch.cat([differs.sum().view(1), place, got.gather(0, place).long(), want.gather(0, place).long()])


def _speed_row(transport: Transport, group: dist.ProcessGroup, peers: Sequence[int], world: World) -> Row:
    if world.size == 1:
        return Row("bandwidth", PASS, "one rank: no transfers")
    everyone = all_gather_object(_pair_speeds(transport, group, peers, world.device))
    collected = all_gather_object(_all_gather_speed(world))
    figures = {
        "pairs_gigabytes_per_second": {f"{s}->{d}": x for d, pairs in enumerate(everyone) for s, x in pairs.items()},
        "all_gather_gigabytes_per_second": collected,
    }
    detail = f"all-gather over {world.size} ranks {min(collected):.1f} GB/s per rank"
    pairs = [(x, src, dst) for dst, theirs in enumerate(everyone) for src, x in theirs.items()]
    if not pairs:
        return Row("bandwidth", PASS, detail, figures)
    _, src, dst = min(pairs)
    detail = f"pairs {span([x for x, *_ in pairs])} GB/s (lowest from rank {src} to {dst}); {detail}"
    slow = slow_ranks(everyone)
    if slow:
        status = FAIL if world.device.type == "cuda" else WARN  # CPU ranks may share cores
        return Row("bandwidth", status, "; ".join([*slow, detail]), figures | {"slow": slow})
    return Row("bandwidth", PASS, detail, figures)


def slow_ranks(everyone: Sequence[dict[int, float]]) -> list[str]:
    """Describes ranks whose mean bandwidth, over both directions, is below half of the median rank's.

    `everyone`: GB/s by receiving rank, then by sending rank.
    """
    shares = {}
    for rank, mine in enumerate(everyone):
        links = [*mine.values(), *(theirs[rank] for theirs in everyone if rank in theirs)]
        if links:
            shares[rank] = statistics.fmean(links)
    median = statistics.median(shares.values()) if shares else 0.0
    return [
        f"rank {r} reaches {x:.1f} GB/s, the median rank {median:.1f}" for r, x in shares.items() if x < SLOW * median
    ]


def _pair_speeds(
    transport: Transport, group: dist.ProcessGroup, peers: Sequence[int], device: torch.device
) -> dict[int, float]:
    """Returns GB/s from every other rank of the sequence while all ranks exchange in pairs."""
    rank, ranks, size = dist.get_rank(group), len(peers), TIMED_BYTES[device.type]
    into = torch.empty(size, dtype=torch.uint8, device=device)
    speeds = {}
    for shift in range(1, ranks):
        src, dst = (rank + shift) % ranks, (rank - shift) % ranks
        with transport.outbox(size) as outbox:
            mine = outbox.memory[:size]
            exchange = Exchange([Send(dst, mine)], [Receive(src, transport.peer_view(src, mine), into)])
            transport.exchange(exchange)()
            again = exchange._replace(outboxes_written=False)
            seconds = _seconds(lambda again=again: transport.exchange(again)(), group, device)  # type: ignore[misc]
        speeds[peers[src]] = size / seconds / 1e9
    return speeds


def _all_gather_speed(world: World) -> float:
    """Returns the GB/s that this rank receives in an all-gather over all ranks, as in FSDP."""
    size = min(TIMED_BYTES[world.device.type], (1 << 30) // world.size)
    mine = torch.zeros(size, dtype=torch.uint8, device=world.device)
    whole = torch.empty(world.size * size, dtype=torch.uint8, device=world.device)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
    gather(whole, mine)
    assert dist.group.WORLD is not None
    seconds = _seconds(lambda: gather(whole, mine), dist.group.WORLD, world.device)
    return (world.size - 1) * size / seconds / 1e9


def _seconds(act: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the seconds of a call: the fastest of several trials that all ranks start together."""
    best = float("inf")
    for _ in range(TRIALS):
        _synchronize(device)
        dist.barrier(group)
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(REPEATS):
            act()
        _synchronize(device)
        best = min(best, (time.perf_counter() - begin) / REPEATS)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
