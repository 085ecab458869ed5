"""Check of transferred bytes between all pairs of ranks of a sequence-parallel group."""

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.attention.pass_spec import REGIONS
from lightseq.comm.transport import Exchange, Receive, Send, Transport
from lightseq.tools.verify.report import PASS, Row, all_gather_object, result_row

OUTBOXES, EXCHANGES, PATTERN_BYTES = 4, 6, 1 << 16  # outboxes; exchanges per outbox; bytes per pair and exchange
PRIME: Final = 251  # period of the pattern; no transfer width of the hardware is a multiple of it


def transport_row(transport: Transport, group: dist.ProcessGroup, device: torch.device) -> Row:
    """Compares every byte of transfers between all pairs of ranks, through buffers that rotate as in attention."""
    name, peers, count = f"transport {transport.name}", dist.get_process_group_ranks(group), OUTBOXES * EXCHANGES
    if len(peers) == 1:
        return Row(name, PASS, "one rank per sequence: no transfers")
    everyone = all_gather_object(_wrong_bytes(transport, dist.get_rank(group), peers, device))
    wrong = [f"{line} to rank {rank}" for rank, lines in enumerate(everyone) for line in lines]
    moved = count * PATTERN_BYTES * len(peers) * (len(peers) - 1)
    right = f"{moved / 1e6:,.0f} MB between all pairs in {count} exchanges, every byte correct"
    return result_row(name, wrong, right, {"bytes": moved, "exchanges": count})


def _wrong_bytes(transport: Transport, rank: int, peers: Sequence[int], device: torch.device) -> list[str]:
    """Describes the transfers that arrived wrong on this rank. The host waits only after the last one."""
    base = torch.arange(PATTERN_BYTES, device=device)
    others = [r for r in range(len(peers)) if r != rank]
    counts: list[tuple[int, int, Tensor]] = []  # sender, exchange, differing bytes

    def pattern(src: int, dst: int, number: int) -> Tensor:
        return ((base + 101 * src + 31 * dst + 7 * number) % PRIME).to(torch.uint8)

    def exchange(number: int, mine: Tensor) -> None:
        for dst in others:
            mine[dst].copy_(pattern(rank, dst, number))
        wanted = [pattern(src, rank, number) for src in others]

        def compare(received: Sequence[Tensor]) -> None:
            pairs = zip(others, received, wanted, strict=True)
            counts.extend((src, number, (got != want).sum()) for src, got, want in pairs)

        sends = [Send(dst, mine[dst]) for dst in others]
        there = [transport.peer_view(src, mine[rank]) for src in others]
        memory = [torch.empty_like(x) for x in wanted]
        if number % 2:  # read in place, while the exchange goes on
            receives = [Receive(src, view, None) for src, view in zip(others, there, strict=True)]
            transport.exchange(Exchange(sends, receives, compare))()
        else:
            receives = [Receive(*x) for x in zip(others, there, memory, strict=True)]
            transport.exchange(Exchange(sends, receives))()
            compare(memory)

    for opening in range(OUTBOXES):
        with transport.outbox(REGIONS * len(peers) * PATTERN_BYTES) as outbox:
            regions = outbox.memory[: REGIONS * len(peers) * PATTERN_BYTES].view(REGIONS, len(peers), PATTERN_BYTES)
            for turn in range(EXCHANGES):
                exchange(opening * EXCHANGES + turn, regions[turn % REGIONS])
    return [
        f"{int(wrong):,} of {PATTERN_BYTES:,} bytes wrong in exchange {number} from rank {peers[src]}"
        for src, number, wrong in counts
        if wrong
    ]
