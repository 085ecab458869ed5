"""What a training run reads: examples with labels shifted once, and batches that depend on their index alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lightseq.pickles import read_pickle
from lightseq.rows import HUB_PREFIX, ROW_SUFFIXES, holds_rows
from lightseq.tokens import (
    META,
    IntArray,
    Reading,
    TokenDirectory,
    Tokenizer,
    load_tokenizer,
    open_token_directory,
    plural,
)

IGNORE_INDEX = -100
Aligned = tuple[IntArray, IntArray]  # ids and labels, not yet shifted


@dataclass(frozen=True)
class Example:
    """At most `length` tokens; labels[i] is the token after input_ids[i], or IGNORE_INDEX."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    boundaries: tuple[int, ...] | None = None  # of packed documents: where each begins, and the end


class Examples(Protocol):
    """Random access to examples; `notes` says in sentences what was cut or left out."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


def window(ids: IntArray, labels: IntArray, start: int, length: int) -> Example:
    """Tokens start to start + length of a document; labels come aligned with ids and are shifted here, nowhere else."""
    stop = min(start + length, len(ids))
    shifted = np.full(stop - start, IGNORE_INDEX, dtype=np.int64)
    targets = labels[start + 1 : stop + 1]  # reaches one past the window, so a border loses no target
    shifted[: len(targets)] = targets
    return Example(np.asarray(ids[start:stop]).astype(np.int64), shifted)


def window_counts(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Of documents of these sizes. n tokens have n - 1 targets: a last window of one token alone would have none."""
    return np.maximum(0, -(-(sizes - 1) // length))


def window_sizes(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Tokens of every window of every document."""
    windows = window_counts(sizes, length)
    found = np.full(int(windows.sum()), length, dtype=np.int64)
    some = windows > 0
    last = sizes[some] - (windows[some] - 1) * length
    found[np.cumsum(windows[some]) - 1] = np.minimum(last, length)
    return found


def check_ids(ids: IntArray, vocab_size: int, where: str) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"{where} holds the token id {int(outside[0])}, outside the model's vocabulary of {vocab_size}; "
            "tokenize with the model's tokenizer or take a model with a larger vocabulary"
        )


@dataclass(frozen=True)
class WindowExamples:
    """Windows of a token directory; none crosses a document, and none is without a target."""

    source: TokenDirectory
    length: int
    vocab_size: int
    first_window: NDArray[np.int64]  # the index of each document's first window, and the number of windows
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return int(self.first_window[-1])

    @property
    def sizes(self) -> NDArray[np.int64]:
        return window_sizes(np.diff(self.source.offsets), self.length)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        document = int(np.searchsorted(self.first_window, index, side="right")) - 1
        ids = self.source.document(document)
        start = (index - int(self.first_window[document])) * self.length
        with_border_target = ids[start : start + self.length + 1]
        check_ids(with_border_target, self.vocab_size, f"{self.source.path} document {document}")
        targets = self.source.targets_of(document)
        labels = ids if targets is None else np.where(targets, ids.astype(np.int64), IGNORE_INDEX)
        return window(ids, labels, start, self.length)


def windows_without_target(source: TokenDirectory, windows: NDArray[np.int64], length: int) -> int:
    """How many windows teach nothing: an answer is elsewhere in their document."""
    if source.targets is None or not windows.any():
        return 0
    nth = np.arange(int(windows.sum())) - np.repeat(np.cumsum(windows) - windows, windows)  # in its document
    starts = np.repeat(source.offsets[:-1], windows) + 1 + nth * length
    ends = np.minimum(starts + length, np.repeat(source.offsets[1:], windows))
    edges = np.stack([starts, ends], axis=1).ravel()
    counts = np.add.reduceat(source.targets, edges[: -1 if edges[-1] == len(source.targets) else None], dtype=np.int64)
    return int((counts[::2] == 0).sum())


def open_windows(path: Path, length: int, vocab_size: int) -> WindowExamples:
    source = open_token_directory(path)
    check_ids(np.asarray([source.meta["max_token_id"]]), vocab_size, f"{path / META}: the corpus")
    sizes = np.diff(source.offsets)
    windows = window_counts(sizes, length)
    short = int((sizes < 2).sum())
    notes = (f"{path}: {plural(short, 'document')} of fewer than two tokens left out",) if short else ()
    if barren := windows_without_target(source, windows, length):
        notes = (*notes, f"{path}: {plural(barren, 'window')} of {int(windows.sum()):,} without a target")
    if not windows.any():
        raise ValueError(f"{path} has no document of at least two tokens, so nothing to predict; make it again")
    first_window = np.concatenate([np.zeros(1, np.int64), np.cumsum(windows)])
    return WindowExamples(source, length, vocab_size, first_window, notes)


@dataclass(frozen=True)
class SequenceExamples:
    """One example a sequence, cut at the length."""

    sequences: Sequence[Aligned]
    length: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Example:
        ids, labels = self.sequences[index]
        return window(ids, labels, 0, self.length)


def cut_sequences(path: Path, pairs: Iterable[Aligned], length: int) -> SequenceExamples:
    """Leaves out what has no target, and counts that and what the length cuts off."""
    kept: list[Aligned] = []
    short = targetless = cut_sequence_count = cut_token_count = 0
    for ids, labels in pairs:
        if len(ids) < 2:
            short += 1
            continue
        if labels is not ids and not bool((labels[1 : length + 1] != IGNORE_INDEX).any()):
            targetless += 1
            continue
        cut_sequence_count += len(ids) > length
        cut_token_count += max(0, len(ids) - length)
        kept_ids = ids[: length + 1].astype(np.int32)  # a copy: a view would keep the tokens that are cut
        kept.append((kept_ids, kept_ids if labels is ids else labels[: length + 1].astype(np.int32)))
    if not kept and targetless:
        raise ValueError(f"{path} has no valid target, every label is {IGNORE_INDEX}; a loss over nothing is no number")
    if not kept:
        raise ValueError(f"{path} has no sequence of at least two tokens, so nothing to predict")
    notes = []
    if short:
        notes.append(f"{path}: {plural(short, 'sequence')} of fewer than two tokens left out")
    if targetless:
        notes.append(
            f"{path}: {plural(targetless, 'sequence')} without a target in the first {length:,} tokens left out"
        )
    if cut_sequence_count:
        cut = f"{plural(cut_sequence_count, 'sequence')} of {len(kept):,} cut at {length:,} tokens"
        notes.append(f"{path}: {cut}, {plural(cut_token_count, 'token')} dropped")
    return SequenceExamples(kept, length, tuple(notes))


def open_pickle(path: Path, length: int, vocab_size: int) -> SequenceExamples:
    def checked() -> Iterator[Aligned]:
        for index, (ids, labels) in enumerate(read_pickle(path)):
            check_ids(ids, vocab_size, f"{path} sequence {index}")
            check_ids(labels[labels != IGNORE_INDEX], vocab_size, f"{path} labels {index}")
            yield ids, labels

    return cut_sequences(path, checked(), length)


def open_examples(
    path: str | Path,
    length: int,
    vocab_size: int,
    tokenizer: str | Tokenizer | None = None,
    lazy: bool = True,
    progress: bool = True,
    reading: Reading | None = None,
) -> Examples:
    """Opens a token directory, a .pkl, or rows; whatever is wrong with it is one line of ValueError, here and now."""
    assert length > 0, length
    reading = reading or Reading()
    if holds_rows(path):
        if not str(path).startswith(HUB_PREFIX) and not Path(path).exists():
            raise ValueError(f"{path} does not exist; make it with python3 -m data_gen, or give another path")
        if tokenizer is None:
            raise ValueError(
                f"{path} is text and there is no tokenizer; give --tokenizer a directory, a hub id, or byte"
            )
        loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        if lazy and Path(path).is_file():
            from lightseq.lazy_texts import open_lazily  # which builds on this module, as the next does

            return open_lazily(Path(path), length, vocab_size, loaded, reading)
        from lightseq.corpus import open_rows

        return open_rows(path, length, vocab_size, loaded, reading, progress)
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; make it with python3 -m data_gen, or give another path")
    if reading.limit is not None or reading.text_column != "text":
        given = f"--max_train_samples {reading.limit}" if reading.limit else f"--text_column {reading.text_column}"
        raise ValueError(f"{given} is about rows, and {path} holds none; leave it out")
    if path.is_dir():
        return open_windows(path, length, vocab_size)
    if path.suffix == ".pkl":
        return open_pickle(path, length, vocab_size)
    kinds = ", ".join(ROW_SUFFIXES)
    raise ValueError(
        f"{path} is of no known kind: a token directory, .pkl, {kinds}; convert it with python3 -m data_gen"
    )


def require_target(examples: Examples, path: str | Path) -> None:
    """Raises ValueError if no example has a token to predict; the first of most data has."""
    if not any(bool((examples[i].labels != IGNORE_INDEX).any()) for i in range(len(examples))):
        raise ValueError(f"{path} has no valid target, every label is {IGNORE_INDEX}; a loss over nothing is no number")


@dataclass(frozen=True)
class Batch:
    """Right-padded with id 0 and IGNORE_INDEX; valid_tokens counts the labels that are not ignored."""

    input_ids: torch.Tensor  # [batch_size, length] int64
    labels: torch.Tensor  # [batch_size, length] int64
    valid_tokens: int
    boundaries: tuple[int, ...] | None = None  # of the documents in a batch of one; the rest is padding

    @property
    def squares(self) -> int:
        """Of the lengths of what attends to itself, summed: attention is half as many pairs."""
        if self.boundaries is None:
            return self.input_ids.shape[0] * self.input_ids.shape[1] ** 2
        return sum((b - a) ** 2 for a, b in pairwise(self.boundaries))


@lru_cache(maxsize=2)  # a batch touches two epochs at most at a time, and drawing millions anew for each takes seconds
def permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order = np.random.default_rng((seed, epoch)).permutation(count)
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class BatchStream:
    """An endless line of examples, epoch after epoch; a batch is a place in that line: all that resuming needs.

    At optimizer step s, accumulation a, data rank d, the places are ((s * A + a) * D + d) * B onwards, B of them. A run
    that resumes after `first_step` steps with another number of sequences a step goes on from `first_place`. Bounded by
    epochs, places past the end are empty: the last step drops nothing and has all its ranks.
    """

    examples: Examples
    length: int
    batch_size: int  # sequences of one data rank in one forward
    data_ranks: int = 1
    accumulation: int = 1
    epochs: float | None = None  # None: endless, the trainer counts steps
    seed: int = 0
    shuffle: bool = True
    packed: bool = False  # examples hold several documents; then batch_size is 1
    first_step: int = 0
    first_place: int = 0

    @property
    def sequences_per_step(self) -> int:
        return self.accumulation * self.data_ranks * self.batch_size

    @property
    def end(self) -> int | None:
        """The first place past the last epoch."""
        return None if self.epochs is None else max(1, round(self.epochs * len(self.examples)))

    @property
    def steps(self) -> int:
        """Optimizer steps that read every epoch to its end."""
        assert self.end is not None, "an endless stream has no number of steps"
        return self.first_step - (self.first_place - self.end) // self.sequences_per_step

    def state(self, step: int) -> dict[str, int]:
        """What a checkpoint keeps: how far the line was read, by how many a step, and what decides its order."""
        return {
            "places": self.places_after(step),
            "examples": len(self.examples),
            "seed": self.seed,
            "length": self.length,
            "sequences_per_step": self.sequences_per_step,
        }

    def resumed(self, step: int, state: Mapping[str, int]) -> tuple[BatchStream, tuple[str, ...]]:
        """The line from where a checkpoint left it, and what there is to say. Raises ValueError for other data."""
        now = self.state(step)
        if other := [key for key in ("examples", "seed", "length") if state[key] != now[key]]:
            was = f"{other[0]} {state[other[0]]:,}, not {now[other[0]]:,}"
            raise ValueError(
                f"--resume_from_checkpoint was trained on data of {was}; resume with the data, --seed and "
                "--model_max_length that it was saved with, or begin anew from its weights with --model_name_or_path"
            )
        stream = replace(self, first_step=step, first_place=state["places"])
        before = state.get("sequences_per_step", state["places"] / max(1, step))  # older checkpoints do not say
        if before == self.sequences_per_step:
            return stream, ()
        goes_on = f"{self.sequences_per_step} a step from example {state['places']:,} on, none skipped or repeated"
        return stream, (f"resumed with another number of sequences a step: {goes_on}",)

    def places_after(self, steps: int) -> int:
        """Examples read in so many steps of the run, those before it was resumed among them."""
        return self.first_place + (steps - self.first_step) * self.sequences_per_step

    def epochs_after(self, steps: int) -> float:
        places = self.places_after(steps)
        return (places if self.end is None else min(places, self.end)) / len(self.examples)

    def example(self, place: int) -> Example | None:
        if self.end is not None and place >= self.end:
            return None
        epoch, index = divmod(place, len(self.examples))
        return self.examples[int(permutation(len(self.examples), self.seed, epoch)[index]) if self.shuffle else index]

    def batch(self, step: int, accumulation_index: int = 0, data_rank: int = 0) -> Batch:
        assert 0 <= accumulation_index < self.accumulation and 0 <= data_rank < self.data_ranks
        row_of_step = (accumulation_index * self.data_ranks + data_rank) * self.batch_size
        first = self.places_after(step) + row_of_step
        input_ids = np.zeros((self.batch_size, self.length), dtype=np.int64)
        labels = np.full((self.batch_size, self.length), IGNORE_INDEX, dtype=np.int64)
        boundaries: tuple[int, ...] | None = (0, 1) if self.packed else None  # past the end all is padding
        for row in range(self.batch_size):
            if (example := self.example(first + row)) is not None:
                input_ids[row, : len(example.input_ids)] = example.input_ids
                labels[row, : len(example.labels)] = example.labels
                boundaries = example.boundaries
        valid = int((labels != IGNORE_INDEX).sum())
        return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), valid, boundaries)
