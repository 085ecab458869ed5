"""Where texts come from: files, folders, globs, Hugging Face data sets and Python's own standard library."""

from __future__ import annotations

import glob
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightseq.rows import HUB_PREFIX
from lightseq.rows import texts_of as texts_of_rows
from lightseq.tokens import first_line, plural

TEXT_SUFFIXES = (".jsonl", ".parquet")  # one document a row
NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}


@dataclass
class Skipped:
    """What was left out: counted by reason, with the whole story of the first few unreadable files."""

    counts: Counter[str] = field(default_factory=Counter)
    stories: list[str] = field(default_factory=list)

    def add(self, reason: str, story: str = "") -> None:
        self.counts[reason] += 1
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
    if isinstance(source, str):
        texts = texts_of_rows(source, column)
    else:
        texts = _readable(source, column, skipped)
    for text in texts:
        if text:
            yield text
        else:
            skipped.add("empty")


def _readable(path: Path, column: str, skipped: Skipped) -> Iterator[str]:
    rows = 0
    try:
        if path.suffix not in TEXT_SUFFIXES:
            yield path.read_bytes().decode("utf-8")
            return
        for text in texts_of_rows(path, column):
            yield text
            rows += 1
    except UnicodeDecodeError:
        skipped.add("not UTF-8", f"{path} is not UTF-8 text")
    except (OSError, ValueError) as error:
        skipped.add("unreadable", first_line(error) + (f"; {plural(rows, 'row')} before it kept" if rows else ""))
