"""Packed documents and trees: balanced layouts, and a schedule's table limited to what their tokens see.

The length of a row, its padding included, is a multiple of the number of chunks.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from lightseq.schedule.algorithms import SCHEDULES, assign_tiles, prefix, with_ulysses
from lightseq.schedule.layout import Layout
from lightseq.schedule.nodes import Ints, Nodes
from lightseq.schedule.segments import CAUSAL, FIRST_KEY, FIRST_QUERY, KEYS, QUERIES, Segments
from lightseq.schedule.table import Assignment, Schedule, Tile, derive_steps

# Cached tables of packed sequences. They rarely repeat, and each keeps index tensors of kernels on the device (12 MiB
# at 1M tokens over four ranks under striped).
MAX_PACKED_TABLES = 8
MIN_CHUNK_TOKENS = 16
MAX_IMBALANCE = 1.03  # attention area of the fullest rank over the mean; above it more chunks are tried
# Visible pairs that a GPU computes while a tile's kernels are launched, forward and backward: about 0.3 ms on an H200.
PAIRS_PER_TILE = 2**22
MAX_SWAPS = 256


# ---- chunks to ranks -------------------------------------------------------------------------------------------------


def max_chunks_per_rank(length: int, layout: Layout) -> int:
    """Returns the largest number of chunks per rank at this length. Packed sequences are padded to allow it."""
    groups, most, chunks = layout.group_layout.world, layout.most_packed_chunks, 1
    while groups > 1 and chunks < most and length // (groups * 2 * chunks) >= MIN_CHUNK_TOKENS:
        chunks *= 2
    return chunks


def assign_chunks(areas: Ints, groups: int) -> tuple[int, ...]:
    """Assigns the same number of chunks to each of `groups` Ulysses groups, with nearly equal areas.

    `areas` are the visible (query, key) pairs of each chunk's queries. Returns the Ulysses group of each chunk.

    Greedy: the largest chunk left goes to the group with the smallest area that has room. Then chunks of the fullest
    group are swapped with others as long as that lowers the largest area.
    """
    room = [len(areas) // groups] * groups
    heap = [(0, group) for group in range(groups)]
    chunk_groups = np.zeros(len(areas), np.int64)
    for chunk in np.argsort(-areas, kind="stable").tolist():
        total, group = heapq.heappop(heap)
        chunk_groups[chunk], room[group] = group, room[group] - 1
        if room[group]:
            heapq.heappush(heap, (total + int(areas[chunk]), group))
    for _ in range(MAX_SWAPS):
        totals = np.bincount(chunk_groups, areas, groups)
        fullest = int(totals.argmax())
        mine, theirs = np.flatnonzero(chunk_groups == fullest), np.flatnonzero(chunk_groups != fullest)
        # For each swap of a chunk with one of another group: the area given away, and the larger area of both after it.
        given = areas[mine][:, None] - areas[theirs][None, :]
        after = np.maximum(totals[fullest] - given, totals[chunk_groups[theirs]][None, :] + given)
        if not theirs.size or after.min() >= totals[fullest]:
            break
        i, j = np.unravel_index(after.argmin(), after.shape)
        chunk_groups[mine[i]], chunk_groups[theirs[j]] = chunk_groups[theirs[j]], fullest
    return tuple(chunk_groups.tolist())


def imbalance(areas: Ints, chunk_groups: Sequence[int]) -> float:
    """Returns the area of the fullest group over the mean, for the `chunk_groups` of `assign_chunks`."""
    totals = np.bincount(chunk_groups, areas)
    return float(totals.max() / totals.mean())


def balanced_layout(nodes: Nodes, ranks: Layout) -> Layout:
    """Returns the layout whose fullest rank has the least work: visible pairs, and a tile for each chunk.

    More chunks than MAX_IMBALANCE needs are not tried, because kernels are faster on large ones.

    `ranks` is the layout that the same ranks have for one document.
    """
    world, ulysses, length = ranks.world, ranks.ulysses, nodes.length
    groups, most = world // ulysses, max_chunks_per_rank(length, ranks)
    best: tuple[int, Layout] | None = None
    chunks = 1
    while chunks <= most and length % (world * chunks) == 0:
        edges = np.linspace(0, length, groups * chunks + 1).astype(np.int64)
        areas = np.diff(nodes.area_before(edges))
        chunk_groups = assign_chunks(areas, groups)
        work = int(np.bincount(chunk_groups, areas).max()) + chunks * PAIRS_PER_TILE
        if best is None or work < best[0]:
            best = work, Layout("explicit", world, chunks, ulysses, chunk_groups)
        if imbalance(areas, chunk_groups) <= MAX_IMBALANCE:
            break
        chunks *= 2
    assert best is not None
    return best[1]


@lru_cache(maxsize=MAX_PACKED_TABLES)
def packed_layout(layout: Layout, balanced: bool, nodes: Nodes) -> Layout:
    """Returns the layout of a packed sequence on the ranks of `layout`: that one, or one that balances its nodes.

    The length of `nodes` is a `packed_length`.
    """
    return balanced_layout(nodes, layout) if balanced else layout


def packed_length(layout: Layout, balanced: bool, length: int) -> int:
    """Returns the padded length of a packed sequence on the ranks of `layout`; see `packed_layout`."""
    if not balanced:
        return layout.padded_length(length)
    unit = layout.world * max_chunks_per_rank(length, layout)
    return -(-length // unit) * unit


# ---- tables ----------------------------------------------------------------------------------------------------------


def padded_length(schedule: Schedule, length: int) -> int:
    """Returns the padded length of a packed sequence, which does not depend on where its documents begin."""
    return packed_length(schedule.layout, has_own_layouts(schedule), length)


def local_tokens(schedule: Schedule, length: int, packed: bool) -> int:
    """Returns the number of tokens on one rank, for a packed sequence or for one document."""
    whole = padded_length(schedule, length) if packed else schedule.layout.padded_length(length)
    return whole // schedule.world


@lru_cache(maxsize=MAX_PACKED_TABLES)  # a batch's table serves all its layers, forward and backward
def packed_schedule(schedule: Schedule, nodes: Nodes) -> Schedule:
    """Makes the schedule's table for one sequence of documents or trees, with a layout of its own under prefix and usp.

    The length of `nodes` is a `padded_length`.
    """
    layout = packed_layout(schedule.layout, has_own_layouts(schedule), nodes)
    limited = limit_to_nodes(assign_packed_tiles(schedule, layout), layout.group_layout, nodes)
    if layout.ulysses > 1:
        limited = with_ulysses(limited, layout.ulysses)
    return replace(
        schedule, layout=layout, nodes=nodes,
        forward=derive_steps(layout, limited), backward=derive_steps(layout, limited, backward=True),
    )  # fmt: skip


def assign_packed_tiles(schedule: Schedule, layout: Layout) -> Assignment:
    """Assigns tiles to the Ulysses groups of a packed sequence in this layout."""
    if has_own_layouts(schedule):
        return one_tile_per_step(prefix(layout.group_layout, schedule.head_groups_per_rank))
    return assign_tiles(schedule)


def one_tile_per_step(assignment: Assignment) -> Assignment:
    """Splits steps into one tile per rank each, so that only the first tile waits for its keys.

    Tiles keep the order of the sequence, so that keys that neighbouring tiles share do not travel again.
    """
    return [[mine[i : i + 1] for mine in row] for row in assignment for i in range(max(len(mine) for mine in row))]


def balance(schedule: Schedule) -> float:
    """Returns the mean attention area of a rank over the largest, for a packed table."""
    areas = [sum(_area(tile) for step in schedule.forward for tile in step.tiles[r]) for r in range(schedule.world)]
    return sum(areas) / schedule.world / max(areas)


def _area(tile: Tile) -> int:
    assert isinstance(tile.mask, Segments), tile
    return tile.mask.area


def has_own_layouts(schedule: Schedule) -> bool:
    """Returns whether the layout differs between batches of packed documents."""
    return SCHEDULES[schedule.name].packed_work == "own_layout"


def limit_to_nodes(assignment: Assignment, layout: Layout, nodes: Nodes) -> Assignment:
    """Replaces masks by segments, and drops tiles and chunks in which no query sees a key."""
    chunks = np.array([layout.chunk_range(chunk, nodes.length) for chunk in range(layout.chunk_count)])
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tile, ...]] = {}

    def limited(tile: Tile) -> tuple[Tile, ...]:
        if (tile.q, tile.kv) not in known:
            known[tile.q, tile.kv] = _limit_tile(tile, chunks, nodes)
        return tuple(found._replace(head_group=tile.head_group) for found in known[tile.q, tile.kv])

    rows = [[tuple(found for tile in tiles for found in limited(tile)) for tiles in row] for row in assignment]
    return [row for row in rows if any(row)]


def _limit_tile(tile: Tile, chunks: Ints, nodes: Nodes) -> tuple[Tile, ...]:
    """Returns the tile with its segments, or nothing if no query sees a key."""
    segments = find_segments(chunks[list(tile.q)], chunks[list(tile.kv)], nodes)
    if not len(segments.table):
        return ()
    segments, q, kv = segments.cut(int(chunks[0, 2]))
    return (Tile(tuple(tile.q[i] for i in q), tuple(tile.kv[i] for i in kv), segments),)


def find_segments(q: Ints, kv: Ints, nodes: Nodes) -> Segments:
    """Finds the segments of a tile: runs of a path's queries against keys of the path or of a path that it leaves.

    `q` and `kv` have a row (first, step, count) of tokens for each chunk of the tile, in rising order.
    """
    found: list[list[int]] = []
    for i, chunk in enumerate(q.tolist()):
        for segment in _segments_of_chunk(chunk, i * chunk[2], kv, nodes.path_edges):
            _append(found, segment)
    if nodes.parents is not None:
        _add_ancestors(found, q, kv, nodes)
    return Segments(np.array(found, dtype=np.int64).reshape(-1, 5))


def _add_ancestors(found: list[list[int]], q: Ints, kv: Ints, nodes: Nodes) -> None:
    """Adds the segments of queries that see keys of other paths whole.

    Queries that follow those of a full segment, and see the same keys, join it.
    """
    full = {(x[FIRST_QUERY] + x[QUERIES], x[FIRST_KEY], x[KEYS]): x for x in found if not x[CAUSAL]}
    r = nodes.rectangles
    first_query, end_query = (_tokens_before(x, q) for x in (r.first_query, r.end_query))
    first_key, end_key = (_tokens_before(x, kv) for x in (r.first_key, r.end_key))
    columns = first_query, end_query - first_query, first_key, end_key - first_key
    for query, queries, key, keys in zip(*(x.tolist() for x in columns), strict=True):
        if not queries or not keys:
            continue
        if (query, key, keys) in full:
            full[query, key, keys][QUERIES] += queries
        else:
            found.append([query, queries, key, keys, 0])


def _segments_of_chunk(chunk: Sequence[int], chunk_start: int, kv: Ints, boundaries: Ints) -> Iterator[list[int]]:
    """Yields the segments of one chunk of a tile's queries; `chunk_start` is the index of its first query in the tile.

    The queries of a document in the chunk form one run. Each query sees one more key than the one before it (a causal
    segment) until all keys of the tile before the run's end are visible (a full segment).

    Example: one chunk of queries at 8 to 15 and keys at 4 to 11, with documents that begin at 0, 10 and 14. Queries 0
    and 1 see 5 and 6 keys of the first document, from key 0: [0, 2, 0, 6, 1]. Queries 2 to 5 see 1, 2, 2 and 2 keys of
    the second, from key 6: [2, 2, 6, 2, 1] and [4, 2, 6, 2, 0]. Queries 6 and 7 see no key of the third.
    """
    start, step, size = chunk
    inside = slice(*np.searchsorted(boundaries, (start, start + step * (size - 1)), side="right"))
    document_starts = boundaries[inside.start - 1 : inside.stop]
    document_ends = boundaries[inside.start : inside.stop + 1]
    first_query, end_query = (np.clip(-((start - x) // step), 0, size) for x in (document_starts, document_ends))
    first_key = _tokens_before(document_starts, kv)
    seen_by_first, seen_by_last = (
        _tokens_before(start + step * query + 1, kv) - first_key for query in (first_query, end_query - 1)
    )
    queries_without_keys = np.where(seen_by_last > 0, seen_by_first == 0, end_query - first_query)
    causal = np.where(seen_by_last > seen_by_first, seen_by_last - seen_by_first + 1 - queries_without_keys, 0)
    full = end_query - first_query - queries_without_keys - causal
    columns = (chunk_start + first_query + queries_without_keys, causal, full, first_key, seen_by_last)
    for query, causal_queries, full_queries, key, keys in zip(*(x.tolist() for x in columns), strict=True):
        if causal_queries > 0:
            yield [query, causal_queries, key, keys, 1]
        if full_queries > 0:
            yield [query + causal_queries, full_queries, key, keys, 0]


def _tokens_before(tokens: Ints, chunks: Ints) -> Ints:
    """Counts the tokens of a tile's chunks before each token of the row."""
    starts, steps, sizes = chunks.T
    counts: Ints = np.clip(-((starts - tokens[:, None]) // steps), 0, sizes).sum(1)
    return counts


def _append(found: list[list[int]], segment: list[int]) -> None:
    """Appends a segment, or extends the last one if this continues it in the next chunk of queries."""
    if found:
        last, (row, queries, key, keys, _) = found[-1], segment
        if last[FIRST_QUERY] + last[QUERIES] == row and last[FIRST_KEY] == key:
            pair = (last, segment)  # a segment of one query is causal as well as full
            if last[KEYS] + queries == keys and all(x[CAUSAL] or x[QUERIES] == 1 for x in pair):
                found[-1] = [last[FIRST_QUERY], last[QUERIES] + queries, key, keys, 1]
                return
            if last[KEYS] == keys and not any(x[CAUSAL] and x[QUERIES] > 1 for x in pair):
                found[-1] = [last[FIRST_QUERY], last[QUERIES] + queries, key, keys, 0]
                return
    found.append(segment)
