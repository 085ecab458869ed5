"""Sliding windows: a schedule's table limited to the keys that queries see, so that nothing else is computed or moved.

A query sees the last `window` keys up to its own; in a tree, these are keys of its path. Layers of a model may have
different windows, but share a layout: the table of a window cuts each chunk of that layout into pieces, so that a rank
fetches only the tail of the chunk before its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from lightseq.schedule.algorithms import assign_tiles, check_takes_windows, with_ulysses
from lightseq.schedule.documents import MAX_PACKED_TABLES, assign_packed_tiles, packed_schedule
from lightseq.schedule.layout import Layout
from lightseq.schedule.nodes import Ints, Nodes
from lightseq.schedule.segments import Segments
from lightseq.schedule.table import Assignment, Schedule, Tile, derive_steps

MAX_PIECES = 64  # most pieces of a chunk
MAX_EXCESS = 0.02  # share of fetched tokens that may lie outside the window


@lru_cache(maxsize=MAX_PACKED_TABLES)  # a model has few windows, and all its layers share their tables
def windowed_schedule(schedule: Schedule, nodes: Nodes, window: int, *, packed: bool) -> Schedule:
    """Makes the schedule's table for one sequence whose layers have a window.

    `nodes` are those of the sequence, or one of its padded length. A `packed` sequence keeps the layout of its nodes,
    also if there is only one. Raises ValueError for a schedule that computes parts of a query's keys in different
    tiles.
    """
    check_takes_windows(schedule.name)
    if packed:
        layout = packed_schedule(schedule, nodes).layout
        pieces, assignment = 1, assign_packed_tiles(schedule, layout)
    else:
        pieces = pieces_per_chunk(schedule.layout, nodes.length, window)
        layout, assignment = cut_layout(schedule.layout, pieces), assign_tiles(schedule)
    limited = limit_to_window(assignment, layout.group_layout, pieces, nodes, window)
    if layout.ulysses > 1:
        limited = with_ulysses(limited, layout.ulysses)
    return replace(
        schedule, layout=layout, nodes=nodes, window=window,
        forward=derive_steps(layout, limited), backward=derive_steps(layout, limited, backward=True),
    )  # fmt: skip


def pieces_per_chunk(layout: Layout, length: int, window: int) -> int:
    """Returns the fewest pieces with which little more than the window is fetched from the chunk before one's own.

    Chunks of Ulysses groups stay whole: their ranks hold a part of each, which would be another part of a piece.
    """
    if layout.ulysses > 1:
        return 1
    size, needed = length // layout.chunk_count, window - 1
    best = 1, max(size, 1)
    for pieces in range(1, min(MAX_PIECES, size) + 1):
        if size % pieces:
            continue
        piece = size // pieces
        fetched = -(-needed // piece) * piece
        if fetched < best[1]:
            best = pieces, fetched
        if fetched <= (1 + MAX_EXCESS) * needed:
            return pieces
    return best[0]


def cut_layout(layout: Layout, pieces: int) -> Layout:
    """Returns the layout with every chunk cut into pieces. The order of a rank's tokens stays the same."""
    if pieces == 1:
        return layout
    chunk_groups = tuple(layout.home(chunk // pieces) for chunk in range(layout.chunk_count * pieces))
    return Layout("explicit", layout.world, layout.chunks_per_rank * pieces, chunk_groups=chunk_groups)


def limit_to_window(assignment: Assignment, layout: Layout, pieces: int, nodes: Nodes, window: int) -> Assignment:
    """Cuts the chunks of an assignment into pieces, and drops pieces in which no query sees a key."""
    size = nodes.length // layout.chunk_count
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Tile] = {}

    def limited(tile: Tile) -> Tile:
        if (tile.q, tile.kv) not in known:
            q, kv = (tuple(c * pieces + i for c in chunks for i in range(pieces)) for chunks in (tile.q, tile.kv))
            segments, q_kept, kv_kept = find_window_segments(q, kv, size, nodes, window).cut(size)
            known[tile.q, tile.kv] = Tile(tuple(q[i] for i in q_kept), tuple(kv[i] for i in kv_kept), segments)
        return known[tile.q, tile.kv]._replace(head_group=tile.head_group)

    return [[tuple(limited(tile) for tile in tiles) for tiles in row] for row in assignment]


def find_window_segments(q: Sequence[int], kv: Sequence[int], size: int, nodes: Nodes, window: int) -> Segments:
    """Finds the segments of a tile of chunks of `size` tokens: a node's neighbouring queries and all their keys.

    In a tree these are gathered: at most `window` - 1 keys of a node's ancestors, which its siblings gather too.
    """
    keys = list(_runs(kv, size))
    assert len(keys) == 1, "the keys of a tile under a window lie side by side"
    ((first_key, last_key),) = keys
    edges, found, row = nodes.edges, list[list[int]](), 0
    gathered, count = list[Ints](), 0
    for begin, end in _runs(q, size):
        inside = edges[(edges > begin) & (edges < end)].tolist()
        for start, stop in zip([begin, *inside], [*inside, end], strict=True):
            node = int(np.searchsorted(edges, start, side="right")) - 1
            first = max(int(edges[node]), start - window + 1)
            assert first_key <= first and stop <= last_key, "a tile under a window holds all keys of its queries"
            if nodes.parents is None:
                found.append([row, stop - start, first - first_key, stop - first, 1])
            else:
                seen = [*_last_tokens_before(nodes, node, window - 1 - (start - first)), np.arange(first, stop)]
                gathered += seen
                found.append([row, stop - start, count, sum(map(len, seen)), 1])
                count += found[-1][3]
            row += stop - start
    table = np.array(found, dtype=np.int64).reshape(-1, 5)
    return Segments(table, window, np.concatenate(gathered) - first_key if gathered else None)


def _last_tokens_before(nodes: Nodes, node: int, count: int) -> list[Ints]:
    """Returns the last `count` tokens of a node's ancestors, in the order of their positions."""
    found = list[Ints]()
    for ancestor in nodes.ancestors(node):
        start, stop = nodes.boundaries[ancestor : ancestor + 2]
        if count > 0:
            found.insert(0, np.arange(max(start, stop - count), stop))
            count -= len(found[0])
    return found


def _runs(chunks: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Yields begin and end of runs of neighbouring chunks, in tokens."""
    begin = last = chunks[0]
    for chunk in [*chunks[1:], -2]:
        if chunk != last + 1:
            yield begin * size, (last + 1) * size
            begin = chunk
        last = chunk
