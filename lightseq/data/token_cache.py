"""Cache of tokenized rows: one token directory for each combination of source, tokenizer and options."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from lightseq.data.answers import REWRITES
from lightseq.data.columns import ignored_columns_notes, unit_of
from lightseq.data.examples import MAX_NAMED, WindowExamples, check_ids, open_windows
from lightseq.data.samples import Sample
from lightseq.data.sources import (
    NamedRow,
    ReadOptions,
    SkippedRows,
    folder_suffixes,
    ignored_files,
    read_rows,
    source_identity,
)
from lightseq.data.targets import RowFormat, detect_row_format, encode_samples
from lightseq.data.token_directory import IntArray, remove_partials, write_token_directory
from lightseq.data.token_rows import PACKED
from lightseq.data.tokenizer import TargetMask, Tokenizer
from lightseq.utils.formatting import alternatives, plural
from lightseq.utils.limited import LimitError, limited_map
from lightseq.utils.progress import progress_bar

T = TypeVar("T")
TOKENIZER_ROWS: Final = 256  # rows per call of the tokenizer
HEAD_START_SECONDS: Final = 0.5  # the process with a progress bar begins earlier
CACHE_VERSION: Final = 9  # increase it when tokenization changes


def open_rows(
    source: str | Path, length: int, vocab_size: int, tokenizer: Tokenizer, read_options: ReadOptions, progress: bool
) -> WindowExamples:
    """Opens windows of the tokenized rows, from the cache if possible. Raises ValueError naming a bad row."""
    directory = ensure_tokenized(source, vocab_size, tokenizer, read_options, progress)
    examples = open_windows(directory, length, vocab_size, refused_ids=read_options.refused_ids)
    meta = examples.source.meta
    held = f"{meta['held']} as tokens in {directory}" + ("" if meta["tokenizer"] else ", without a tokenizer")
    notes = [f"{source}: {note}" for note in (held, *meta["notes"])]
    if long := int((examples.tokens > length + 1).sum()):
        cut = f"{plural(long, 'row')} of more than {length:,} tokens cut into pieces"
        notes.append(f"{source}: {cut}; every token is still predicted once")
    return dataclasses.replace(examples, notes=(*notes, *examples.notes))


def format_and_rows(source: str | Path, options: ReadOptions) -> tuple[RowFormat, Iterator[NamedRow]]:
    """Returns the format of the first row, and all rows. Raises ValueError without rows or for an unknown format."""
    rows = read_rows(source, options)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{source} holds no rows; give a source with rows")
    row_format = detect_row_format(first[1], first[0], options)
    return row_format, itertools.chain([first], rows)


@dataclasses.dataclass
class RowReport:
    """Counts of rows of a source: skipped ones, padded ones, and remarks with their first row."""

    format_name: str
    rows: int = 0
    examples: int = 0
    skipped: SkippedRows = dataclasses.field(default_factory=SkippedRows)
    padded_rows: int = 0
    padding_tokens: int = 0
    remarks: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)  # number of rows, and the first
    repeated_tokens: int = 0  # tokens of earlier turns, in examples of one answer each
    first_examples: list[int] = dataclasses.field(default_factory=list)  # index of each chat's first example
    ignored_columns: dict[str, None] = dataclasses.field(default_factory=dict)  # in order

    def count(self, where: str, samples: Sequence[Sample]) -> None:
        """Counts a row and its samples."""
        self.rows += 1
        for sample in samples:
            if sample.skipped is not None:
                self.skipped.add(sample.skipped, where)
            self.padded_rows += sample.padding > 0
            self.padding_tokens += sample.padding
            self.ignored_columns |= dict.fromkeys(sample.ignored)
        for remark in {remark for sample in samples for remark in sample.remarks}:
            count, first = self.remarks.get(remark, (0, where))
            self.remarks[remark] = (count + 1, first)

    @property
    def held(self) -> str:
        """The number of rows, and of examples where a row holds several."""
        if self.remarks.keys() & {REWRITES, PACKED}:
            return f"{plural(self.examples, 'example')} of {plural(self.rows, self.format_name + ' row')}"
        unit = unit_of(self.format_name)
        return plural(self.examples // unit.documents, unit.name)

    @property
    def notes(self) -> list[str]:
        """Notes on what is unusual about the rows."""
        notes = self.skipped.notes
        for remark, (count, first) in sorted(self.remarks.items()):
            repeated = f"; {self.repeated_tokens:,} tokens are repeated as context" if remark == REWRITES else ""
            notes.append(f"{remark}{repeated} ({plural(count, 'row')}, the first {first})")
        if self.padded_rows:
            cut = f"cut {plural(self.padding_tokens, 'token')} of padding off {plural(self.padded_rows, 'row')}"
            notes.append(f"{cut}, by attention_mask")
        return [*notes, *ignored_columns_notes(self.ignored_columns)]


def _ignored_files_notes(source: str | Path) -> list[str]:
    """Returns a note on the files in a folder that are not read."""
    files = ignored_files(source)
    shown = ", ".join(files[:MAX_NAMED]) + (", …" if len(files) > MAX_NAMED else "")
    read = f"of a folder, only {alternatives(folder_suffixes(Path(source)))} files are read" if files else ""
    return [f"skipped {plural(len(files), 'file')} ({shown}); {read}"] if files else []


def ensure_tokenized(
    source: str | Path, vocab_size: int, tokenizer: Tokenizer, read_options: ReadOptions, progress: bool
) -> Path:
    """Returns the token directory of a source. One process writes it while the others wait.

    Processes without a progress bar wait briefly, so that the one with a bar writes.
    """
    key: dict[str, Any] = {
        "rows": source_identity(source),
        "tokenizer": tokenizer.fingerprint,
        "column": read_options.text_column,
        "ignored_columns": sorted(read_options.ignored_columns),
        **({"columns": dict(read_options.renamed_columns)} if read_options.renamed_columns else {}),
        "limit": read_options.limit,
        "version": CACHE_VERSION,
    }
    fingerprint = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    directory = read_options.cache / fingerprint
    if not directory.exists():
        time.sleep(0 if progress else HEAD_START_SECONDS)
        with _lock(read_options.cache, fingerprint):
            if not directory.exists():
                remove_partials(directory)
                made = {**key, "fingerprint": fingerprint}
                _write(directory, source, vocab_size, tokenizer, read_options, made, progress)
    return directory


@contextmanager
def _lock(cache: Path, fingerprint: str) -> Iterator[None]:
    """Holds a lock of the cache. Raises ValueError if the cache cannot be written, or becomes full in the block."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        held = (cache / f"{fingerprint}.lock").open("w")
    except OSError as error:
        raise ValueError(
            f"--data_cache {cache} cannot be written ({error.strerror}); give another directory"
        ) from error
    with held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(f"--data_cache {cache} is full ({error.strerror}); give another directory") from error


