"""Several documents in one sequence: where they begin, what their tokens see, and a schedule's table limited to that.

A document is a run of neighbouring tokens. `boundaries` are the first token of each, and the end of the last: 0 first,
rising, a multiple of all chunks last.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightseq.schedule.algorithms import SCHEDULES, assign_tiles, prefix, with_ulysses
from lightseq.schedule.layout import Layout
from lightseq.schedule.segments import CAUSAL, KEYS, ROWS, K, Q, Segments
from lightseq.schedule.table import Assignment, Schedule, Tile, derive_steps

Ints = NDArray[np.int64]

# Tables of packed sequences that are kept: they hardly come again, and a kernel's indices of their rows lie on the
# device for as long (12 MiB of each at 1M tokens over four ranks under striped).
MAX_PACKED_TABLES = 8
PADDING_TOKENS = 128  # of a document of padding: one tile of a kernel, so that a row without a key need not exist
MAX_CHUNKS = 32  # of one rank
MIN_CHUNK_TOKENS = 16
MAX_IMBALANCE = 1.03  # of attention area, the fullest rank's over the mean: more chunks are tried beyond it
MAX_SWAPS = 256


def check_boundaries(boundaries: Sequence[int], length: int) -> tuple[int, ...]:
    """The boundaries as integers. Raises ValueError unless they begin with 0, rise and end at most at `length`."""
    found = tuple(int(x) for x in boundaries)
    if len(found) < 2 or found[0] != 0 or any(b <= a for a, b in pairwise(found)):
        shown = ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
        raise ValueError(f"document boundaries {shown} do not rise from 0; give the first token of each, and the end")
    if found[-1] > length:
        raise ValueError(f"documents end at token {found[-1]} of a sequence of {length}; cut them, or pad the sequence")
    return found


def pad_boundaries(boundaries: Sequence[int], length: int) -> tuple[int, ...]:
    """The boundaries with what is missing up to `length` as documents of padding."""
    return (*boundaries, *range(boundaries[-1] + PADDING_TOKENS, length, PADDING_TOKENS), *(
        [length] if boundaries[-1] < length else []
    ))  # fmt: skip


def document_positions(boundaries: Sequence[int]) -> Ints:
    """The position of every token in its own document."""
    edges = np.asarray(boundaries)
    return np.arange(edges[-1]) - np.repeat(edges[:-1], np.diff(edges))


def area_before(boundaries: Sequence[int], places: Ints) -> Ints:
    """Pairs of a query before each place, and a key that it sees."""
    edges = np.asarray(boundaries)
    sizes = np.diff(edges)
    whole = np.concatenate([[0], np.cumsum(sizes * (sizes + 1) // 2)])
    document = np.clip(np.searchsorted(edges, places, side="right") - 1, 0, len(sizes) - 1)
    inside = places - edges[document]
    return whole[document] + inside * (inside + 1) // 2


# ---- chunks to ranks -------------------------------------------------------------------------------------------------


def max_chunks_per_rank(length: int, places: int) -> int:
    """The most chunks a rank that a sequence of this length is cut into: it is padded for them, whatever it holds."""
    chunks = 1
    while places > 1 and chunks < MAX_CHUNKS and length // (places * 2 * chunks) >= MIN_CHUNK_TOKENS:
        chunks *= 2
    return chunks


def assign_chunks(areas: Ints, places: int) -> tuple[int, ...]:
    """The place of every chunk: as many chunks for each, and nearly the same area.

    The largest that is left goes to the place with least that has room; then chunks are swapped with those of the
    fullest place as long as that lowers it.
    """
    room = [len(areas) // places] * places
    heap = [(0, place) for place in range(places)]
    homes = np.zeros(len(areas), np.int64)
    for chunk in np.argsort(-areas, kind="stable").tolist():
        total, place = heapq.heappop(heap)
        homes[chunk], room[place] = place, room[place] - 1
        if room[place]:
            heapq.heappush(heap, (total + int(areas[chunk]), place))
    for _ in range(MAX_SWAPS):
        totals = np.bincount(homes, areas, places)
        fullest = int(totals.argmax())
        mine, theirs = np.flatnonzero(homes == fullest), np.flatnonzero(homes != fullest)
        given = areas[mine][:, None] - areas[theirs][None, :]
        after = np.maximum(totals[fullest] - given, totals[homes[theirs]][None, :] + given)
        if not theirs.size or after.min() >= totals[fullest]:
            break
        i, j = np.unravel_index(after.argmin(), after.shape)
        homes[mine[i]], homes[theirs[j]] = homes[theirs[j]], fullest
    return tuple(homes.tolist())


def imbalance(areas: Ints, homes: Sequence[int]) -> float:
    """Attention area of the fullest place over the mean."""
    totals = np.bincount(homes, areas)
    return float(totals.max() / totals.mean())


def balanced_layout(boundaries: Sequence[int], world: int, ulysses: int = 1) -> Layout:
    """As few chunks a rank as keep all ranks within LARGEST_IMBALANCE: large ones suit kernels."""
    places, length = world // ulysses, boundaries[-1]
    best: tuple[float, Layout] | None = None
    chunks, most = 1, max_chunks_per_rank(length, places)
    while chunks <= most and length % (world * chunks) == 0:
        edges = np.linspace(0, length, places * chunks + 1).astype(np.int64)
        areas = np.diff(area_before(boundaries, edges))
        homes = assign_chunks(areas, places)
        uneven = imbalance(areas, homes)
        if best is None or uneven < best[0]:
            best = uneven, Layout("balanced", world, chunks, ulysses, homes)
        if best[0] <= MAX_IMBALANCE:
            break
        chunks *= 2
    assert best is not None
    return best[1]


# ---- tables ----------------------------------------------------------------------------------------------------------


def padded_length(schedule: Schedule, length: int) -> int:
    """What a packed sequence of `length` tokens is padded to under a schedule, wherever its documents begin."""
    layout = schedule.layout
    if not _is_balanced(schedule):
        return layout.padded_length(length)
    unit = layout.world * max_chunks_per_rank(length, layout.outer.world)
    return -(-length // unit) * unit


def local_tokens(schedule: Schedule, length: int, packed: bool) -> int:
    """Tokens of one rank, of a sequence that holds several documents or not."""
    whole = padded_length(schedule, length) if packed else schedule.layout.padded_length(length)
    return whole // schedule.world


@lru_cache(maxsize=MAX_PACKED_TABLES)  # a batch's table serves all its layers, forward and backward
def packed_schedule(schedule: Schedule, boundaries: tuple[int, ...]) -> Schedule:
    """The schedule's table for one sequence of documents. Schedules that pull keys get a layout of their own."""
    layout = schedule.layout
    if _is_balanced(schedule):
        layout = balanced_layout(boundaries, layout.world, layout.ulysses)
        tiles = one_tile_per_step(prefix(layout.outer, schedule.turns))
    else:
        tiles = assign_tiles(schedule)
    limited = limit_to_documents(tiles, layout.outer, boundaries)
    if layout.ulysses > 1:
        limited = with_ulysses(limited, layout.ulysses)
    return replace(
        schedule, layout=layout, boundaries=boundaries,
        forward=derive_steps(layout, limited), backward=derive_steps(layout, limited, backward=True),
    )  # fmt: skip


