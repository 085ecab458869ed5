"""Units of packing: windows that stay side by side in a sequence, because they are a pair or begin alike."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lightseq.data.examples import Examples
from lightseq.data.token_directory import IntArray
from lightseq.schedule.nodes import Ints
from lightseq.sequence.shared_prefixes import common_tokens

BLOCK: Final = 64  # tokens; rows are brought together by the whole blocks that they have in common
DIGEST: Final = 8  # bytes for each block


@dataclass(frozen=True)
class Units:
    """Windows of a source, unit after unit."""

    windows: Ints  # their indices
    offsets: Ints  # first of each unit in `windows`, and the end
    tokens: Ints  # of each unit; what its windows share at their beginning is counted once if it is computed once

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
    """Returns units of rows that share whole blocks at their beginning, as many as fit into `length` tokens as trees.

    Reads all tokens once. Raises ValueError for a row that does not fit alone.
    """
    keys = [_key(windows[row * together].input_ids) for row in range(len(windows) // together)]
    members, offsets, tokens = list[int](), [0], list[int]()
    last, key = np.zeros(0, np.int64), b""
    for row in sorted(range(len(keys)), key=keys.__getitem__):
        indices = range(row * together, (row + 1) * together)
        documents = [windows[i].input_ids for i in indices]
        more = tree_tokens(documents, last)
        if keys[row] and keys[row][:DIGEST] == key[:DIGEST] and tokens[-1] + more <= length:
            tokens[-1] += more
            offsets[-1] += together
        else:
            tokens.append(tree_tokens(documents))
            offsets.append(offsets[-1] + together)
        members += indices
        last, key = documents[-1], keys[row]
    return Units(*(np.array(x, dtype=np.int64) for x in (members, offsets, tokens)))


def tree_tokens(documents: Sequence[IntArray], last: IntArray | None = None) -> int:
    """Returns the tokens that documents add to a tree at most, each compared with the one before; `last` is in it."""
    total = 0
    for document in documents:
        # Both branches begin with the last common token.
        shared = 0 if last is None else common_tokens([last, document]) - 1
        total, last = total + len(document) - max(shared, 0), document
    return total


def _key(ids: Ints) -> bytes:
    """Returns a hash of each whole block. Rows that are sorted by it stand beside those that share most blocks."""
    return b"".join(_digests(np.ascontiguousarray(ids, dtype=np.int64)))


def _digests(ids: Ints) -> Iterator[bytes]:
    for begin in range(0, len(ids) - BLOCK + 1, BLOCK):
        yield hashlib.blake2b(ids[begin : begin + BLOCK].tobytes(), digest_size=DIGEST).digest()
