"""Which keys the queries of a tile see where documents limit it: runs of queries, each against a run of keys.

A segment is causal, aligned bottom-right (its last query sees all its keys), or full.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Q, ROWS, K, KEYS, CAUSAL = range(5)  # columns: first query and how many, first key and how many, whether it is causal


class Round(NamedTuple):
    """Segments that one kernel call of variable lengths can take: all causal or all full, none shares a key."""

    segments: NDArray[np.int64]
    causal: bool

    @property
    def queries(self) -> "slice | NDArray[np.int64]":
        return _run(self.segments[:, Q], self.segments[:, ROWS])

    @property
    def keys(self) -> "slice | NDArray[np.int64]":
        return _run(self.segments[:, K], self.segments[:, KEYS])


@dataclass(frozen=True, eq=False)
class Segments:
    """All segments of one tile, in the order of their queries. No query is in two of them, several may share keys."""

    table: NDArray[np.int64]
    cache: dict[Any, Any] = field(default_factory=dict)  # what kernels work out about them, by device

    def __repr__(self) -> str:
        return f"Segments({self.table.tolist()})"

    @property
    def area(self) -> int:
        """Pairs of a query and a key that it sees."""
        rows, keys, causal = self.table[:, ROWS], self.table[:, KEYS], self.table[:, CAUSAL]
        return int((rows * keys - causal * (rows * (rows - 1) // 2)).sum())

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """As few as may be; under every schedule but striped there is one. A single query suits either kind."""
        rounds: list[tuple[set[int], list[list[int]]]] = []
        for segment in self.table.tolist():
            kind = {segment[CAUSAL]} if segment[ROWS] > 1 else set()
            for kinds, taken in rounds:
                if len(kinds | kind) <= 1 and taken[-1][K] + taken[-1][KEYS] <= segment[K]:
                    taken.append(segment)
                    kinds |= kind
                    break
            else:
                rounds.append((kind, [segment]))
        return tuple(Round(np.array(taken), 1 in kinds) for kinds, taken in rounds)

    def cut(self, size: int) -> "tuple[Segments, slice, slice]":
        """The chunks of `size` tokens, of queries and of keys, from the first to the last that a segment touches.

        The segments come back counted from there.
        """
        low_q, low_k = (int(self.table[:, i].min()) // size for i in (Q, K))
        high_q, high_k = (-(-int((self.table[:, i] + self.table[:, i + 1]).max()) // size) for i in (Q, K))
        moved = self.table - np.array([low_q * size, 0, low_k * size, 0, 0])
        return Segments(moved), slice(low_q, high_q), slice(low_k, high_k)


def _run(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> "slice | NDArray[np.int64]":
    """The elements of runs: a slice where they lie side by side."""
    if np.array_equal(starts[1:], starts[:-1] + sizes[:-1]):
        return slice(int(starts[0]), int(starts[-1] + sizes[-1]))
    return np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