def one_tile_per_step(assignment: Assignment) -> Assignment:
    """A step for every tile of a rank, so that only the first one's keys are waited for.

    In the order of the sequence: what a document's tiles share stays from one to the next.
    """
    return [[mine[i : i + 1] for mine in row] for row in assignment for i in range(max(len(mine) for mine in row))]


def balance(schedule: Schedule) -> float:
    """Of a packed table: attention area of the mean rank over that of the fullest."""
    areas = [sum(_area(tile) for step in schedule.forward for tile in step.tiles[r]) for r in range(schedule.world)]
    return sum(areas) / schedule.world / max(areas)


def _area(tile: Tile) -> int:
    assert isinstance(tile.mask, Segments), tile
    return tile.mask.area


def _is_balanced(schedule: Schedule) -> bool:
    """Returns whether every batch of packed documents gets a layout of its own."""
    return SCHEDULES[schedule.name].packed_work == "own_layout"


def limit_to_documents(assignment: Assignment, layout: Layout, boundaries: Sequence[int]) -> Assignment:
    """The same tiles with segments for masks, without tiles and chunks in which no document meets itself."""
    edges = np.asarray(boundaries)
    chunks = np.array([layout.chunk_range(chunk, int(edges[-1])) for chunk in range(layout.chunk_count)])
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tile, ...]] = {}

    def limited(tile: Tile) -> tuple[Tile, ...]:
        if (tile.q, tile.kv) not in known:
            known[tile.q, tile.kv] = _limit_tile(tile, chunks, edges)
        return tuple(found._replace(heads=tile.heads) for found in known[tile.q, tile.kv])

    rows = [[tuple(found for tile in tiles for found in limited(tile)) for tiles in row] for row in assignment]
    return [row for row in rows if any(row)]