def _write(
    directory: Path,
    source: str | Path,
    vocab_size: int,
    tokenizer: Tokenizer,
    read_options: ReadOptions,
    provenance: Mapping[str, Any],
    progress: bool,
) -> None:
    row_format, rows = format_and_rows(source, read_options)
    report, file_notes = RowReport(row_format.name), _ignored_files_notes(source)

    def extra_meta() -> dict[str, object]:
        return {
            "tokenizer": tokenizer.name or None,
            "tokenizer_fingerprint": tokenizer.vocabulary_fingerprint if tokenizer.name else None,
            "source": str(source),
            "seed": None,
            "kind": row_format.name,
            **report.skipped.facts(),
            "held": report.held,
            "notes": [*report.notes, *file_notes],
            "made": provenance,
        }

    def documents() -> Iterator[tuple[IntArray, TargetMask | None]]:
        yield from _tokenize(rows, row_format, vocab_size, tokenizer, report, read_options.refused_ids)
        if not report.examples:
            raise ValueError(f"{source} has no row with a target; {report.skipped.notes[0]}")

    shown = progress_bar(documents(), progress=progress)
    write_token_directory(
        directory, shown, tokenizer.vocab_size, extra_meta,
        with_targets=row_format.masked, first_of_rows=report.first_examples,
    )  # fmt: skip


def _tokenize(
    rows: Iterable[NamedRow],
    row_format: RowFormat,
    vocab_size: int,
    tokenizer: Tokenizer,
    report: RowReport,
    refused_ids: Mapping[int, str],
) -> Iterator[tuple[IntArray, TargetMask | None]]:
    for read in _read_batches(rows, row_format, tokenizer):
        for where, samples in read:
            report.count(where, samples)
        kept = [[(where, sample) for sample in samples if sample.skipped is None] for where, samples in read]
        flat = [sample for row in kept for _, sample in row]
        encoded = iter(encode_samples(flat, row_format, tokenizer))
        for row in kept:
            sizes, first = [], report.examples
            for where, _ in row:
                ids, targets = next(encoded)
                check_ids(ids, vocab_size, where, refused_ids)
                sizes.append(len(ids))
                if len(ids) < 2:
                    report.skipped.add("of one token", where)
                else:
                    report.examples += 1
                    yield ids, targets
            if report.examples > first and row_format.renders:
                report.first_examples.append(first)
            if len(sizes) > 1 and row_format.renders:
                report.repeated_tokens += sum(sizes) - max(sizes)


def _read_batches(
    rows: Iterable[NamedRow], row_format: RowFormat, tokenizer: Tokenizer
) -> Iterator[list[tuple[str, list[Sample]]]]:
    """Yields batches of read rows. A child process renders chats, because a template may run without end."""

    def read(named: NamedRow) -> tuple[str, list[Sample]]:
        where, row = named
        return where, row_format.read(row, where, tokenizer)

    batches = tokenizer_batches(rows)
    if not row_format.renders:
        yield from (list(map(read, batch)) for batch in batches)
        return
    try:
        yield from limited_map(read, batches)
    except LimitError as error:
        where, _ = error.item
        raise ValueError(f"{where}: rendering the row {error}; correct it, or give another --chat_template") from error


def tokenizer_batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Yields batches large enough for a tokenizer to use all cores."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, TOKENIZER_ROWS)):
        yield batch
