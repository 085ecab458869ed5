"""Where texts come from: files, folders, globs, Hugging Face data sets and Python's own standard library."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightseq.data import corpus
from lightseq.data.rows import HUB_PREFIX, rows_of, text_in
from lightseq.data.samples import EMPTY
from lightseq.words import first_line, plural

TEXT_SUFFIXES = (".jsonl", ".parquet")  # one document a row
NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}


@dataclass
class Skipped(corpus.Skipped):
    """What was left out: counted by reason, and the whole story of the first few unreadable files."""

    stories: list[str] = field(default_factory=list)

    def add(self, reason: str, where: str, story: str = "") -> None:
        super().add(reason, where)
        if story and len(self.stories) < 5:
            self.stories.append(story)

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.counts.items()))


def expand(sources: Sequence[str]) -> list[Path | str]:
    """Files in the order given, each source's own in name order; data sets of the hub stay names, to be streamed."""
    found: list[Path | str] = []
    for source in sources:
        files = [source] if source.startswith(HUB_PREFIX) else _files(source)
        if not files:
            raise ValueError(f"{source} names no file; give files, folders, quoted globs, {HUB_PREFIX}NAME, or stdlib")
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
    """Files in name order, hidden ones and what lies in hidden folders (.git, .venv) aside."""
    files = (path for path in sorted(folder.rglob(pattern)) if path.is_file())
    return [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def texts_of(source: Path | str, column: str, skipped: Skipped) -> Iterator[str]:
    """The texts of one file or data set. A file that cannot be read is counted; a data set that cannot is an error."""
    named = _texts_of_rows(source, column) if isinstance(source, str) else _readable(source, column, skipped)
    for where, text in named:
        if text:
            yield text
        else:
            skipped.add(EMPTY, where)


def _texts_of_rows(source: Path | str, column: str) -> Iterator[tuple[str, str]]:
    return ((where, text_in(row, column, where)) for where, row in rows_of(source))


def _readable(path: Path, column: str, skipped: Skipped) -> Iterator[tuple[str, str]]:
    rows = 0
    try:
        if path.suffix not in TEXT_SUFFIXES:
            yield str(path), path.read_bytes().decode("utf-8")
            return
        for named in _texts_of_rows(path, column):
            yield named
            rows += 1
    except UnicodeDecodeError:
        skipped.add("not UTF-8", str(path), f"{path} is not UTF-8 text")
    except (OSError, ValueError) as error:
        kept = f"; {plural(rows, 'row')} before it kept" if rows else ""
        skipped.add("unreadable", str(path), first_line(error) + kept)