def _limit_tile(tile: Tile, chunks: Ints, boundaries: Ints) -> tuple[Tile, ...]:
    """The tile as it is left, or nothing."""
    segments = find_segments(chunks[list(tile.q)], chunks[list(tile.kv)], boundaries)
    if not len(segments.table):
        return ()
    segments, q, kv = segments.cut(int(chunks[0, 2]))
    return (Tile(tile.q[q], tile.kv[kv], segments),)


def find_segments(q: Ints, kv: Ints, boundaries: Ints) -> Segments:
    """Causal pairs of each document between chunks of queries and of keys, side by side, in rising order each.

    Chunks are progressions of positions: first, step, how many. In a chunk of queries those of a document are one as
    well. The keys of that document that its queries see grow by one from query to query until none is left, or do not
    grow at all.
    """
    starts, steps, sizes = kv.T

    def keys_before(place: Ints) -> Ints:
        return np.clip(-((starts - place[:, None]) // steps), 0, sizes).sum(1)

    found: list[list[int]] = []
    for i, (start, step, size) in enumerate(q.tolist()):
        inside = slice(*np.searchsorted(boundaries, (start, start + step * (size - 1)), side="right"))
        begins, ends = boundaries[inside.start - 1 : inside.stop], boundaries[inside.start : inside.stop + 1]
        row, stop = (np.clip(-((start - x) // step), 0, size) for x in (begins, ends))
        some = stop > row
        begins, row, stop = begins[some], row[some], stop[some]
        first_key = keys_before(begins)
        least, most = (keys_before(start + step * x + 1) - first_key for x in (row, stop - 1))
        skipped = np.where(most > 0, least == 0, stop - row)  # queries that see no key yet
        climbing = np.where(most > least, most - least + 1 - skipped, 0)
        row += i * size + skipped
        full = stop + i * size - row - climbing
        for r, c, f, k, n in zip(*(x.tolist() for x in (row, climbing, full, first_key, most)), strict=True):
            if c > 0:
                _append(found, [r, c, k, n, 1])
            if f > 0:
                _append(found, [r + c, f, k, n, 0])
    return Segments(np.array(found, dtype=np.int64).reshape(-1, 5))


def _append(found: list[list[int]], segment: list[int]) -> None:
    """Joins a segment to the last one where it is its continuation in the next chunk of queries."""
    row, rows, key, keys, causal = segment
    last = found[-1] if found else [0, 0, -1, 0, 0]
    if last[Q] + last[ROWS] == row and last[K] == key:
        grows, kinds = last[KEYS] + rows == keys, {last[CAUSAL] if last[ROWS] > 1 else 2, causal if rows > 1 else 2}
        if (grows and 0 not in kinds) or (last[KEYS] == keys and 1 not in kinds):
            found[-1] = [last[Q], last[ROWS] + rows, key, keys, int(grows)]
            return
    found.append(segment)
