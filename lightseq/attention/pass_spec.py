"""Specification of one pass of one rank: everything that the table and the shapes determine.

It determines the size of the outbox. `lowering.py` turns a spec and an outbox into a program.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightseq.attention.buffers import BufferLayout
from lightseq.schedule.arenas import result_blocks
from lightseq.schedule.layout import Layout
from lightseq.schedule.table import Schedule, Step

ALIGNMENT = 256  # bytes; suits the widest loads and the copy engines
REGIONS = 3  # for results in the outbox, used in turn; `Transport.exchange` says how long sent data must stay

BufferLayouts = Mapping[str, BufferLayout]  # by item


class ChunkSlot(NamedTuple):
    """Place of a chunk and head group of an item in the tensors of the chunk's home rank."""

    chunk: int  # index among its rank's chunks
    head_group: int  # the item's heads


PartCounts = Mapping[ChunkSlot, Counter[int]]  # how many parts of a result are computed, by step


@dataclass(frozen=True, eq=False)
class PassSpec:
    """One forward or backward pass of one rank: everything that the table and the shapes determine."""

    schedule: Schedule
    backward: bool
    rank: int
    layouts: BufferLayouts
    parts: Mapping[str, PartCounts]  # by result item, of this rank's own results
    in_final_dtype: Mapping[str, bool]  # by result item (see `_reduces_in_final_dtype`)
    operand_offsets: Mapping[str, int]  # bytes into the outbox, by item that travels
    result_offsets: Mapping[int, int]  # bytes into the outbox, by step that sends results
    outbox_bytes: int

    @cached_property
    def flops(self) -> float:
        """FLOPs of one rank: the causal half only; a backward pass counts as 2.5 forward passes."""
        q = self.layouts["q"]
        tokens, heads = q.rows * q.chunk_count, q.heads_per_group * q.head_groups
        forward = q.batch * tokens**2 * self.schedule.world * heads * sum(self.layouts["kv"].dims)
        return 2.5 * forward if self.backward else forward


def make_spec(schedule: Schedule, backward: bool, rank: int, layouts: BufferLayouts) -> PassSpec:
    """Makes the specification of a pass; `layouts` describe its operands and results."""
    parts = _count_parts(schedule, backward, rank, layouts)
    operand_offsets, result_offsets, outbox_bytes = _outbox(schedule, backward, layouts)
    return PassSpec(
        schedule=schedule,
        backward=backward,
        rank=rank,
        layouts=layouts,
        parts=parts,
        in_final_dtype={item: _reduces_in_final_dtype(item, counts) for item, counts in parts.items()},
        operand_offsets=operand_offsets,
        result_offsets=result_offsets,
        outbox_bytes=outbox_bytes,
    )


def item_head_group(layout: BufferLayout, schedule: Schedule, head_group: int) -> int:
    """Converts a head group of the schedule to the item's.

    An item has fewer groups than the schedule if groups share key/value heads.
    """
    return head_group * layout.head_groups // schedule.total_head_groups


def aligned(size: int) -> int:
    """Returns a number of bytes, rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _reduces_in_final_dtype(item: str, parts: PartCounts) -> bool:
    """Returns whether an item needs no float32 total.

    Gradients need none if the parts of each chunk come in one step, and outputs if each chunk has one part.
    """
    if item == "out":
        return all(counts.total() == 1 for counts in parts.values())
    return all(len(counts) == 1 for counts in parts.values())


def _count_parts(schedule: Schedule, backward: bool, rank: int, layouts: BufferLayouts) -> Mapping[str, PartCounts]:
    """Counts the parts that all ranks compute of one rank's results, by item."""
    mine = {chunk: i for i, chunk in enumerate(schedule.layout.chunks(rank))}
    found: dict[str, dict[ChunkSlot, Counter[int]]] = {"dq": {}, "dkv": {}} if backward else {"out": {}}
    for t, step in enumerate(schedule.steps(backward)):
        for tile in (tile for tiles in step.tiles for tile in tiles):
            for item, slots in found.items():
                group = item_head_group(layouts[item], schedule, tile.head_group)
                for chunk in tile.kv if item == "dkv" else tile.q:
                    if chunk in mine:
                        slots.setdefault(ChunkSlot(mine[chunk], group), Counter())[t] += 1
    return found


def _outbox(schedule: Schedule, backward: bool, layouts: BufferLayouts) -> tuple[dict[str, int], dict[int, int], int]:
    """Lays out every rank's outbox: first the staged operands, then the regions for results.

    Returns the offsets in bytes of operands by item and of results by step, and the size of the outbox in bytes.
    """
    layout, all_steps = schedule.layout, schedule.steps(backward)
    end, operand_offsets = 0, {}
    for item in sorted({move.item for step in all_steps for move in step.moves if not move.is_result}):
        operand_offsets[item] = end
        end += aligned(layouts[item].staged_chunks * layouts[item].chunk_bytes)
    sending = [t for t, following in enumerate(all_steps[1:]) if any(move.is_result for move in following.moves)]
    largest = max((_result_bytes(all_steps[t], layout, backward, layouts) for t in sending), default=0)
    result_offsets = {t: end + i % REGIONS * largest for i, t in enumerate(sending)}
    return operand_offsets, result_offsets, end + min(REGIONS, len(sending)) * largest


def _result_bytes(step: Step, layout: Layout, backward: bool, layouts: BufferLayouts) -> int:
    """Returns the most bytes of results that a step leaves in any rank's outbox."""
    return max(
        sum(
            aligned(len(block.chunks) * layouts[block.item].chunk_bytes)
            for block in result_blocks(step, layout, r, backward)
        )
        for r in range(layout.world)
    )
