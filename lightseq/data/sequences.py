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

from lightseq.data.column_flags import check_renamed, select_columns
from lightseq.data.columns import (
    DOCUMENT_COLUMNS,
    IDS,
    MASK_COLUMNS,
    check_columns,
    check_masked,
    has_mask,
    ignored_columns_notes,
    is_blank,
)
from lightseq.data.examples import Example, check_ids, locate_window, window, window_offsets, window_sizes
from lightseq.data.sources import NamedRow, ReadOptions, Row, get_column
from lightseq.data.token_directory import IntArray
from lightseq.utils.formatting import plural
from lightseq.utils.pickles import load_plain
from lightseq.utils.tensors import IGNORE_INDEX

PICKLE_COLUMNS: Final = ("input_ids", "labels", "attention_mask", "token_type_ids")
UNREAD: Final = tuple(name for name in (*MASK_COLUMNS, *DOCUMENT_COLUMNS) if name not in PICKLE_COLUMNS)
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


def open_pickle(path: Path, length: int, vocab_size: int, options: ReadOptions) -> SequenceExamples:
    """Opens the sequences of a .pkl file, each cut to one window; notes name what is left out.

    Raises ValueError for ids outside the vocabulary, and without a target.
    """
    kept: list[IdsAndLabels] = []
    short = targetless = cut_sequences = cut_tokens = 0
    made_from: dict[str, None] = {}
    for where, row in islice(_pickled_rows(path, options), options.limit):
        made_from |= dict.fromkeys(check_columns(row, IDS, ("input_ids",), where))
        ids, labels = _ids_and_labels(row, where)
        check_ids(ids, vocab_size, where, options.refused_ids)
        check_ids(labels[labels != IGNORE_INDEX], vocab_size, f"{where} labels")
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
    notes += [f"{path}: {note}" for note in ignored_columns_notes(made_from)]
    return SequenceExamples(kept, length, tuple(notes))


def read_pickle(path: Path) -> Iterator[IdsAndLabels]:
    """Yields the aligned ids and labels of a .pkl file, whatever its other columns."""
    return (_ids_and_labels(row, where) for where, row in _pickled_rows(path))


def _pickled_rows(path: Path, options: ReadOptions | None = None) -> Iterator[NamedRow]:
    """Yields the rows of a pickled dict of columns, or of a list of dicts.

    A column without an entry per row belongs to all rows, and is given to the first.
    """
    content, options = load_plain(path), options or ReadOptions()
    if isinstance(content, dict):
        check_renamed(content, options.renamed_columns, str(path))
        content = _selected(content, options, str(path))
    if isinstance(content, list | tuple) and content and all(isinstance(row, dict) for row in content):
        check_renamed(content[0], options.renamed_columns, f"{path} sequence 0")
        rows: Iterator[Row] = (_selected(row, options, f"{path} sequence {i}") for i, row in enumerate(content))
    elif isinstance(content, dict) and isinstance(content.get("input_ids"), list | tuple):
        rows = _rows_of_columns(path, content)
    else:
        raise ValueError(f"{path} is not a dict with 'input_ids', a list of lists of token ids; write it as one")
    masked: bool | None = None
    for index, row in enumerate(rows):
        where = f"{path} sequence {index}"
        if row.get("input_ids"):
            masked = has_mask(row) if masked is None else masked
            check_masked(row, masked, where)
        yield where, row


def _selected(row: Row, options: ReadOptions, where: str) -> Row:
    return select_columns(row, options.ignored_columns, options.renamed_columns, where)


def _rows_of_columns(path: Path, columns: Mapping[str, Any]) -> Iterator[Row]:
    count = len(columns["input_ids"])
    by_row = {name for name, column in columns.items() if isinstance(column, list | tuple) and len(column) == count}
    for name in (*PICKLE_COLUMNS, *UNREAD):
        if columns.get(name) is not None and name not in by_row:
            raise ValueError(f"{path}: {name!r} is not a list with one entry for each of {count} input_ids")
    for index in range(count):
        of_all = columns if index == 0 else by_row
        yield {name: columns[name][index] if name in by_row else columns[name] for name in columns if name in of_all}


def _ids_and_labels(row: Row, where: str) -> IdsAndLabels:
    """Returns the ids and labels of a row. Masks and token types must have their default values.

    Raises ValueError for columns that only rows of other files may have.
    """
    ids = _integers(get_column(row, "input_ids", where), where)
    if unread := [name for name in UNREAD if not is_blank(row.get(name))]:
        raise ValueError(
            f"{where}: column {unread[0]!r} is not known beside {', '.join(PICKLE_COLUMNS)} in a pickle; remove it, or "
            "write its rows as .jsonl or .parquet"
        )
    given = {name: _integers(row[name], f"{where} {name}") for name in PICKLE_COLUMNS[1:] if row.get(name) is not None}
    for name, values in given.items():
        if len(values) != len(ids):
            raise ValueError(f"{where}: {len(ids)} input_ids but {len(values)} {name}; align them")
    if "attention_mask" in given and not given["attention_mask"].all():
        raise ValueError(f"{where}: its attention_mask masks tokens; write it without padding")
    if "token_type_ids" in given and given["token_type_ids"].any():
        raise ValueError(f"{where}: 'token_type_ids' are not all zero; remove them if the model does not use them")
    return ids, given.get("labels", ids)


def _integers(numbers: Any, where: str) -> IntArray:
    # Checks types first, because nested references to one list could expand to an array larger than memory.
    if isinstance(numbers, list | tuple) and set(map(type, numbers)) <= {int}:
        try:
            return np.array(numbers, np.int64)
        except OverflowError:
            pass
    raise ValueError(f"{where} is not a list of integers; write it as one")
