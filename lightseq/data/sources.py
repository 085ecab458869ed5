"""Readers of rows: JSON lines, JSON, tables, texts, folders, and Hugging Face data sets on disk or on the hub.

Each row comes with its file and number, for errors.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from json import JSONDecodeError
from pathlib import Path
from typing import Any, Final

from lightseq.data.column_flags import check_renamed, select_columns
from lightseq.data.table_files import MAX_ROW_BYTES, NamedRow, Row, import_optional, read_arrow, read_csv, read_parquet
from lightseq.data.text_files import TEXT_SUFFIXES, read_text_file
from lightseq.data.token_directory import META
from lightseq.utils.files import open_regular, parse_json, read_bytes
from lightseq.utils.formatting import first_line

HUB_PREFIX: Final = "hf:"
FOLDER_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".ndjson", ".parquet", ".arrow")  # others may hold anything
# Written by `save_to_disk` for one split, and for several.
SAVED_DATASET_FILES: Final = ("state.json", "dataset_dict.json")
MAX_NAMED = 5  # rows or documents named in a note
MAX_JSON_BYTES: Final = 4 << 30  # largest JSON array, which is read whole
CORRECT_LINE: Final = "correct it, or write the file again with one JSON object per line"


@dataclass(frozen=True)
class ReadOptions:
    """Options for opening data. Column, cache and template apply only to rows that are not tokenized yet."""

    text_column: str = "text"
    limit: int | None = None  # rows, counted from the first; None: all
    cache: Path = field(default_factory=lambda: Path("~/.cache/lightseq/tokens").expanduser())
    chat_template: str | None = None  # file or template; None: the tokenizer's
    ignored_columns: tuple[str, ...] = ()  # columns to read as if they were absent
    renamed_columns: Mapping[str, str] = field(default_factory=dict)  # names under which columns are read
    limits_documents: bool = False  # applies the limit to documents of tokenized data, which is refused otherwise
    refused_ids: Mapping[int, str] = field(default_factory=dict)  # token ids of images or audio, and their names
    pairs: bool = False  # rows hold a chosen and a rejected answer; others are refused
    shares_prefixes: bool = False  # rows are packed by their tokens in trees


def holds_rows(source: str | Path) -> bool:
    """Returns whether a source holds rows, as opposed to a token directory or a pickle."""
    path = Path(source)
    if str(source).startswith(HUB_PREFIX) or row_suffix(path) is not None:
        return True
    return path.is_dir() and not (path / META).exists() and (_is_saved_dataset(path) or bool(_files(path)))


def holds_columns(source: str | Path) -> bool:
    """Returns whether a source holds rows or a pickle, to which --ignore_columns and --columns apply."""
    return holds_rows(source) or Path(source).suffix == ".pkl"


def row_suffix(path: Path) -> str | None:
    """Returns the suffix of a file with rows, such as .jsonl or .jsonl.gz; None for other files."""
    return next((suffix for suffix in READERS if path.name.endswith(suffix)), None)


def read_rows(source: str | Path, options: ReadOptions | None = None) -> Iterator[NamedRow]:
    """Yields rows, within the limit and with the columns that the options select.

    Raises ValueError naming the file and row that cannot be read.
    """
    options = options or ReadOptions()
    for number, (where, row) in enumerate(islice(_read_rows(source), options.limit)):
        if number == 0:
            check_renamed(row, options.renamed_columns, where)
        yield where, select_columns(row, options.ignored_columns, options.renamed_columns, where)


def names_for(source: str, sources: Sequence[str], names: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the names of --columns that a source is read with.

    Returns none for a source of a mixture whose first row has no such column, if another source has one.
    """
    holders = [path for path in sources if holds_columns(path)]
    if source not in holders:
        return {} if holders else names  # refused later
    if names and len(holders) > 1:
        holders = [path for path in holders if _has_any(path, names)]
    return names if source in holders or not holders else {}


def _has_any(source: str, columns: Iterable[str]) -> bool:
    """Returns whether the first row has one of the columns. A pickle, which is slow to read, counts as if it had."""
    if not holds_rows(source):
        return holds_columns(source)
    _, row = next(_read_rows(source), ("", {}))
    return any(column in row for column in columns)


