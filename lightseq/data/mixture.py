"""Mixture of training sources (--data_path a=2,b=0.5). A weight is the number of passes in an epoch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightseq.data.examples import Example, Examples, WindowExamples
from lightseq.data.held_out import (
    Rows,
    SelectedExamples,
    documents_of_a_row,
    first_examples,
    numbers_between,
    row_bounds,
    select_rows,
)
from lightseq.data.sequences import SequenceExamples
from lightseq.data.sources import HUB_PREFIX
from lightseq.utils.formatting import plural

MIXTURE_STREAM = 0x4D495854  # seed stream of this draw, unlike those of held-out rows and data orders
Source = Rows | SelectedExamples


@dataclass(frozen=True)
class WeightedPath:
    """Data at a path, in any format of --data_path."""

    path: str
    weight: float = 1.0  # passes over its rows in an epoch


def weighted_paths(text: str, flag: str = "--data_path") -> tuple[WeightedPath, ...]:
    """Returns the sources of `a.jsonl=2,b.jsonl`; a path that exists is one source, whatever is in its name.

    Raises ValueError for an empty path, a weight that is not positive, and a repeated path.
    """
    if os.path.exists(text) or "," not in text:
        return (_weighted(text, text, flag),)
    found = tuple(_weighted(part.strip(), text, flag) for part in text.split(","))
    paths = [source.path for source in found]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ValueError(f"{flag} {text} names {twice} twice; give it once, with a weight such as {twice}=2")
    return found


def paths_of(text: str) -> list[str]:
    """Returns the paths of several sources, without their weights; none for an empty text."""
    return [source.path for source in weighted_paths(text)] if text else []


def _weighted(part: str, text: str, flag: str) -> WeightedPath:
    path, equals, weight = part.rpartition("=")
    if os.path.exists(part) or not equals:
        if not part:
            raise ValueError(f"{flag} {text} has an empty path; separate paths by single commas")
        return WeightedPath(part)
    if not os.path.exists(path) and not path.startswith(HUB_PREFIX):
        return WeightedPath(part)  # reported later: the path does not exist
    try:
        share = float(weight)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise ValueError(f"{flag} {part}: {weight} is no weight; give a positive number, such as {path}=2")
    return WeightedPath(path, share)


@dataclass(frozen=True)
class JoinedExamples:
    """Examples of several sources, one source after the other."""

    parts: tuple[Source, ...]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([len(part) for part in self.parts])

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for part in self.parts for note in part.notes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[part][index - int(self._ends[part]) + len(self.parts[part])]

    @property
    def length(self) -> int:
        return self.parts[0].length

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each row, if known without tokenizing."""
        return np.concatenate([part.tokens for part in self.parts])  # type: ignore[union-attr]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Tokens of each example, if known without tokenizing."""
        return np.concatenate([part.sizes for part in self.parts])  # type: ignore[union-attr]


def longest_example(examples: Examples) -> int | None:
    """Returns the most tokens of an example; None if that is not known without tokenizing, or rows are packed."""
    longest = 0
    for part in parts_of(examples):
        source = part.source if isinstance(part, SelectedExamples) else part
        if not isinstance(source, WindowExamples | SequenceExamples):
            return None
        longest = max(longest, int(part.sizes.max(initial=0)))  # type: ignore[attr-defined]
    return longest


def parts_of(examples: Examples) -> tuple[Examples, ...]:
    """Splits joined examples by source. Returns other examples unchanged."""
    return examples.parts if isinstance(examples, JoinedExamples) else (examples,)


def mix(opened: Sequence[Examples], sources: Sequence[WeightedPath], seed: int) -> Examples:
    """Repeats the examples of each source by its weight. Returns a single source of weight 1 unchanged.

    Raises ValueError if a weight leaves no row, or if pairs of preferences stand beside other rows.
    """
    parts = [
        _repeat(examples, source, seed + number)
        for number, (examples, source) in enumerate(zip(opened, sources, strict=True))
    ]
    if len(parts) == 1:
        return parts[0]
    if len({documents_of_a_row(part) for part in parts}) > 1:
        raise ValueError("preferences and other rows cannot be mixed; train on one kind")
    return JoinedExamples(tuple(parts))


def _repeat(examples: Examples, source: WeightedPath, seed: int) -> Source:
    """Repeats the rows of a source `weight` times: whole passes, and a random part for the fraction."""
    assert isinstance(examples, Rows | SelectedExamples), type(examples)
    if source.weight == 1:
        return examples
    first, bounds = first_examples(examples), row_bounds(examples)
    rows = np.flatnonzero(np.diff(first[bounds]))  # a row of a single token has no example
    passes, drawn = int(source.weight), round(source.weight % 1 * len(rows))
    if not passes and not drawn:
        raise ValueError(f"{source.path}={source.weight:g} leaves none of {plural(len(rows), 'row')}; give more")
    some = np.random.default_rng((seed, MIXTURE_STREAM)).permutation(rows)[:drawn]
    chosen = np.sort(np.concatenate([np.tile(rows, passes), some]))
    documents = numbers_between(bounds, chosen)
    note = f"{source.path}: {len(chosen):,} rows an epoch, {source.weight:g} times its {plural(len(rows), 'row')}"
    return select_rows(examples, first, documents, (*examples.notes, note))
