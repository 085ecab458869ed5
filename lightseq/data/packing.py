"""Packing: windows of several documents share a sequence, assigned by best fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightseq.data.batches import PADDING_WARNING_SHARE
from lightseq.data.columns import PREFERENCE, PREFERENCES, unit_of
from lightseq.data.examples import Example, WindowExamples, window_counts, window_sizes
from lightseq.data.held_out import SelectedExamples, documents_of_a_row
from lightseq.data.mixture import JoinedExamples
from lightseq.data.open_examples import open_examples
from lightseq.data.prefix_groups import rows_that_begin_alike, tree_tokens, whole_rows
from lightseq.data.sequences import SequenceExamples, open_pickle
from lightseq.data.shared_rows import even_lengths
from lightseq.data.sources import ReadOptions, holds_rows
from lightseq.data.token_directory import META, open_token_directory
from lightseq.data.tokenizer import Tokenizer
from lightseq.utils.formatting import plural

NO_LIMIT = 1 << 62  # longer than any sequence
Windows = WindowExamples | SequenceExamples | SelectedExamples | JoinedExamples


@dataclass(frozen=True)
class PackedExamples:
    """Examples of several windows each; example i has the windows `order[offsets[i] : offsets[i + 1]]`.

    With shared prefixes, windows may have more tokens than a sequence, into which they fit as trees.
    """

    windows: Windows
    order: NDArray[np.int64]
    offsets: NDArray[np.int64]
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        parts = [self.windows[int(i)] for i in self.order[self.offsets[index] : self.offsets[index + 1]]]
        ids, labels = (np.concatenate(x) for x in zip(*((p.input_ids, p.labels) for p in parts), strict=True))
        return Example(ids, labels, (0, *np.cumsum([len(p.input_ids) for p in parts]).tolist()))


def best_fit(sizes: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Packs windows by best-fit decreasing: longest first, each into the fullest sequence that has room.

    Returns the window indices, ordered by sequence, and each sequence's offset in them, with the end.
    """
    sequences: list[list[int]] = []
    sequences_by_room: dict[int, list[int]] = {}  # sequences by their remaining room
    rooms: list[int] = []  # the keys of sequences_by_room, sorted
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        assert 0 < size <= length, f"a window of {size} tokens in sequences of {length}"
        place = bisect_left(rooms, size)
        if place == len(rooms):
            room, sequence = length, len(sequences)
            sequences.append([])
        else:
            room = rooms[place]
            sequence = sequences_by_room[room].pop()
            if not sequences_by_room[room]:
                del sequences_by_room[room], rooms[place]
        sequences[sequence].append(piece)
        left = room - size
        if left:
            if left not in sequences_by_room:
                insort(rooms, left)
            sequences_by_room.setdefault(left, []).append(sequence)
    counts = [len(pieces) for pieces in sequences]
    order = np.array([piece for pieces in sequences for piece in pieces], dtype=np.int64)
    return order, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def open_packed(
    path: str | Path,
    length: int,
    vocab_size: int,
    tokenizer: str | Tokenizer | None = None,
    lazy: bool = False,
    progress: bool = True,
    read_options: ReadOptions | None = None,
) -> PackedExamples:
    """Opens the data of one source, packed. Raises ValueError if lengths are not known beforehand."""
    windows = open_windows_to_pack(path, length, vocab_size, tokenizer, lazy, progress, read_options)
    return pack(path, windows, read_options is not None and read_options.shares_prefixes)


def open_windows_to_pack(
    path: str | Path,
    length: int,
    vocab_size: int,
    tokenizer: str | Tokenizer | None = None,
    lazy: bool = False,
    progress: bool = True,
    read_options: ReadOptions | None = None,
) -> WindowExamples | SequenceExamples:
    """Opens the data of `open_examples`, never truncated. Raises ValueError if lengths are not known beforehand."""
    pairs = read_options is not None and read_options.pairs
    shares_prefixes = read_options is not None and read_options.shares_prefixes
    if pairs and Path(path).exists() and not holds_rows(path):
        raise ValueError(
            f"{path} holds no rows, which --objective dpo needs; give chosen and rejected in rows of .jsonl or .parquet"
        )
    first_cut = NO_LIMIT if Path(path).suffix == ".pkl" else length  # other sources are split, never truncated
    opened = open_examples(path, first_cut, vocab_size, tokenizer, lazy, progress, read_options)
    if isinstance(opened, SequenceExamples):
        if shares_prefixes:
            raise ValueError(f"--share_prefixes True does not work with {path}, whose labels may differ from its ids")
        return replace(opened, length=length)
    if isinstance(opened, WindowExamples):
        if not pairs and opened.source.meta.get("kind") == PREFERENCE:
            raise ValueError(f"{path} {PREFERENCES}; give its rows with that")
        if pairs:
            _check_pairs_fit(path, opened, shares_prefixes)
        return opened
    raise ValueError(
        f"--packing best_fit needs the length of every text in {path} beforehand; leave --lazy_preprocess out"
    )


