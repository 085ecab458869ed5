"""Text sources of data_gen: files, folders, globs, Hugging Face data sets and Python's standard library."""

from __future__ import annotations

import glob
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightseq.data.columns import UnknownColumnError
from lightseq.data.samples import EMPTY
from lightseq.data.sources import (
    FOLDER_SUFFIXES,
    HUB_PREFIX,
    MAX_NAMED,
    ReadOptions,
    Row,
    SkippedRows,
    numbered_lines,
    parse_row,
    read_rows,
)
from lightseq.data.targets import text_of_row
from lightseq.data.text_files import TEXT_BYTES
from lightseq.utils.files import read_text
from lightseq.utils.formatting import first_line, plural

LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson")  # a bad line does not end the file
NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}


@dataclass
class SkippedTexts(SkippedRows):
    """Rows and files that are left out, counted by reason, with messages about the first few."""

    by_reason: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    cut_short: list[str] = field(default_factory=list)  # files that could be read only in part

    def add(self, reason: str, where: str, message: str = "") -> None:
        super().add(reason, where)
        if message and len(self.by_reason[reason]) < MAX_NAMED:
            self.by_reason[reason].append(message)

    @property
    def messages(self) -> list[str]:
        """A few messages per reason, so that a truncated file shows beside any number of bad rows."""
        return [message for messages in self.by_reason.values() for message in messages]

    def facts(self) -> dict[str, object]:
        return {**super().facts(), "cut_short": self.cut_short}

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.counts.items()))


def expand_sources(sources: Sequence[str]) -> list[Path | str]:
    """Returns the files of all sources in the given order, sorted by name within a source; hub data sets remain names.

    Raises ValueError for a source without files.
    """
    found: list[Path | str] = []
    for source in sources:
        files = [source] if source.startswith(HUB_PREFIX) else _files(source)
        if not files:
            raise ValueError(
                f"{source} matches no file; give files, folders, quoted globs, {HUB_PREFIX}NAME, or stdlib"
            )
        found.extend(files)
    return found


def _files(source: str) -> Sequence[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _below(path, "*")
    if source == "stdlib":
        library = Path(sysconfig.get_path("stdlib"))
        return [path for path in _below(library, "*.py") if not NOT_LIBRARY & set(path.relative_to(library).parts)]
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    return [match for match in matches if match.is_file()]


def _below(folder: Path, pattern: str) -> list[Path]:
    """Returns files in name order, without hidden ones and those in hidden folders (.git, .venv)."""
    files = (path for path in sorted(folder.rglob(pattern)) if path.is_file())
    return [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def read_texts(source: Path | str, column: str, skipped: SkippedTexts, ignored: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the texts of one file or data set.

    Counts rows and files that cannot be read; raises ValueError for a data set that cannot, and for columns that are
    not known and not `ignored`.
    """
    options = ReadOptions(text_column=column, ignored_columns=ignored)
    streamed = ((where, text_of_row(row, column, where)) for where, row in read_rows(source, options))
    for where, text in streamed if isinstance(source, str) else _readable(source, options, skipped):
        if text:
            yield text
        else:
            skipped.add(EMPTY, where)


def _readable(path: Path, options: ReadOptions, skipped: SkippedTexts) -> Iterator[tuple[str, str]]:
    rows = 0
    try:
        if not path.name.endswith(FOLDER_SUFFIXES):
            yield str(path), read_text(path, TEXT_BYTES)
            return
        for where, row in numbered_lines(path) if path.name.endswith(LINE_SUFFIXES) else read_rows(path, options):
            text = _text_or_none(row, options, where, skipped)
            if text is not None:
                yield where, text
            rows += 1
    except UnknownColumnError:
        raise
    except UnicodeDecodeError:
        skipped.add("not UTF-8", str(path), f"{path} is not UTF-8 text")
    except (OSError, ValueError) as error:
        if not rows:
            skipped.add("unreadable", str(path), first_line(error))
            return
        skipped.cut_short.append(str(path))
        rest = f"the rest of the file, after {plural(rows, 'row')}, was not read"
        skipped.add("cut short", str(path), f"{first_line(error)}; {rest}")


def _text_or_none(row: Row | bytes, options: ReadOptions, where: str, skipped: SkippedTexts) -> str | None:
    """Returns the text of a row, or None for an unreadable one, which is counted: later rows may be fine."""
    try:
        parsed = parse_row(row, where) if isinstance(row, bytes) else row
        kept = {column: value for column, value in parsed.items() if column not in options.ignored_columns}
        return text_of_row(kept, options.text_column, where)
    except UnknownColumnError:
        raise
    except ValueError as error:
        skipped.add("unreadable", where, first_line(error))
        return None
