"""Masks of tiles with packed documents or windows: runs of queries, each against a run of keys.

A segment is causal, aligned bottom-right (its last query sees its last key), or full. Under a window, segments are
causal, and a query sees only the last keys up to its own, as many as the window has.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Columns of a table of segments: indices in the tile, counts, and 1 if causal, else 0.
FIRST_QUERY, QUERIES, FIRST_KEY, KEYS, CAUSAL = range(5)


class VarlenCall(NamedTuple):
    """Segments for one varlen kernel call: all causal or all full, and no two share a key."""

    segments: NDArray[np.int64]
    causal: bool

    @property
    def queries(self) -> "slice | NDArray[np.int64]":
        """Indices of the queries in the tile."""
        return _run(self.segments[:, FIRST_QUERY], self.segments[:, QUERIES])

    @property
    def keys(self) -> "slice | NDArray[np.int64]":
        """Indices of the keys in the tile."""
        return _run(self.segments[:, FIRST_KEY], self.segments[:, KEYS])


@dataclass(frozen=True, eq=False)
class Segments:
    """All segments of one tile, in the order of their queries. No two share a query; several may share keys."""

    table: NDArray[np.int64]  # (segments, 5)
    window: int | None = None  # keys that a query sees, with its own; None: all before it
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
        """The calls that together hold all segments: one, except under striped.

        A segment of one query counts as causal or full, whichever fits.
        """
        calls: list[tuple[set[int], list[list[int]]]] = []
        for segment in self.table.tolist():
            kind = {segment[CAUSAL]} if segment[QUERIES] > 1 else set()
            for kinds, taken in calls:
                if len(kinds | kind) <= 1 and taken[-1][FIRST_KEY] + taken[-1][KEYS] <= segment[FIRST_KEY]:
                    taken.append(segment)
                    kinds |= kind
                    break
            else:
                calls.append((kind, [segment]))
        return tuple(VarlenCall(np.array(taken), 1 in kinds) for kinds, taken in calls)

    def cut(self, size: int) -> "tuple[Segments, slice, slice]":
        """Cuts off the chunks, `size` tokens each, before the first and after the last that a segment touches.

        Returns segments relative to the first chunk kept, and the kept chunks of queries and of keys.
        """
        low_q, low_k = (int(self.table[:, i].min()) // size for i in (FIRST_QUERY, FIRST_KEY))
        ends = (self.table[:, FIRST_QUERY] + self.table[:, QUERIES], self.table[:, FIRST_KEY] + self.table[:, KEYS])
        high_q, high_k = (-(-int(end.max()) // size) for end in ends)
        moved = self.table - np.array([low_q * size, 0, low_k * size, 0, 0])
        return Segments(moved, self.window), slice(low_q, high_q), slice(low_k, high_k)


def _run(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> "slice | NDArray[np.int64]":
    """Returns the indices of runs, as a slice if they are contiguous."""
    if np.array_equal(starts[1:], starts[:-1] + sizes[:-1]):
        return slice(int(starts[0]), int(starts[-1] + sizes[-1]))
    return np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
