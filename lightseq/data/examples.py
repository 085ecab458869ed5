"""Training examples with shifted labels: windows of documents, or texts tokenized on access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightseq.data.samples import EMPTY
from lightseq.data.sources import MAX_NAMED, ReadOptions, SkippedRows, read_rows
from lightseq.data.targets import text_of_row
from lightseq.data.token_directory import IntArray, TokenDirectory, open_token_directory
from lightseq.data.tokenizer import Tokenizer
from lightseq.utils.formatting import plural
from lightseq.utils.tensors import IGNORE_INDEX


@dataclass(frozen=True)
class Example:
    """At most `length` tokens; labels[i] is the token after input_ids[i], or IGNORE_INDEX."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    boundaries: tuple[int, ...] | None = None  # start of each packed document, and the end


class Examples(Protocol):
    """Random access to examples; `notes` are lines on tokens and rows that were cut or skipped."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


def window(ids: IntArray, labels: IntArray, start: int, length: int) -> Example:
    """Returns the example at [start, start + length) of a document.

    `labels` are aligned with `ids`. They are shifted here and nowhere else.
    """
    stop = min(start + length, len(ids))
    shifted = np.full(stop - start, IGNORE_INDEX, dtype=np.int64)
    targets = labels[start + 1 : stop + 1]  # the last target is the token after the window
    shifted[: len(targets)] = targets
    return Example(np.asarray(ids[start:stop]).astype(np.int64), shifted)


def window_counts(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns the number of windows of each document.

    n tokens have n - 1 targets, so a last window of one token would have none and is dropped.
    """
    return np.maximum(0, -(-(sizes - 1) // length))


def window_sizes(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns the size of every window of every document, in tokens."""
    windows = window_counts(sizes, length)
    found = np.full(int(windows.sum()), length, dtype=np.int64)
    some = windows > 0
    last = sizes[some] - (windows[some] - 1) * length
    found[np.cumsum(windows[some]) - 1] = np.minimum(last, length)
    return found


def window_offsets(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns the index of each document's first window, and the total number of windows at the end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(window_counts(sizes, length))])


def locate_window(first_windows: NDArray[np.int64], index: int, length: int) -> tuple[int, int]:
    """Returns a window's document and its start in the document, in tokens. `first_windows`: see `window_offsets`."""
    if not 0 <= index < first_windows[-1]:
        raise IndexError(index)
    document = int(np.searchsorted(first_windows, index, side="right")) - 1
    return document, (index - int(first_windows[document])) * length


def check_ids(ids: IntArray, vocab_size: int, where: str, refused: Mapping[int, str] | None = None) -> None:
    """Raises ValueError for an id outside the vocabulary, or a refused one, which marks an image or audio."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"{where} has token id {int(outside[0])}, outside the model's vocabulary of {vocab_size}; "
            "tokenize with the model's tokenizer or use a model with a larger vocabulary"
        )
    if refused and (found := ids[np.isin(ids, [*refused])]).size:
        raise ValueError(
            f"{where} has token id {int(found[0])}, the model's {refused[int(found[0])]}, but only text is trained, "
            "not images or audio; leave it out"
        )


@dataclass(frozen=True)
class WindowExamples:
    """Windows of a token directory. No window spans two documents; documents of one token have no window."""

    source: TokenDirectory
    length: int
    vocab_size: int
    first_windows: NDArray[np.int64]  # see `window_offsets`
    notes: tuple[str, ...]
    refused_ids: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.first_windows[-1])

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The number of tokens of each document."""
        return np.diff(self.source.offsets)

    @property
    def sizes(self) -> NDArray[np.int64]:
        return window_sizes(self.tokens, self.length)

    def __getitem__(self, index: int) -> Example:
        document, start = locate_window(self.first_windows, index, self.length)
        here = slice(start, start + self.length + 1)  # one token more, the last target
        ids, targets = self.source.document(document)[here], self.source.targets_of(document)
        check_ids(ids, self.vocab_size, f"{self.source.path} document {document}", self.refused_ids)
        labels = ids if targets is None else np.where(targets[here], ids.astype(np.int64), IGNORE_INDEX)
        return window(ids, labels, 0, self.length)


def count_targetless_windows(
    source: TokenDirectory, first_windows: NDArray[np.int64], length: int
) -> NDArray[np.int64]:
    """Returns the number of windows without a target in each document."""
    if source.targets is None or not first_windows[-1]:
        return np.zeros(len(first_windows) - 1, np.int64)
    windows = np.diff(first_windows)
    nth = np.arange(first_windows[-1]) - np.repeat(first_windows[:-1], windows)  # index in its document
    starts = np.repeat(source.offsets[:-1], windows) + 1 + nth * length
    ends = np.minimum(starts + length, np.repeat(source.offsets[1:], windows))
    edges = np.stack([starts, ends], axis=1).ravel()
    counts = np.add.reduceat(source.targets, edges[: -1 if edges[-1] == len(source.targets) else None], dtype=np.int64)
    return np.bincount(np.repeat(np.arange(len(windows)), windows), counts[::2] == 0, len(windows)).astype(np.int64)


def targetless_notes(source: TokenDirectory, first_windows: NDArray[np.int64], length: int) -> tuple[str, ...]:
    """Returns a note on windows without a target: their number, and the documents with the most."""
    barren = count_targetless_windows(source, first_windows, length)
    if not barren.any():
        return ()
    most = [document for document in np.argsort(-barren, kind="stable")[:MAX_NAMED].tolist() if barren[document]]
    shown = "; ".join(f"document {i}: {int(barren[i]):,}" for i in most)
    more = "; …" if int((barren > 0).sum()) > MAX_NAMED else ""
    windows = f"{plural(int(barren.sum()), 'window')} of {int(first_windows[-1]):,} without a target"
    return (f"{source.path}: {windows} ({shown}{more}); a longer --model_max_length leaves fewer",)


def open_windows(
    path: Path, length: int, vocab_size: int, limit: int | None = None, refused_ids: Mapping[int, str] | None = None
) -> WindowExamples:
    """Opens the first `limit` documents of a token directory as windows.

    Raises ValueError without targets or for ids outside the vocabulary.
    """
    source = open_token_directory(path)
    if limit is not None:
        source = source.first(limit)
    check_ids(np.asarray([source.meta["max_token_id"]]), vocab_size, str(path))
    sizes = np.diff(source.offsets)
    first_windows = window_offsets(sizes, length)
    short = int((sizes < 2).sum())
    notes = (f"{path}: skipped {plural(short, 'document')} of fewer than two tokens",) if short else ()
    if not first_windows[-1]:
        raise ValueError(f"{path} has no document of at least two tokens; make it again with longer documents")
    notes = (*notes, *targetless_notes(source, first_windows, length))
    return WindowExamples(source, length, vocab_size, first_windows, notes, refused_ids or {})


@dataclass(frozen=True)
class LazyTextExamples:
    """Texts in memory, tokenized on access. Use a token directory for a large corpus."""

    texts: Sequence[tuple[str, str]]  # place and text
    tokenizer: Tokenizer
    length: int
    vocab_size: int
    notes: tuple[str, ...]
    refused_ids: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Example:
        where, text = self.texts[index]
        ids = self.tokenizer.encode(text)
        check_ids(ids, self.vocab_size, where, self.refused_ids)
        return window(ids, ids, 0, self.length)


def open_lazy_texts(
    path: Path, length: int, vocab_size: int, tokenizer: Tokenizer, read_options: ReadOptions
) -> LazyTextExamples:
    """Opens the texts of a file for tokenization on access. Raises ValueError if the file has no text."""
    rows = ((where, text_of_row(row, read_options.text_column, where)) for where, row in read_rows(path, read_options))
    texts, skipped = list[tuple[str, str]](), SkippedRows()
    for where, text in rows:
        if text:
            texts.append((where, text))
        else:
            skipped.add(EMPTY, where)
    if not texts:
        raise ValueError(f"{path} holds no text; give a file with text")
    cut = f"{path}: tokenized on access and truncated to {length:,} tokens; --lazy_preprocess False splits longer texts"
    notes = (*(f"{path}: {note}" for note in skipped.notes), cut)
    examples = LazyTextExamples(texts, tokenizer, length, vocab_size, notes, read_options.refused_ids)
    examples[0]  # fails early if the tokenizer is too large for the model
    return examples
