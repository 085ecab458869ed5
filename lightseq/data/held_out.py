"""Rows held out of the training data for evaluation (--eval_fraction)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightseq.data.columns import unit_of
from lightseq.data.examples import Example, Examples, LazyTextExamples, WindowExamples
from lightseq.data.sequences import SequenceExamples
from lightseq.utils.formatting import plural

Rows = WindowExamples | SequenceExamples | LazyTextExamples
HELD_OUT_STREAM = 0x48454C44  # seed stream of this draw; data orders use epoch numbers


@dataclass(frozen=True)
class SelectedExamples:
    """Examples of some rows of a source, in their order."""

    source: Rows
    rows: NDArray[np.int64]  # in rising order
    indices: NDArray[np.int64]  # places of the rows' examples in the source
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.source[int(self.indices[index])]

    @property
    def length(self) -> int:
        return self.source.length

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each row, if known without tokenizing."""
        assert not isinstance(self.source, LazyTextExamples)
        return self.source.tokens[self.rows]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Tokens of each example, if known without tokenizing."""
        assert not isinstance(self.source, LazyTextExamples)
        return self.source.sizes[self.indices]


def documents_of_a_row(examples: Rows | SelectedExamples) -> int:
    """Returns how many documents stay side by side. If more than one, each window is a whole document."""
    source = examples.source if isinstance(examples, SelectedExamples) else examples
    return unit_of(str(source.source.meta.get("kind"))).documents if isinstance(source, WindowExamples) else 1


def hold_out(
    examples: Examples, fraction: float, seed: int, path: str | Path
) -> tuple[SelectedExamples, SelectedExamples]:
    """Splits the rows of `path` into training rows and evaluation rows. `seed` draws the latter.

    The latter are `fraction` of the rows, rounded up. Raises ValueError if no row is left to train on.
    """
    assert isinstance(examples, Rows), type(examples)
    first, bounds = first_examples(examples), row_bounds(examples)
    rows = np.flatnonzero(np.diff(first[bounds]))  # a row of a single token has no example
    count = math.ceil(round(fraction * len(rows), 6))
    is_document = isinstance(examples, WindowExamples) and len(bounds) == len(first)
    name = "pair" if documents_of_a_row(examples) > 1 else "document" if is_document else "row"
    if count >= len(rows):
        raise ValueError(
            f"--eval_fraction {fraction} holds out {count} of {plural(len(rows), name)} in {path} and leaves none to "
            "train on; give a smaller share, split the text into several files, or give --eval_data_path"
        )
    order = np.random.default_rng((seed, HELD_OUT_STREAM)).permutation(len(rows))

    def documents(drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        return numbers_between(bounds, np.sort(drawn))

    held = select_rows(examples, first, documents(rows[order[:count]]), ())
    note = f"{path}: held out {count:,} of {plural(len(rows), name)} for evaluation ({plural(len(held), 'example')})"
    return select_rows(examples, first, documents(rows[order[count:]]), (*examples.notes, note)), held


def row_bounds(examples: Rows | SelectedExamples) -> NDArray[np.int64]:
    """Returns the first document of each row, and the number of documents.

    The documents of a row are the answers of a pair, or of a chat whose template rewrites earlier turns.
    """
    source = examples.source if isinstance(examples, SelectedExamples) else examples
    count = len(first_examples(examples)) - 1
    documents = examples.rows if isinstance(examples, SelectedExamples) else np.arange(count)
    if not isinstance(source, WindowExamples) or (firsts := source.source.first_of_rows) is None:
        rows = documents // documents_of_a_row(examples)
    else:
        rows = np.searchsorted(firsts, documents, side="right")
    return np.concatenate([[0], np.flatnonzero(np.diff(rows)) + 1, [count]]).astype(np.int64)


def numbers_between(bounds: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the numbers from `bounds[i]` up to `bounds[i + 1]` for each chosen i, in the order of `chosen`."""
    counts = bounds[chosen + 1] - bounds[chosen]
    begins = np.repeat(bounds[chosen] - (np.cumsum(counts) - counts), counts)
    return begins + np.arange(int(counts.sum()))


def select_rows(
    examples: Rows | SelectedExamples, first: NDArray[np.int64], rows: NDArray[np.int64], notes: tuple[str, ...]
) -> SelectedExamples:
    """Returns the examples of some documents, which may repeat. `first` is the result of `first_examples`."""
    indices = numbers_between(first, rows)
    if isinstance(examples, SelectedExamples):
        return SelectedExamples(examples.source, examples.rows[rows], examples.indices[indices], notes)
    return SelectedExamples(examples, rows, indices, notes)


def first_examples(examples: Rows | SelectedExamples) -> NDArray[np.int64]:
    """Returns the first example of each row, and the number of all examples."""
    if isinstance(examples, SelectedExamples):
        counts = np.diff(first_examples(examples.source))[examples.rows]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    if isinstance(examples, LazyTextExamples):
        return np.arange(len(examples) + 1)
    return examples.first_windows
