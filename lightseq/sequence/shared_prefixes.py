"""Rows of tokens that begin alike, as trees of nodes: every prefix is computed once.

A node ends one token before its rows differ, and each branch begins with a copy of their last common token. That copy
predicts the branch's next token, so every token has at most one target. A row that is the beginning of another adds no
token; its last token has no target in this row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightseq.schedule.nodes import ROOT, Ints, Nodes
from lightseq.utils.tensors import IGNORE_INDEX

# Trees must save this share of the tokens. Each depth costs a kernel launch, and short nodes are slower.
LEAST_SAVED: Final = 0.2


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Rows as one row of trees."""

    nodes: Nodes
    ids: Ints  # ids of all nodes, (tokens,)
    places: tuple[Ints, ...]  # for each row, the place of each of its tokens among `ids`

    def saves(self, share: float) -> bool:
        """Returns whether rows share tokens, and trees leave out at least this share of them."""
        tokens = sum(map(len, self.places))
        return len(self.ids) < tokens and len(self.ids) <= (1 - share) * tokens

    def labels(self, of_rows: Ints) -> Ints | None:
        """Returns the label of every token, (tokens,), from the shifted labels of all rows' tokens, one after another.

        A token has a label if it has one in any row. Returns None if it has others in other rows.
        """
        found, places, given = (
            np.full(len(self.ids), IGNORE_INDEX),
            np.concatenate(self.places),
            of_rows != IGNORE_INDEX,
        )
        found[places[given]] = of_rows[given]
        return found if (found[places[given]] == of_rows[given]).all() else None

    @property
    def targets(self) -> Ints:
        """Returns the place of a token that holds each token's target, (tokens,); -1 without a target."""
        found = np.full(len(self.ids), -1, dtype=np.int64)
        for places in self.places:
            found[places[:-1]] = places[1:]
        return found

    @property
    def row_counts(self) -> Ints:
        """Returns the number of rows that hold each token, (tokens,)."""
        return np.bincount(np.concatenate(self.places), minlength=len(self.ids))

    def merged(self, values: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
        """Merges values of the rows' tokens to one per tree token, (tokens, ...); None if rows differ in a value.

        A row's last token, which predicts nothing, takes the value of a row that goes on.
        """
        found = np.empty((len(self.ids), *values[0].shape[1:]), values[0].dtype)
        is_known = np.zeros(len(self.ids), bool)
        for places, of_row in sorted(zip(self.places, values, strict=True), key=lambda row: -len(row[0])):
            new, old = ~is_known[places], is_known[places]
            old[-1] = False
            if (found[places[old]] != of_row[old]).any():
                return None
            found[places[new]], is_known[places] = of_row[new], True
        return found

    def sum_over_rows(self, values: Sequence[Sequence[float] | NDArray[np.float64]]) -> NDArray[np.float64]:
        """Returns the sum of the rows' values at every token, (tokens,)."""
        total = np.zeros(len(self.ids))
        for places, of_row in zip(self.places, values, strict=True):
            total[places] += of_row  # a row has a place once
        return total


@dataclass
class _Tree:
    """Nodes so far, in depth-first order."""

    parts: list[Ints]
    parents: list[int]
    starts: list[int]

    def add(self, tokens: Ints, parent: int) -> int:
        self.starts.append(self.starts[-1] + len(tokens))
        self.parts.append(tokens)
        self.parents.append(parent)
        return len(self.parts) - 1


def share_prefixes(rows: Sequence[Sequence[int] | Ints]) -> SharedRows:
    """Returns rows as trees. Raises ValueError for no rows, and for a row without tokens or with other than ids."""
    if len(rows) == 0:
        raise ValueError("there are no rows")
    arrays = [_ids(row, index) for index, row in enumerate(rows)]
    longer = _longer_rows(arrays)
    tree = _Tree(parts=[], parents=[], starts=[0])
    parts: list[list[Ints]] = [[] for _ in arrays]

    def node(members: Sequence[int], begin: int, end: int, parent: int) -> int:
        made = tree.add(arrays[members[0]][begin:end], parent)
        for member in members:
            parts[member].append(np.arange(tree.starts[made], tree.starts[made + 1]))
        return made

    whole = [row for row in range(len(arrays)) if row not in longer]
    waiting = [(group, 0, ROOT) for group in reversed(_grouped(whole, arrays, 0))]
    while waiting:
        members, begin, parent = waiting.pop()
        if len(members) == 1:
            node(members, begin, len(arrays[members[0]]), parent)
            continue
        split = begin + common_tokens([arrays[member][begin:] for member in members]) - 1
        if split > begin:
            parent = node(members, begin, split, parent)
        # Branches that part again come first, so that the path to their last fork is one run of tokens.
        groups = sorted(_grouped(members, arrays, split + 1), key=lambda group: len(group) == 1)
        waiting += [(group, split, parent) for group in reversed(groups)]
    places = {row: np.concatenate(parts[row]) for row in whole}
    for row, other in reversed(longer.items()):  # the other row's places are known before
        places[row] = places[other][: len(arrays[row])]
    nodes = Nodes(tuple(tree.starts), tuple(tree.parents))
    return SharedRows(nodes, np.concatenate(tree.parts), tuple(places[row] for row in range(len(arrays))))


def _ids(row: Sequence[int] | Ints, index: int) -> Ints:
    found = np.asarray(row)
    if found.ndim != 1:
        given = f"of shape {found.shape}" if found.ndim else str(row)
        raise ValueError(f"row {index} is {given}; give a list of token ids for each row")
    if not len(found):
        raise ValueError(f"row {index} has no tokens; leave it out")
    if found.dtype.kind not in "iu":
        raise ValueError(f"row {index} has {found.dtype} values, such as {found[0]}; give token ids, whole numbers")
    if found.min() < 0:
        raise ValueError(f"row {index} has the token id {found.min()}, which is below 0; leave padding out of rows")
    return found.astype(np.int64)


def _longer_rows(rows: Sequence[Ints]) -> dict[int, int]:
    """Returns for each row that is the beginning of another, or equal to one, such a row, in rising order of tokens.

    In that order the rows that begin with a row follow it directly.
    """
    keys = [row.astype(">i8").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return {row: after for row, after in pairwise(order) if keys[after].startswith(keys[row])}


def _grouped(members: Sequence[int], rows: Sequence[Ints], at: int) -> list[list[int]]:
    """Groups rows by their token at an index, in the order of their first members."""
    groups: dict[int, list[int]] = {}
    for member in members:
        groups.setdefault(int(rows[member][at]), []).append(member)
    return [*groups.values()]


def common_tokens(rows: Sequence[NDArray[np.integer[Any]]]) -> int:
    """Returns how many tokens the rows have in common at their beginning."""
    shortest = min(map(len, rows))
    found = shortest
    for row in rows[1:]:
        differ = row[:found] != rows[0][:found]
        found = int(differ.argmax()) if differ.any() else found
    return found
