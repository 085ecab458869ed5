"""Sequences of token ids in a .pkl file, as examples in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightseq.data.columns import HARMLESS, is_blank
from lightseq.data.examples import Example, check_ids, locate_window, window, window_offsets, window_sizes
from lightseq.data.token_directory import IntArray
from lightseq.utils.formatting import plural
from lightseq.utils.pickles import load_plain
from lightseq.utils.tensors import IGNORE_INDEX

PICKLE_COLUMNS: Final = ("input_ids", "labels", "attention_mask")
IdsAndLabels = tuple[IntArray, IntArray]  # ids and labels, not yet shifted; one array twice if all are targets


@dataclass(frozen=True)
class SequenceExamples:
    """Windows of sequences. The first token of a window is the last target of the window before."""

    sequences: Sequence[IdsAndLabels]
    length: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return int(self.first_windows[-1])

    def __getitem__(self, index: int) -> Example:
        sequence, start = locate_window(self.first_windows, index, self.length)
        return window(*self.sequences[sequence], start, self.length)

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """The number of tokens of each sequence."""
        return np.array([len(ids) for ids, _ in self.sequences])

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        return window_sizes(self.tokens, self.length)

    @cached_property
    def first_windows(self) -> NDArray[np.int64]:
        """The index of each sequence's first window, and the number of windows."""
        return window_offsets(self.tokens, self.length)


def open_pickle(
    path: Path, length: int, vocab_size: int, limit: int | None = None, refused_ids: Mapping[int, str] | None = None
) -> SequenceExamples:
    """Opens the first `limit` sequences of a .pkl file, each cut to one window; notes count what is left out.

    Raises ValueError for ids outside the vocabulary, and without a target.
    """
    kept: list[IdsAndLabels] = []
    short = targetless = cut_sequences = cut_tokens = 0
    for index, (ids, labels) in enumerate(islice(read_pickle(path), limit)):
        check_ids(ids, vocab_size, f"{path} sequence {index}", refused_ids)
        check_ids(labels[labels != IGNORE_INDEX], vocab_size, f"{path} labels {index}")
        if len(ids) < 2:
            short += 1
        elif not bool((labels[1 : length + 1] != IGNORE_INDEX).any()):
            targetless += 1
        else:
            cut_sequences += len(ids) > length
            cut_tokens += max(0, len(ids) - length)
            # Copies, so that the cut tokens are freed. The token after the window is the last target.
            kept_ids = ids[: length + 1].astype(np.int32)
            kept.append((kept_ids, kept_ids if labels is ids else labels[: length + 1].astype(np.int32)))
    if not kept and targetless:
        raise ValueError(
            f"{path} has no target in the first {length:,} tokens of a sequence: every label is {IGNORE_INDEX}; "
            "give data with other labels"
        )
    if not kept:
        raise ValueError(f"{path} has no sequence of at least two tokens; give longer sequences")
    notes = []
    if short:
        notes.append(f"{path}: skipped {plural(short, 'sequence')} of fewer than two tokens")
    if targetless:
        notes.append(
            f"{path}: skipped {plural(targetless, 'sequence')} without a target in the first {length:,} tokens"
        )
    if cut_sequences:
        cut = f"truncated {plural(cut_sequences, 'sequence')} of {len(kept):,} to {length:,} tokens"
        notes.append(f"{path}: {cut}, {plural(cut_tokens, 'token')} dropped")
    return SequenceExamples(kept, length, tuple(notes))


def read_pickle(path: Path) -> Iterator[IdsAndLabels]:
    """Yields aligned ids and labels of a pickled dict with 'input_ids' and optionally 'labels', lists of integer lists.

    An 'attention_mask' must be all ones.
    """
    content = load_plain(path)
    if not isinstance(content, dict) or not isinstance(content.get("input_ids"), list | tuple):
        raise ValueError(f"{path} is not a dict with 'input_ids', a list of lists of token ids; write it as one")
    for column, value in content.items():
        if column not in PICKLE_COLUMNS and column not in HARMLESS and not is_blank(value):
            raise ValueError(
                f"{path}: column {column!r} is not known beside {', '.join(PICKLE_COLUMNS)}; remove it, or write its "
                "rows as .jsonl or .parquet"
            )
    sequences, all_labels, masks = content["input_ids"], content.get("labels"), content.get("attention_mask")
    for name, column in (("labels", all_labels), ("attention_mask", masks)):
        if column is not None and (not isinstance(column, list | tuple) or len(column) != len(sequences)):
            raise ValueError(f"{path}: {name!r} is not a list with one entry for each of {len(sequences)} input_ids")
    for index, sequence in enumerate(sequences):
        ids = _integers(sequence, f"{path} sequence {index}")
        labels = ids if all_labels is None else _integers(all_labels[index], f"{path} labels {index}")
        if len(labels) != len(ids):
            raise ValueError(f"{path} sequence {index}: {len(ids)} input_ids but {len(labels)} labels; align them")
        if masks is not None and not _integers(masks[index], f"{path} attention_mask {index}").all():
            raise ValueError(f"{path} sequence {index}: its attention_mask masks tokens; write it without padding")
        yield ids, labels


def _integers(numbers: Any, where: str) -> IntArray:
    # Checks types first, because nested references to one list could expand to an array larger than memory.
    if isinstance(numbers, list | tuple) and set(map(type, numbers)) <= {int}:
        try:
            return np.array(numbers, np.int64)
        except OverflowError:
            pass
    raise ValueError(f"{where} is not a list of integers; write it as one")
