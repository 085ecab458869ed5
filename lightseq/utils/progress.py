"""Progress bar on a terminal's stderr, and nowhere else."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


def progress_bar(
    items: Iterable[T], total: int | None = None, progress: bool = True, description: str = "documents"
) -> Iterator[T]:
    """Yields the items, with a progress bar if stderr is a terminal and `progress` is set."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (progress and console.is_terminal)) as bar:
        yield from bar.track(items, total=total, description=description)
