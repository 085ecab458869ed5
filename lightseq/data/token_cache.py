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

import numpy as np

from lightseq.data.answers import REWRITES
from lightseq.data.examples import MAX_NAMED, WindowExamples, check_ids, open_windows
from lightseq.data.sources import (
    FOLDER_SUFFIXES,
    NamedRow,
    ReadOptions,
    SkippedRows,
    ignored_files,
    read_rows,
    skipped_notes,
    source_identity,
)
from lightseq.data.targets import PACKED, RowFormat, Sample, detect_row_format, encode_samples
from lightseq.data.token_directory import (
    META,
    IntArray,
    matches_schema,
    remove_partials,
    write_token_directory,
)
from lightseq.data.tokenizer import TargetMask, Tokenizer
from lightseq.utils.formatting import alternatives, plural
from lightseq.utils.limited import LimitError, limited_map
from lightseq.utils.progress import progress_bar

T = TypeVar("T")
TOKENIZER_ROWS: Final = 256  # rows per call of the tokenizer
HEAD_START_SECONDS: Final = 0.5  # of the process with a progress bar
CACHE_VERSION: Final = 5  # increase it when tokenization changes
MAX_GROWTH: Final = 16  # characters that a chat template may write per character of a row
MIN_ROW_SIZE: Final = 1 << 20  # characters; shorter rows may grow as if they had as many
META_FIELDS: Final = {  # fields of meta.json in the cache only
    "tokenizer": (str, type(None)),
    "kind": str,
    "skipped": {str: int},
    "skipped_rows": [str],
    "rows": int,
    "remarks": {str: {"rows": int, "first": str}},
    "repeated_tokens": int,
    "padding": {"rows": int, "tokens": int},
    "passed_over": {"files": int, "first": [str]},
}


def open_rows(
    source: str | Path, length: int, vocab_size: int, tokenizer: Tokenizer, read_options: ReadOptions, progress: bool
) -> WindowExamples:
    """Opens windows of the tokenized rows, from the cache if possible. Raises ValueError naming a bad row."""
    directory = ensure_tokenized(source, vocab_size, tokenizer, read_options, progress)
    examples = open_windows(directory, length, vocab_size)
    meta, sizes = examples.source.meta, np.diff(examples.source.offsets)
    if wrong := [key for key, shape in META_FIELDS.items() if not matches_schema(meta.get(key), shape)]:
        raise ValueError(
            f"{directory / META} is corrupt: {wrong[0]} is missing or wrong; remove {directory} to tokenize again"
        )
    notes = [_tokens_note(source, meta, directory)]
    notes += skipped_notes(str(source), meta)
    notes += _remark_notes(str(source), meta)
    notes += _ignored_files_and_padding_notes(str(source), meta)
    if long := int((sizes > length + 1).sum()):
        split = f"{plural(long, 'row')} of more than {length:,} tokens split into windows"
        notes.append(f"{source}: {split}; no target is lost at a border")
    return dataclasses.replace(examples, notes=(*notes, *examples.notes))


def _tokens_note(source: str | Path, meta: Mapping[str, Any], directory: Path) -> str:
    """Returns a note on the number of rows, and of examples where a row holds several."""
    held = plural(meta["documents"], meta["kind"] + " row")
    if meta["remarks"].keys() & {REWRITES, PACKED}:
        held = f"{plural(meta['documents'], 'example')} of {plural(meta['rows'], meta['kind'] + ' row')}"
    return f"{source}: {held} as tokens in {directory}" + ("" if meta["tokenizer"] else ", without a tokenizer")


def _remark_notes(source: str, meta: Mapping[str, Any]) -> list[str]:
    """Returns notes on what is unusual about rows, with the number of rows and the first of them."""
    notes = []
    for remark, found in sorted(meta["remarks"].items()):
        repeated = f"; {meta['repeated_tokens']:,} tokens are repeated as context" if remark == REWRITES else ""
        notes.append(f"{source}: {remark}{repeated} ({plural(found['rows'], 'row')}, the first {found['first']})")
    return notes


def format_and_rows(source: str | Path, options: ReadOptions) -> tuple[RowFormat, Iterator[NamedRow]]:
    """Returns the format of the first row, and all rows. Raises ValueError without rows or for an unknown format."""
    rows = read_rows(source, options)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{source} holds no rows; give a source with rows")
    row_format = detect_row_format(first[1], options.text_column, first[0])
    return row_format, itertools.chain([first], rows)


def _ignored_files_and_padding_notes(source: str, meta: Mapping[str, Any]) -> list[str]:
    """Returns notes on files in a folder that are not read, and on padding."""
    notes = []
    if files := meta["passed_over"]["files"]:
        shown = ", ".join(meta["passed_over"]["first"]) + (", …" if files > MAX_NAMED else "")
        notes.append(
            f"{source}: skipped {plural(files, 'file')} ({shown}); of a folder, only {alternatives(FOLDER_SUFFIXES)} "
            "files are read"
        )
    if meta["padding"]["rows"]:
        padded, padding = plural(meta["padding"]["rows"], "row"), plural(meta["padding"]["tokens"], "token")
        notes.append(f"{source}: cut {padding} of padding off {padded}, by attention_mask")
    return notes


