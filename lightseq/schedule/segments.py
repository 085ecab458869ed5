"""Masks of tiles with packed documents, trees or windows: runs of queries, each against a run of keys.

A segment is causal, aligned bottom-right (its last query sees its last key), or full. Under a window, segments are
causal, and a query sees only the last keys up to its own, as many as the window has. In a tree, a query may stand in
several segments, with other keys in each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Columns of a table of segments: indices in the tile, counts, and 1 if causal, else 0.
FIRST_QUERY, QUERIES, FIRST_KEY, KEYS, CAUSAL = range(5)


class VarlenCall(NamedTuple):
    """Segments for one varlen kernel call: all causal or all full. No two share a query, or a key.

    `gathered` is that of `Segments`. Under it, segments may hold the same key.
    """

    segments: NDArray[np.int64]
    causal: bool
    gathered: NDArray[np.int64] | None = None

    @property
    def queries(self) -> "slice | NDArray[np.int64]":
        """Indices of the queries in the tile."""
        return _run(self.segments[:, FIRST_QUERY], self.segments[:, QUERIES])

    @property
    def keys(self) -> "slice | NDArray[np.int64]":
        """Indices of the keys in the tile."""
        found = _run(self.segments[:, FIRST_KEY], self.segments[:, KEYS])
        return found if self.gathered is None else self.gathered[found]


@dataclass(frozen=True, eq=False)
class Segments:
    """All segments of one tile. Segments with a common query have different keys; several may share keys."""

    table: NDArray[np.int64]  # (segments, 5)
    window: int | None = None  # keys that a query sees, with its own; None: all before it
    gathered: NDArray[np.int64] | None = None  # order of the tile's keys for `table`; None: the tile's own order
    cache: dict[Any, Any] = field(default_factory=dict)  # index tensors of kernels, by device

    def __repr__(self) -> str:
        return f"Segments({self.table.tolist()}{f', window {self.window}' if self.window else ''})"

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
        rows, keys, causal = self.table[:, QUERIES], self.table[:, KEYS], self.table[:, CAUSAL]
        whole = rows * keys - causal * (rows * (rows - 1) // 2)
        if self.window is None:
            return int(whole.sum())
        hidden = np.minimum(np.maximum(keys - self.window, 0), rows)  # queries that see fewer keys than without it
        most = np.maximum(keys - self.window, 0)  # keys that the last query does not see
        return int((whole - hidden * most + hidden * (hidden - 1) // 2).sum())

    @cached_property
    def varlen_calls(self) -> tuple[VarlenCall, ...]:
        """The calls that together hold all segments: one, except under striped and in trees.

        A segment of one query counts as causal or full, whichever fits.
        """
        calls: list[_Call] = []
        for segment in self.table.tolist():
            if not any(call.take(segment) for call in calls):
                calls.append(_Call(segment))
        return tuple(VarlenCall(np.array(call.taken), 1 in call.kinds, self.gathered) for call in calls)

    @cached_property
    def shares_queries(self) -> bool:
        """True if a query stands in several segments, whose results have to be merged."""
        runs = self.table[np.argsort(self.table[:, FIRST_QUERY], kind="stable")]
        return bool((runs[1:, FIRST_QUERY] < runs[:-1, FIRST_QUERY] + runs[:-1, QUERIES]).any())

    def cut(self, size: int) -> "tuple[Segments, list[int], list[int]]":
        """Leaves out the chunks, `size` tokens each, that no segment touches.

        Returns segments relative to the chunks kept, and the indices of the kept chunks of queries and of keys.
        """
        table, gathered = self.table.copy(), self.gathered
        q = _touched(table[:, FIRST_QUERY], table[:, QUERIES], size)
        table[:, FIRST_QUERY] = _moved(table[:, FIRST_QUERY], q, size)
        if gathered is not None:
            kv = np.unique(gathered // size)
            gathered = _moved(gathered, kv, size)
        else:
            kv = _touched(table[:, FIRST_KEY], table[:, KEYS], size)
            table[:, FIRST_KEY] = _moved(table[:, FIRST_KEY], kv, size)
        return Segments(table, self.window, gathered), q.tolist(), kv.tolist()


class _Call:
    """Segments of a call so far. Their queries are in rising order, and their keys do not overlap."""

    def __init__(self, segment: Sequence[int]) -> None:
        self.kinds, self.taken = _kinds(segment), [segment]
        self._first_key, self._end_key = segment[FIRST_KEY], segment[FIRST_KEY] + segment[KEYS]

    def take(self, segment: Sequence[int]) -> bool:
        """Adds a segment, and returns True if it fits."""
        last, first_key, end_key = self.taken[-1], segment[FIRST_KEY], segment[FIRST_KEY] + segment[KEYS]
        is_behind = last[FIRST_QUERY] + last[QUERIES] <= segment[FIRST_QUERY]
        is_apart = first_key >= self._end_key or end_key <= self._first_key
        if not is_behind or not is_apart or len(self.kinds | _kinds(segment)) > 1:
            return False
        self.kinds |= _kinds(segment)
        self.taken.append(segment)
        self._first_key, self._end_key = min(self._first_key, first_key), max(self._end_key, end_key)
        return True


def _kinds(segment: Sequence[int]) -> set[int]:
    return {segment[CAUSAL]} if segment[QUERIES] > 1 else set()


def _touched(first: NDArray[np.int64], counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Returns the chunks that runs of tokens touch, in rising order."""
    begin, end = first // size, (first + counts - 1) // size + 1
    edges = np.zeros(int(end.max()) + 1, dtype=np.int64)
    np.add.at(edges, begin, 1)
    np.add.at(edges, end, -1)
    return np.flatnonzero(np.cumsum(edges))


def _moved(tokens: NDArray[np.int64], chunks: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Returns the indices of tokens once only these chunks are left."""
    moved: NDArray[np.int64] = np.searchsorted(chunks, tokens // size) * size + tokens % size
    return moved


def _run(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> "slice | NDArray[np.int64]":
    """Returns the indices of runs, as a slice if they are contiguous."""
    if np.array_equal(starts[1:], starts[:-1] + sizes[:-1]):
        return slice(int(starts[0]), int(starts[-1] + sizes[-1]))
    return np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
