"""Progress on stderr: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_SECONDS: Final = 5.0  # between two lines if stderr is not a terminal

T = TypeVar("T")


def progress_bar(
    items: Iterable[T], total: int | None = None, progress: bool = True, description: str = "documents"
) -> Iterator[T]:
    """Yields the items. Shows how many are done if `progress` is set, and the time left if the total is known."""
    console = Console(stderr=True)
    if total is None and isinstance(items, Sized):
        total = len(items)
    if progress and not console.is_terminal:
        yield from _with_lines(items, total, description)
        return
    left = () if total is None else (TimeRemainingColumn(), TextColumn("left"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *left)
    with Progress(*columns, console=console, disable=not progress) as bar:
        yield from bar.track(items, total=total, description=description)


def _with_lines(items: Iterable[T], total: int | None, description: str) -> Iterator[T]:
    begin = last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last > LINE_SECONDS:
            last = now
            share = "" if total is None else f"/{total:,}"
            print(f"{description} {done:,}{share}, {now - begin:.0f} s", file=sys.stderr, flush=True)