@dataclasses.dataclass
class RowReport:
    """Counts of unusual rows of a source: skipped ones, padded ones, and remarks with their first row."""

    rows: int = 0
    skipped: SkippedRows = dataclasses.field(default_factory=SkippedRows)
    padded_rows: int = 0
    padding_tokens: int = 0
    remarks: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    repeated_tokens: int = 0  # of earlier turns, in examples of one answer each

    def count(self, where: str, samples: Sequence[Sample]) -> None:
        """Counts a row and its samples."""
        self.rows += 1
        for sample in samples:
            if sample.skipped is not None:
                self.skipped.add(sample.skipped, where)
            self.padded_rows += sample.padding > 0
            self.padding_tokens += sample.padding
        for remark in {remark for sample in samples for remark in sample.remarks}:
            self.remarks.setdefault(remark, {"rows": 0, "first": where})["rows"] += 1

    def facts(self) -> dict[str, object]:
        """Returns the counts for meta.json."""
        return {
            "rows": self.rows,
            **self.skipped.facts(),
            "padding": {"rows": self.padded_rows, "tokens": self.padding_tokens},
            "remarks": self.remarks,
            "repeated_tokens": self.repeated_tokens,
        }


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
        "limit": read_options.limit,
        "version": CACHE_VERSION,
    }
    fingerprint = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    directory = read_options.cache / fingerprint
    if not directory.exists():
        time.sleep(0 if progress else HEAD_START_SECONDS)
        with _lock(read_options.cache, fingerprint), _name_full_disk(read_options.cache):
            if not directory.exists():
                remove_partials(directory)
                _write(
                    directory,
                    source,
                    vocab_size,
                    tokenizer,
                    read_options,
                    {**key, "fingerprint": fingerprint},
                    progress,
                )
    return directory


@contextmanager
def _name_full_disk(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(f"--data_cache {cache} is full ({error.strerror}); name another directory") from error


@contextmanager
def _lock(cache: Path, fingerprint: str) -> Iterator[None]:
    if cache.exists() and not cache.is_dir():
        raise ValueError(f"--data_cache {cache} is a file; name a directory")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        held = (cache / f"{fingerprint}.lock").open("w")
    except OSError as error:
        raise ValueError(
            f"--data_cache {cache} cannot be written ({error.strerror}); name another directory"
        ) from error
    with held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


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
    report = RowReport()
    ignored = ignored_files(source)

    def extra_meta() -> dict[str, object]:
        return {
            "tokenizer": tokenizer.name or None,
            "tokenizer_fingerprint": tokenizer.vocabulary_fingerprint if tokenizer.name else None,
            "source": str(source),
            "seed": None,
            "kind": row_format.name,
            **report.facts(),
            "passed_over": {"files": len(ignored), "first": ignored[:MAX_NAMED]},
            "made": provenance,
        }

    documents = _tokenize(rows, row_format, vocab_size, tokenizer, report)
    shown = progress_bar(documents, progress=progress)
    try:
        write_token_directory(directory, shown, tokenizer.vocab_size, extra_meta, with_targets=row_format.masked)
    except ValueError as error:
        if report.skipped.counts and "no document to write" in str(error):
            notes = skipped_notes(str(source), report.skipped.facts())[0]
            raise ValueError(f"{source} has no row with a target; {notes}") from error
        raise


def _tokenize(
    rows: Iterable[NamedRow], row_format: RowFormat, vocab_size: int, tokenizer: Tokenizer, report: RowReport
) -> Iterator[tuple[IntArray, TargetMask | None]]:
    for read in _read_batches(rows, row_format, tokenizer):
        for where, samples in read:
            report.count(where, samples)
        kept = [[(where, sample) for sample in samples if sample.skipped is None] for where, samples in read]
        flat = [sample for row in kept for _, sample in row]
        encoded = iter(encode_samples(flat, row_format, tokenizer))
        for row in kept:
            sizes = []
            for where, _ in row:
                ids, targets = next(encoded)
                check_ids(ids, vocab_size, where)
                sizes.append(len(ids))
                if len(ids) < 2:
                    report.skipped.add("of one token", where)
                else:
                    yield ids, targets
            if len(sizes) > 1 and row_format.renders:
                report.repeated_tokens += sum(sizes) - max(sizes)


def _read_batches(
    rows: Iterable[NamedRow], row_format: RowFormat, tokenizer: Tokenizer
) -> Iterator[list[tuple[str, list[Sample]]]]:
    """Yields batches of read rows. A child process renders chats, because a template may run without end."""

    def read(named: NamedRow) -> tuple[str, list[Sample]]:
        where, row = named
        samples = row_format.read(row, where, tokenizer)
        written = max(sum(len(text) for text, _ in sample.parts) for sample in samples)
        if row_format.renders and written > MAX_GROWTH * max(MIN_ROW_SIZE, len(str(row))):
            raise ValueError(f"{where}: the chat template writes {written:,} characters for this row; give another")
        return where, samples

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