def get_column(row: Row, column: str, where: str) -> Any:
    """Returns a column of a row. Raises ValueError if it is missing."""
    if column not in row:
        raise ValueError(
            f"{where} has no column {column!r}; it has: {join_names(row)}; add the column, or remove the row"
        )
    return row[column]


def get_text(row: Row, column: str, where: str) -> str:
    """Returns a text column; null counts as empty. Raises ValueError if it is missing or not text."""
    text = get_column(row, column, where)
    if not isinstance(text, str | None):
        raise ValueError(f"{where}: {column!r} is {text!r:.40}, not text")
    return check_encodable(text or "", where)


def join_names(columns: Iterable[str]) -> str:
    """Returns the names, separated by commas, or `none`."""
    return ", ".join(columns) or "none"


def check_encodable(text: str, where: str) -> str:
    """Returns the text. Raises ValueError if it has an unpaired surrogate, which JSON allows and tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise ValueError(f"{where}: character {error.start} is {half}, an unpaired surrogate; remove it") from error
    return text


def source_identity(source: str | Path) -> list[str]:
    """Returns strings that change whenever the rows change: file names, sizes and times, or the hub's hash."""
    if str(source).startswith(HUB_PREFIX):
        names, split = _parse_hub_name(str(source))
        try:
            return [*names, split, str(import_optional("datasets", source).load_dataset_builder(*names).hash)]
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{source}: {first_line(error)}; check the name and the network") from error
    path = Path(source).resolve()
    files = [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]
    found = [(file, file.stat()) for file in files]
    return [f"{file} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}" for file, about in found]


def _read_rows(source: str | Path) -> Iterator[NamedRow]:
    if str(source).startswith(HUB_PREFIX):
        yield from _hub_rows(str(source))
        return
    path = Path(source)
    if path.is_dir() and _is_saved_dataset(path):
        yield from _saved_rows(path)
        return
    if path.is_dir():
        _check_one_kind(path)
    for file in _files(path) if path.is_dir() else [path]:
        try:
            open_regular(file).close()
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error.strerror}); give a regular file") from error
        suffix = row_suffix(file)
        assert suffix is not None, file
        yield from READERS[suffix](file)


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in SAVED_DATASET_FILES)


def folder_suffixes(folder: Path) -> tuple[str, ...]:
    """Returns the file suffixes to read below a folder: files of rows, or of texts if there are none."""
    has_rows = any(path.name.endswith(FOLDER_SUFFIXES) for path in _visible(folder))
    return FOLDER_SUFFIXES if has_rows else TEXT_SUFFIXES


def _files(folder: Path) -> list[Path]:
    """Returns the files that are read below a folder, sorted by name."""
    suffixes = folder_suffixes(folder)
    return [path for path in _visible(folder) if path.name.endswith(suffixes)]


def _check_one_kind(folder: Path) -> None:
    """Raises ValueError for a folder of rows that also has texts, other than README.md."""
    files = _files(folder)
    text = next((path for path in _visible(folder) if path.name.endswith(".txt")), None)
    if text is not None and text not in files:
        raise ValueError(
            f"{folder} holds rows ({files[0].relative_to(folder)}) and texts ({text.relative_to(folder)}); keep one "
            "kind in a folder, or join them with lightseq data text"
        )


