"""Cache of tokenized rows: one token directory for each combination of source, tokenizer and options."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

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
from lightseq.data.targets import RowFormat, detect_row_format, encode_samples
from lightseq.data.token_directory import (
    META,
    IntArray,
    matches_schema,
    remove_partials,
    write_token_directory,
)
from lightseq.data.tokenizer import TargetMask, Tokenizer
from lightseq.utils.formatting import plural
from lightseq.utils.progress import progress_bar

T = TypeVar("T")
TOKENIZER_ROWS: Final = 256  # rows per call of the tokenizer
HEAD_START_SECONDS: Final = 0.5  # of the process with a progress bar
CACHE_VERSION: Final = 3  # increase it when tokenization changes
META_FIELDS: Final = {  # fields of meta.json in the cache only
    "tokenizer": (str, type(None)),
    "kind": str,
    "skipped": {str: int},
    "skipped_rows": [str],
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
    alone = "" if meta["tokenizer"] else ", without a tokenizer"
    notes = [f"{source}: {plural(meta['documents'], meta['kind'] + ' row')} as tokens in {directory}{alone}"]
    notes += skipped_notes(str(source), meta)
    notes += _ignored_files_and_padding_notes(str(source), meta)
    if long := int((sizes > length + 1).sum()):
        split = f"{plural(long, 'row')} of more than {length:,} tokens split into windows"
        notes.append(f"{source}: {split}; no target is lost at a border")
    return dataclasses.replace(examples, notes=(*notes, *examples.notes))


def format_and_rows(source: str | Path, column: str, limit: int | None = None) -> tuple[RowFormat, Iterator[NamedRow]]:
    """Returns the format of the first row, and all rows. Raises ValueError without rows or for an unknown format."""
    rows = read_rows(source, limit)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{source} holds no rows; give a source with rows")
    return detect_row_format(list(first[1]), column, first[0]), itertools.chain([first], rows)


def _ignored_files_and_padding_notes(source: str, meta: Mapping[str, Any]) -> list[str]:
    """Returns notes on files in a folder that are not read, and on padding."""
    notes = []
    if files := meta["passed_over"]["files"]:
        shown = ", ".join(meta["passed_over"]["first"]) + (", …" if files > MAX_NAMED else "")
        notes.append(
            f"{source}: skipped {plural(files, 'file')} ({shown}); only {' and '.join(FOLDER_SUFFIXES)} files of a "
            "folder are read"
        )
    if meta["padding"]["rows"]:
        padded, padding = plural(meta["padding"]["rows"], "row"), plural(meta["padding"]["tokens"], "token")
        notes.append(f"{source}: cut {padding} of padding off {padded}, by attention_mask")
    return notes


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
    row_format, rows = format_and_rows(source, read_options.text_column, read_options.limit)
    skipped = SkippedRows()
    ignored = ignored_files(source)

    def extra_meta() -> dict[str, object]:
        return {
            "tokenizer": tokenizer.name or None,
            "source": str(source),
            "seed": None,
            "kind": row_format.name,
            **skipped.facts(),
            "padding": dict(skipped.padding),
            "passed_over": {"files": len(ignored), "first": ignored[:MAX_NAMED]},
            "made": provenance,
        }

    documents = _tokenize(rows, row_format, vocab_size, tokenizer, skipped)
    shown = progress_bar(documents, progress=progress)
    try:
        write_token_directory(directory, shown, tokenizer.vocab_size, extra_meta, with_targets=row_format.masked)
    except ValueError as error:
        if skipped.counts and "no document to write" in str(error):
            notes = skipped_notes(str(source), skipped.facts())[0]
            raise ValueError(f"{source} has no row with a target; {notes}") from error
        raise


def _tokenize(
    rows: Iterable[NamedRow],
    row_format: RowFormat,
    vocab_size: int,
    tokenizer: Tokenizer,
    skipped: SkippedRows,
) -> Iterator[tuple[IntArray, TargetMask | None]]:
    for batch in tokenizer_batches(rows):
        read = [(where, row_format.read(row, where, tokenizer)) for where, row in batch]
        for where, sample in read:
            if sample.skipped is not None:
                skipped.add(sample.skipped, where)
            if sample.padding:
                skipped.padding.update(rows=1, tokens=sample.padding)
        kept = [(where, sample) for where, sample in read if sample.skipped is None]
        encoded = encode_samples([sample for _, sample in kept], row_format, tokenizer)
        for (where, _), (ids, targets) in zip(kept, encoded, strict=True):
            check_ids(ids, vocab_size, where)
            if len(ids) < 2:
                skipped.add("of one token", where)
            elif targets is not None and not row_format.masked and not targets[1:].all():
                raise ValueError(f"{where} has labels, but the first row has none; give every row labels")
            else:
                yield ids, targets


def tokenizer_batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Yields batches large enough for a tokenizer to use all cores."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, TOKENIZER_ROWS)):
        yield batch
