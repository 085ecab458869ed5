"""Keeps two calls out of one directory, and a new call away from what processes of an earlier one still write."""

import fcntl
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TextIO

from launch.sweep_cells import Cell

LOG: Final = "log.txt"  # what a cell's processes say; they hold it for as long as one of them runs
FILE: Final = ".sweep.lock"


def sweep_lock(output_dir: Path) -> TextIO:
    """Held by the one call that runs cells of the directory and notes their ends, until it is closed."""
    return _held(output_dir / FILE, f"{output_dir} is in use by another call of launch/sweep.py; wait until it ends")


def open_log(cell: Cell) -> TextIO:
    """The cell's empty log. Processes that inherit it keep it locked, even if the call that started them is killed."""
    log = _log(cell)
    log.truncate(0)
    return log


def check_ended(cells: Iterable[Cell]) -> None:
    """Refuses cells that still run although the call that started them is gone."""
    for cell in cells:
        if (cell.output_dir / LOG).exists():
            _log(cell).close()


def _log(cell: Cell) -> TextIO:
    return _held(
        cell.output_dir / LOG,
        f"{cell.output_dir}: processes that an earlier call started still run, and write there; wait until they are "
        f"through, or end them (pgrep -fa -- {cell.name} shows them)",
    )


def _held(path: Path, said: str) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise ValueError(said) from None
        raise ValueError(
            f"{path} cannot be locked ({error.strerror}), and two sweeps could write there; name an output_dir on "
            "another file system"
        ) from error
    return file