def pack(path: str | Path, windows: Windows, shares_prefixes: bool = False) -> PackedExamples:
    """Packs the windows of `path` into sequences of their length. The documents of a pair stay side by side.

    With `shares_prefixes` so do rows that begin alike, and a sequence is as long as its trees.
    """
    together = documents_of_a_row(windows.parts[0] if isinstance(windows, JoinedExamples) else windows)
    if shares_prefixes:
        units = rows_that_begin_alike(windows, together, windows.length)
    else:
        units = whole_rows(windows.sizes, together)
    in_sequences, ends = best_fit(units.tokens, windows.length)
    order, before = units.take(in_sequences)
    # A run shortens sequences of trees to the next of these lengths.
    lengths = np.array(even_lengths(windows.length, 1) if shares_prefixes else [windows.length])
    filled = np.add.reduceat(units.tokens[in_sequences], ends[:-1])
    notes = _notes(path, windows, lengths[np.searchsorted(lengths, filled)], int(filled.sum()))
    return PackedExamples(windows, order, before[ends], (*windows.notes, *notes))


def _check_pairs_fit(path: str | Path, windows: WindowExamples, shares_prefixes: bool) -> None:
    """Raises ValueError if a pair has more tokens than a sequence. So every document of a pair is one window."""
    documents = unit_of(PREFERENCE).documents
    sizes = windows.tokens.reshape(-1, documents).sum(1)
    for pair in np.flatnonzero(sizes > windows.length).tolist() if shares_prefixes else ():
        first = pair * documents
        sizes[pair] = tree_tokens([windows.source.document(first + i) for i in range(documents)])
    if longer := int((sizes > windows.length).sum()):
        largest = int(sizes.argmax())
        counted = ", their prompt once" if shares_prefixes else ""
        raise ValueError(
            f"{path}: {longer:,} of {plural(len(sizes), 'pair')} have more than the {windows.length:,} tokens of "
            f"--model_max_length, pair {largest:,} most ({sizes[largest]:,}, chosen and rejected together{counted}); "
            f"give --model_max_length {sizes[largest]}, or remove them"
        )


def read_window_sizes(path: Path, length: int, vocab_size: int, options: ReadOptions) -> NDArray[np.int64] | None:
    """Returns the sizes of the windows that a run would pack, without reading tokens if possible.

    The options limit documents, too. Returns None for data that is not tokenized.
    """
    if path.suffix == ".pkl":
        return window_sizes(open_pickle(path, NO_LIMIT, vocab_size, options).tokens, length)
    if not (path / META).exists():
        return None
    documents = np.diff(open_token_directory(path).offsets)
    return window_sizes(documents[: options.limit], length)


def _notes(path: str | Path, windows: Windows, sequences: NDArray[np.int64], tokens: int) -> list[str]:
    """Returns notes on packed documents, padding, shared prefixes and split documents.

    `sequences` has their lengths. `tokens` are computed.
    """
    length, documents, room = windows.length, windows.tokens, int(sequences.sum())
    empty = room - tokens
    share = f"{100 * empty / room:.2f}%"
    kept = int((documents > 1).sum())
    most = "" if room == len(sequences) * length else "up to "
    packed = f"{plural(kept, 'document')} packed into {plural(len(sequences), 'sequence')} of {most}{length:,} tokens"
    notes = [f"{path}: {packed}, {plural(empty, 'token')} of padding ({share})"]
    if empty >= PADDING_WARNING_SHARE * room:
        notes = [f"warning: {notes[0]}; give a lower --model_max_length"]
    if shared := int(windows.sizes.sum()) - tokens:
        share = f"{100 * shared / (tokens + shared):.1f}%"
        notes.append(f"{path}: {plural(shared, 'token')} ({share}) computed once with others, as shared prefixes")
    split = documents > length + 1
    if split.any():
        pieces = int(window_counts(documents[split], length).sum())
        cut = f"{plural(int(split.sum()), 'document')} longer than that split into {plural(pieces, 'piece')}"
        notes.append(f"{path}: {cut}; no target is lost, and pieces do not attend to each other")
    return notes
