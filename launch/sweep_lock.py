"""Locks that keep two sweeps out of one directory, and a sweep away from processes that an earlier one left."""

import fcntl
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TextIO

from launch.sweep_cells import Cell

LOG: Final = "log.txt"  # output of a cell's processes, which lock it as long as one of them runs
FILE: Final = ".sweep.lock"


def sweep_lock(output_dir: Path) -> TextIO:
    """Locks a sweep's directory until the returned file is closed. Raises ValueError if another sweep holds it."""
    return _held(output_dir / FILE, f"{output_dir} is in use by another call of launch/sweep.py; wait until it ends")


def open_log(cell: Cell) -> TextIO:
    """Opens the cell's log, emptied. Processes that inherit it keep it locked, even if the sweep itself is killed."""
    log = _log(cell)
    log.truncate(0)
    return log


def check_ended(cells: Iterable[Cell]) -> None:
    """Raises ValueError for a cell that still runs although the sweep that started it is gone."""
    for cell in cells:
        if (cell.output_dir / LOG).exists():
            _log(cell).close()


def _log(cell: Cell) -> TextIO:
    return _held(
        cell.output_dir / LOG,
        f"{cell.output_dir}: processes of an earlier sweep still run and write there; wait until they end, or end them "
        f"(pgrep -fa -- {cell.name} shows them)",
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
            f"{path} cannot be locked ({error.strerror}), so two sweeps could write there; give an output_dir on "
            "another file system"
        ) from error
    return file