def _visible(folder: Path) -> list[Path]:
    """Returns all files below a folder except hidden ones, sorted by name."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return [p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts)]


def ignored_files(source: str | Path) -> list[str]:
    """Returns the relative paths of the files in a folder that are not read; empty for saved data sets and files."""
    path = Path(source)
    if not path.is_dir() or _is_saved_dataset(path):
        return []
    suffixes = folder_suffixes(path)
    return [str(p.relative_to(path)) for p in _visible(path) if not p.name.endswith(suffixes)]


def _as_row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}, not an object with columns")
    return value


def numbered_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields each non-blank line with its file and number, for `parse_row`; a bad line does not end the iteration."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        number = 0
        while line := _next_line(file, f"{path} line {number + 1}"):
            number += 1
            if line.strip():
                yield f"{path} line {number}", line.strip()


def _next_line(file: Any, where: str) -> bytes:
    try:
        line: bytes = file.readline(MAX_ROW_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{where} cannot be read: {first_line(error)}; write the file again") from error
    if len(line) > MAX_ROW_BYTES:
        raise ValueError(f"{where} is longer than {MAX_ROW_BYTES:,} bytes; split the row")
    return line


def parse_row(line: bytes, where: str) -> Row:
    """Parses a line of JSON. Raises ValueError if it is not an object."""
    try:
        value = parse_json(line, unique_keys=True)
    except ValueError as error:
        # The text of a JSONDecodeError would say line 1.
        reason = f"{error.msg} in column {error.colno}" if isinstance(error, JSONDecodeError) else first_line(error)
        raise ValueError(f"{where} is not JSON: {reason}; {CORRECT_LINE}") from error
    return _as_row(value, where)


def _read_jsonl(path: Path) -> Iterator[NamedRow]:
    return ((where, parse_row(line, where)) for where, line in numbered_lines(path))


def _read_json(path: Path) -> Iterator[NamedRow]:
    """Yields the objects of a JSON array, or of JSON lines if the file does not begin with an array."""
    with path.open("rb") as file:
        opens = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if opens != b"[":
        yield from _read_jsonl(path)
        return
    try:
        values = parse_json(read_bytes(path, MAX_JSON_BYTES).decode("utf-8-sig"), unique_keys=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}; write its rows as .jsonl") from error
    for number, value in enumerate(values):
        yield f"{path} row {number}", _as_row(value, f"{path} row {number}")


READERS: Final[Mapping[str, Callable[[Path], Iterator[NamedRow]]]] = {  # by suffix
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": read_csv,
    ".arrow": read_arrow,
    ".parquet": read_parquet,
    **dict.fromkeys(TEXT_SUFFIXES, read_text_file),
}


def _parse_hub_name(source: str) -> tuple[list[str], str]:
    """Parses `hf:NAME`, `hf:NAME:SPLIT` or `hf:NAME:CONFIG:SPLIT`; the default split is train."""
    name, *more = source.removeprefix(HUB_PREFIX).split(":")
    if not all((name, *more)) or len(more) > 2:
        raise ValueError(f"{source} is not the name of a data set; give hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    return [name, *more[:-1]], more[-1] if more else "train"


def _hub_rows(source: str) -> Iterator[NamedRow]:
    """Streams the rows of a hub data set, without downloading it first."""
    names, split = _parse_hub_name(source)
    number = -1
    try:
        for number, value in enumerate(
            import_optional("datasets", source).load_dataset(*names, split=split, streaming=True)
        ):
            yield f"{source} row {number}", value
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{source} cannot be read past row {number + 1}: {first_line(error)}") from error


def _saved_rows(path: Path) -> Iterator[NamedRow]:
    try:
        found = import_optional("datasets", path).load_from_disk(str(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read as a saved data set: {first_line(error)}") from error
    if (path / SAVED_DATASET_FILES[1]).is_file():
        if "train" not in found:
            raise ValueError(f"{path} has no split train; give the path of one of: {', '.join(map(str, found))}")
        found = found["train"]
    for number, value in enumerate(found.with_format(None)):  # plain values of all columns
        yield f"{path} row {number}", value


@dataclass
class SkippedRows:
    """Skipped rows, counted by reason, with the first few named."""

    counts: Counter[str] = field(default_factory=Counter)
    rows: list[str] = field(default_factory=list)

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] += 1
        if len(self.rows) < MAX_NAMED:
            self.rows.append(f"{where}: {reason}")

    def facts(self) -> dict[str, object]:
        """Returns the counts for meta.json."""
        return {"skipped": dict(self.counts), "skipped_rows": self.rows}

    @property
    def notes(self) -> list[str]:
        """A note on the skipped rows, if there are any."""
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.counts.items()))
        shown = f" ({'; '.join(self.rows)}{'; …' if self.counts.total() > MAX_NAMED else ''})"
        return [f"skipped rows: {counts}{shown}"] if counts else []
