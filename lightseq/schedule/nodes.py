"""Nodes of a packed row: documents, and the nodes of trees, in which rows that begin alike share their prefix.

A node is a run of neighbouring tokens. Its queries see their own node causally, and every ancestor whole. A document is
a node without parent and children. Nodes of a tree stand depth first, so an ancestor lies before its descendants.
Positions are depths: a node's first token has the position after its parent's last.

A path is a node, its first child, that one's first child and so on: one run of tokens, which see each other causally.
So kernels compute paths, and `rectangles` of whole keys for the branches that leave them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

ROOT = -1  # parent of a node without one
# Padding becomes documents of one kernel tile each, because a softmax needs at least one key.
PADDING_TOKENS = 128


@dataclass(frozen=True)
class Rectangles:
    """Runs of queries that see a whole run of keys on the paths above their own.

    Entries are sorted so that many neighbouring ones share neither queries nor keys.
    """

    first_query: Ints
    end_query: Ints
    first_key: Ints
    end_key: Ints


@dataclass(frozen=True)
class Nodes:
    """Runs of a row's tokens, and their parents. They compare by value, as keys of cached tables."""

    boundaries: tuple[int, ...]  # first token of each node, and the end of the last; they begin with 0 and rise
    parents: tuple[int, ...] | None = None  # index of each node's parent, or ROOT; None: all are documents

    def __post_init__(self) -> None:
        if self.parents is not None and all(parent == ROOT for parent in self.parents):
            object.__setattr__(self, "parents", None)

    @property
    def length(self) -> int:
        """Returns the tokens of the row."""
        return self.boundaries[-1]

    @property
    def edges(self) -> Ints:
        return np.asarray(self.boundaries, dtype=np.int64)

    @property
    def all_parents(self) -> tuple[int, ...]:
        """Returns the parent of every node, ROOT for documents."""
        return self.parents or (ROOT,) * (len(self.boundaries) - 1)

    @cached_property
    def first_positions(self) -> Ints:
        """Returns the position of each node's first token."""
        found = [0] * (len(self.boundaries) - 1)
        for node, parent in enumerate(self.parents or ()):
            if parent != ROOT:
                found[node] = found[parent] + self.boundaries[parent + 1] - self.boundaries[parent]
        return np.array(found, dtype=np.int64)

    @cached_property
    def path_edges(self) -> Ints:
        """Returns the first token of each path, and the end of the last."""
        heads = [node for node, head in enumerate(self._heads) if node == head]
        return self.edges[[*heads, len(self.boundaries) - 1]]

    @cached_property
    def _heads(self) -> list[int]:
        """Returns the first node of each node's path."""
        found = [*range(len(self.boundaries) - 1)]
        for node, parent in enumerate(self.parents or ()):
            if parent != ROOT and parent == node - 1:
                found[node] = found[parent]
        return found

    @cached_property
    def rectangles(self) -> Rectangles:
        """Returns rectangles of queries and keys on other paths, in which every query sees every key.

        The branches of a path lie behind it, those that leave it last come first, and each sees the path up to where it
        leaves it. That staircase is halved again and again: the later half of the branches sees all keys up to where
        the earlier half ends. So n branches take about log2(n) calls of a kernel, not n.
        """
        left: list[tuple[tuple[int, int], ...]] = []  # by node: paths above its own, ends of keys
        branches: dict[int, list[Branch]] = {}  # branches of each path, from the last that leaves it
        for node, head in enumerate(self._heads):
            parent = ROOT if self.parents is None else self.parents[head]
            left.append(() if parent == ROOT else (*left[parent], (self._heads[parent], self.boundaries[parent + 1])))
            for path, seen in left[node]:
                _join(branches.setdefault(path, []), Branch(self.boundaries[node], self.boundaries[node + 1], seen))
        found = [
            (len(left[path]), half, *rectangle)
            for path, leaving in branches.items()
            for half, rectangle in _halves(leaving[::-1], self.boundaries[path], 0)
        ]
        table = np.array(sorted(found), dtype=np.int64).reshape(-1, 6)
        return Rectangles(*table[:, 2:].T)

    def ancestors(self, node: int) -> list[int]:
        """Returns a node's parent, that one's parent and so on."""
        found = list[int]()
        while self.parents is not None and (node := self.parents[node]) != ROOT:
            found.append(node)
        return found

    def positions(self) -> Ints:
        """Returns the position of every token in its row, whose prefix other rows may share."""
        sizes = np.diff(self.edges)
        return np.arange(self.length) - np.repeat(self.edges[:-1] - self.first_positions, sizes)

    def area_before(self, tokens: Ints) -> Ints:
        """Counts the visible (query, key) pairs of all queries before each token of the row."""
        sizes = np.diff(self.edges)
        whole = np.concatenate([[0], np.cumsum(sizes * (sizes + 1) // 2 + sizes * self.first_positions)])
        node = np.clip(np.searchsorted(self.edges, tokens, side="right") - 1, 0, len(sizes) - 1)
        inside = tokens - self.edges[node]
        return whole[node] + inside * (inside + 1) // 2 + inside * self.first_positions[node]

    def padded(self, length: int) -> "Nodes":
        """Adds documents of padding up to `length`."""
        end = self.length
        padding = [*range(end + PADDING_TOKENS, length, PADDING_TOKENS), *([length] if end < length else [])]
        parents = None if self.parents is None else (*self.parents, *[ROOT] * len(padding))
        return Nodes((*self.boundaries, *padding), parents)

    def cut(self, tokens: int) -> "Nodes":
        """Cuts nodes at every multiple of `tokens` in the position. Tokens of different parts do not see each other."""
        boundaries, parents = list[int](), list[int]()
        last_part = list[int]()  # index of a node's last part, by node
        for node, (start, stop) in enumerate(pairwise(self.boundaries)):
            position = int(self.first_positions[node])
            parent = ROOT if self.parents is None else self.parents[node]
            begins_inside = parent != ROOT and position % tokens
            edges = [start, *range(start + tokens - position % tokens, stop, tokens)]
            parents += [last_part[parent] if begins_inside else ROOT, *[ROOT] * (len(edges) - 1)]
            boundaries += edges
            last_part.append(len(boundaries) - 1)
        return Nodes((*boundaries, self.length), tuple(parents))


class Branch(NamedTuple):
    """Neighbouring nodes that leave a path at one place, and their followers."""

    begin: int  # first token
    end: int
    seen: int  # end of the path's tokens that they see


def _join(branches: list[Branch], branch: Branch) -> None:
    """Appends a branch, or extends the last one if it leaves the path at the same place."""
    if branches and (branches[-1].end, branches[-1].seen) == (branch.begin, branch.seen):
        branches[-1] = branches[-1]._replace(end=branch.end)
    else:
        branches.append(branch)


def _halves(branches: Sequence[Branch], first_key: int, depth: int) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Yields depth and (first query, end, first key, end) of rectangles that cover what branches of a path see.

    `branches` are in the order in which they leave the path, so each lies before the one before it.
    """
    if len(branches) == 1:
        yield depth, (branches[0].begin, branches[0].end, first_key, branches[0].seen)
        return
    earlier, later = branches[: len(branches) // 2], branches[len(branches) // 2 :]
    runs = list[Branch]()
    for branch in reversed(later):
        _join(runs, branch._replace(seen=earlier[-1].seen))
    for run in runs:
        yield depth, (run.begin, run.end, first_key, run.seen)
    yield from _halves(earlier, first_key, depth + 1)
    yield from _halves(later, earlier[-1].seen, depth + 1)


def check_boundaries(boundaries: Sequence[int], length: int) -> tuple[int, ...]:
    """Returns the boundaries as integers. Raises ValueError unless they begin with 0, rise and stay within `length`."""
    found = tuple(int(x) for x in boundaries)
    if len(found) < 2 or found[0] != 0 or any(b <= a for a, b in pairwise(found)):
        shown = ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
        raise ValueError(
            f"document boundaries {shown} do not rise from 0; give the first token of each document, and the end"
        )
    if found[-1] > length:
        raise ValueError(f"documents end at token {found[-1]} of a sequence of {length}; cut them, or pad the sequence")
    return found


def check_nodes(boundaries: Sequence[int], parents: Sequence[int] | None, length: int) -> Nodes:
    """Returns nodes of a row. Raises ValueError for boundaries as `check_boundaries`, and for parents out of order."""
    edges = check_boundaries(boundaries, length)
    if parents is None:
        return Nodes(edges)
    found = tuple(int(x) for x in parents)
    if len(found) != len(edges) - 1:
        raise ValueError(f"{len(found)} parents for {len(edges) - 1} nodes; give one for each, {ROOT} for a root")
    path = list[int]()  # the node before, and all nodes above it, from the root
    for node, parent in enumerate(found):
        if parent != ROOT and parent not in path:
            raise ValueError(
                f"node {node} has parent {parent}, but stands behind nodes "
                f"{', '.join(map(str, reversed(path))) or 'none'}; "
                "order nodes depth first, each behind its parent and all descendants of earlier children"
            )
        path = [*(path[: path.index(parent) + 1] if parent != ROOT else ()), node]
    return Nodes(edges, found)
