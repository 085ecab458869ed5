"""Rows of tokens that begin alike, as trees of nodes: every prefix is computed once.

A node ends one token before its rows differ, and each branch begins with a copy of their last common token. That copy
predicts the branch's next token, so every token has at most one target. Rows that are equal, or a row that is the
beginning of another, part at the last token of the shorter one, which has no target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightseq.schedule.nodes import ROOT, Ints, Nodes
from lightseq.utils.tensors import IGNORE_INDEX

# Trees must save this share of the tokens. Each depth costs a kernel launch, and short nodes are slower.
LEAST_SAVED: Final = 0.2


def why_whole_rows(*, carries_states: bool, counts_router_tokens: bool) -> str | None:
    """Returns why a model takes rows that begin alike only whole; None if it takes them as trees.

    `carries_states`: some layers are recurrent or short convolutions. `counts_router_tokens`: a loss or a balance of
    routers counts the tokens of every row.
    """
    if carries_states:
        return "recurrent layers and short convolutions do not take rows that share a prefix"
    if counts_router_tokens:
        return "losses and balances of routers count a shared prefix once for each row"
    return None


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Rows as one row of trees."""

    nodes: Nodes
    ids: Ints  # (tokens,), those of all nodes
    places: tuple[Ints, ...]  # for each row, the place of each of its tokens among `ids`

    def saves(self, share: float) -> bool:
        """Returns whether rows share prefixes, and trees leave out at least this share of their tokens."""
        return self.nodes.parents is not None and len(self.ids) <= (1 - share) * sum(map(len, self.places))

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
    """Returns rows as trees. Raises ValueError for no rows, and for a row without tokens."""
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    if not arrays or not all(map(len, arrays)):
        empty = next((i for i, row in enumerate(arrays) if not len(row)), None)
        raise ValueError("there are no rows" if empty is None else f"row {empty} has no tokens; leave it out")
    tree = _Tree(parts=[], parents=[], starts=[0])
    places: list[list[Ints]] = [[] for _ in arrays]

    def node(members: Sequence[int], begin: int, end: int, parent: int) -> int:
        made = tree.add(arrays[members[0]][begin:end], parent)
        for member in members:
            places[member].append(np.arange(tree.starts[made], tree.starts[made + 1]))
        return made

    waiting = [(group, 0, ROOT) for group in reversed(_grouped(range(len(arrays)), arrays, 0))]
    while waiting:
        members, begin, parent = waiting.pop()
        if len(members) == 1:
            node(members, begin, len(arrays[members[0]]), parent)
            continue
        split = begin + common_tokens([arrays[member][begin:] for member in members]) - 1
        if split > begin:
            parent = node(members, begin, split, parent)
        # Behind the copied token. A row that ends with it stands alone, and so do equal rows.
        ended = [[member] for member in members if len(arrays[member]) == split + 1]
        others = [member for member in members if len(arrays[member]) > split + 1]
        groups = [*ended, *_grouped(others, arrays, split + 1)]
        waiting += [(group, split, parent) for group in reversed(groups)]
    nodes = Nodes(tuple(tree.starts), tuple(tree.parents))
    return SharedRows(nodes, np.concatenate(tree.parts), tuple(np.concatenate(found) for found in places))


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
