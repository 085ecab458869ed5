"""Units of packing: windows that stay side by side in a sequence, because they are a pair or begin alike."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from lightseq.data.examples import Examples
from lightseq.data.token_directory import IntArray
from lightseq.schedule.nodes import Ints
from lightseq.sequence.shared_prefixes import common_tokens

BLOCK: Final = 64  # tokens per block; rows are grouped by whole blocks in common
DIGEST: Final = 8  # bytes for each block


@dataclass(frozen=True)
class Units:
    """Windows of a source, unit after unit."""

    windows: Ints  # their indices
    offsets: Ints  # first of each unit in `windows`, and the end
    tokens: Ints  # tokens of each unit; what its windows share is counted once if it is computed once

    def take(self, order: Ints) -> tuple[Ints, Ints]:
        """Returns the windows of units in another order, and how many windows stand before each, with the end."""
        counts = np.diff(self.offsets)[order]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        begins = np.repeat(self.offsets[:-1][order] - ends[:-1], counts)
        return self.windows[begins + np.arange(ends[-1])], ends


def whole_rows(sizes: Ints, together: int) -> Units:
    """Returns a unit for each row of `together` windows of these sizes."""
    windows = np.arange(len(sizes))
    return Units(windows, np.arange(0, len(sizes) + 1, together), sizes.reshape(-1, together).sum(1))


def rows_that_begin_alike(windows: Examples, together: int, length: int) -> Units:
    """Returns units of rows that share whole blocks at their beginning, none of more than `length` tokens as a tree.

    Rows that do not fit into one tree are cut where the trees repeat the fewest tokens. Reads all tokens once.
    """
    keys = [_key(windows[row * together].input_ids) for row in range(len(windows) // together)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    alone, added = list[int](), list[int]()  # tokens of a row alone, and tokens that it adds to the row before
    last = np.zeros(0, np.int64)
    for row in order:
        documents = [windows[i].input_ids for i in range(row * together, (row + 1) * together)]
        alone.append(tree_tokens(documents))
        added.append(tree_tokens(documents, last))
        last = documents[-1]
    ends, tokens, begin = list[int](), list[int](), 0
    for _, alike in groupby(order, key=lambda row: keys[row][:DIGEST] or row):
        end = begin + sum(1 for _ in alike)
        for size, total in _cheapest_trees(alone[begin:end], added[begin:end], length):
            ends.append((ends[-1] if ends else 0) + size * together)
            tokens.append(total)
        begin = end
    members = [row * together + i for row in order for i in range(together)]
    return Units(*(np.array(x, dtype=np.int64) for x in (members, [0, *ends], tokens)))


def _cheapest_trees(alone: Sequence[int], added: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Returns the rows and the tokens of trees of neighbouring rows, in order, with the fewest tokens in all.

    A row has `alone` tokens as the first of its tree, and adds `added` to the row before it. A tree has at most
    `length` tokens, or one row.
    """
    count = len(alone)
    fewest, begins = (
        [0] * (count + 1),
        [0] * (count + 1),
    )  # fewest tokens of the rows before each, and where their last tree begins
    for end in range(1, count + 1):
        best, more = None, 0
        for begin in range(end - 1, -1, -1):
            total = alone[begin] + more
            if total > length and begin < end - 1:
                break
            if best is None or fewest[begin] + total <= best:
                best, begins[end] = fewest[begin] + total, begin
            more += added[begin]
        assert best is not None
        fewest[end] = best
    trees, end = list[tuple[int, int]](), count
    while end:
        begin = begins[end]
        trees.append((end - begin, fewest[end] - fewest[begin]))
        end = begin
    return trees[::-1]


def tree_tokens(documents: Sequence[IntArray], last: IntArray | None = None) -> int:
    """Returns an upper bound of the tokens that documents, in this order, add to a tree that ends with `last`."""
    total = 0
    for document in documents:
        # Both branches begin with the last common token.
        shared = 0 if last is None else common_tokens([last, document]) - 1
        total, last = total + len(document) - max(shared, 0), document
    return total


def _key(ids: Ints) -> bytes:
    """Hashes each whole block. Sorting rows by their hashes puts rows that share most blocks side by side."""
    return b"".join(_digests(np.ascontiguousarray(ids, dtype=np.int64)))


def _digests(ids: Ints) -> Iterator[bytes]:
    for begin in range(0, len(ids) - BLOCK + 1, BLOCK):
        yield hashlib.blake2b(ids[begin : begin + BLOCK].tobytes(), digest_size=DIGEST).digest()
