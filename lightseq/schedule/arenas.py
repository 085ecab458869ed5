"""Placement of a schedule's buffers: operands side by side in arenas, results side by side in outboxes."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from lightseq.schedule.layout import Layout
from lightseq.schedule.table import OPERANDS, Items, Step, Tile, result_chunks


@dataclass(frozen=True)
class Arena:
    """Buffer of chunks side by side, some of them from other ranks, that the tiles of one rank read in place.

    A tile of a tree leaves out siblings' chunks, which another tile may read; it then copies its own side by side. The
    arena is filled from the step before `first` on, and freed after step `last`.
    """

    item: str
    head_group: int
    chunks: tuple[int, ...]
    first: int
    last: int

    def find(self, chunks: tuple[int, ...]) -> list[tuple[int, int]]:
        """Returns the runs in which `chunks` lie side by side: the index of the first in the arena, and their count."""
        runs: list[tuple[int, int]] = []
        for index in map(self.chunks.index, chunks):
            if runs and sum(runs[-1]) == index:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((index, 1))
        return runs


class ResultBlock(NamedTuple):
    """Results of one tile for an item, side by side in the outbox, to be sent to the home ranks of their chunks."""

    tile: int
    item: str
    chunks: tuple[int, ...]


def local_start(layout: Layout, rank: int, chunks: tuple[int, ...]) -> int | None:
    """Returns the index at which `chunks` lie side by side in the rank's own tensors, None if they do not."""
    mine = layout.chunks(rank)
    if chunks[0] not in mine:
        return None
    start = mine.index(chunks[0])
    return start if mine[start : start + len(chunks)] == chunks else None


def arenas(steps: tuple[Step, ...], layout: Layout, rank: int, gathered_items: Items = OPERANDS) -> tuple[Arena, ...]:
    """Returns every arena of a pass on one rank. Neighbouring steps that share chunks share one arena."""
    done: list[Arena] = []
    for t, step in enumerate(steps):
        for (item, head_group), chunks in _gathered(step.tiles[rank], layout, rank, gathered_items).items():
            key = (item, head_group, t - 1)
            before = [a for a in done if (a.item, a.head_group, a.last) == key and chunks & {*a.chunks}]
            if before:
                done.remove(before[0])
                done.append(replace(before[0], chunks=tuple(sorted(chunks | {*before[0].chunks})), last=t))
            else:
                done.append(Arena(item, head_group, tuple(sorted(chunks)), t, t))
    return tuple(done)


def _gathered(
    tiles: tuple[Tile, ...], layout: Layout, rank: int, gathered_items: Items
) -> dict[tuple[str, int], set[int]]:
    """Returns the chunks, by item and head group, that a step's tiles read from an arena."""
    found: dict[tuple[str, int], set[int]] = {}
    for tile in tiles:
        for item, chunks in (("q", tile.q), ("kv", tile.kv)):
            if item in gathered_items and local_start(layout, rank, chunks) is None:
                found.setdefault((item, tile.head_group), set()).update(chunks)
    return found


def result_blocks(step: Step, layout: Layout, rank: int, backward: bool) -> tuple[ResultBlock, ...]:
    """Returns the blocks that a rank's tiles of a step leave in its outbox, in order.

    If one result of an item has to travel, all results of the item are in the outbox.
    """
    made = [
        ResultBlock(i, item, chunks)
        for i, tile in enumerate(step.tiles[rank])
        for item, chunks in result_chunks(tile, backward).items()
    ]
    travels = {block.item for block in made if any(layout.home(chunk) != rank for chunk in block.chunks)}
    return tuple(block for block in made if block.item in travels)
