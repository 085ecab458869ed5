"""Knows how far a run is while it trains: what its directory says now, and whether it has gone quiet."""

import math
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .flags import About, section
from .jsonl import json_object
from .runs import Record, checked, column, latest, read_about
from .summary import median

RECENT = 50  # steps that tell the pace
QUIET_FACTOR, QUIET_SECONDS = 5.0, 20.0  # a run is quiet after so many times what a logged step takes, and never before


class Follower:
    """The records of a metrics.jsonl that grows; only what was added is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def records(self) -> Sequence[Record]:
        """All whole lines so far. A file that was written anew, as a resumed run does, is read from its beginning."""
        if not self._path.is_file():
            self._forget()
            return self._records
        about_file = self._path.stat()
        if about_file.st_size < self._offset:
            self._forget()
        try:
            self._read(leave_out=self._offset == 0)
        except ValueError:
            if self._offset == 0:
                raise
            self._forget()  # what was read before may be gone; if it is not that, the line is left out
            self._read(leave_out=True)
        return self._records

    def _read(self, leave_out: bool) -> None:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
        lines = whole.decode("utf-8", errors="replace").splitlines()
        found, refused = [], []
        for line in lines:
            try:
                found += [checked(json_object(line))] if line.strip() else []
            except ValueError as error:
                refused.append(error)
        if refused and not (leave_out and found):
            raise ValueError(f"{self._path} holds a line that is no record ({refused[0]}); remove the line")
        self._records += found
        self.left_out += len(refused)
        self._offset += len(whole) + len(end)

    def _forget(self) -> None:
        self._offset = 0
        self._records: list[Record] = []
        self.left_out = 0  # lines that are no records


@dataclass(frozen=True)
class Progress:
    """A run at one moment. Where it has not begun, nothing of it is known."""

    directory: Path
    about: About
    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    checkpoints: tuple[int, ...]  # by their step
    saving: int | None  # the step of a checkpoint that is being written
    silent_seconds: float | None  # since something was last logged or the run began; None where nothing was
    left_out: int = 0  # lines that are no records
    gone: str | None = None  # the process that wrote here last, if it is known to be there no more

    @property
    def total(self) -> int | None:
        total = self.about.get("total_steps")
        return total if isinstance(total, int) else None

    @property
    def has_begun(self) -> bool:
        """Whether there is anything that a run wrote."""
        return self.silent_seconds is not None

    @property
    def gone_for_good(self) -> bool:
        """Whether the process that wrote here is gone, and no other has taken its place for some seconds."""
        return self.gone is not None and (self.silent_seconds or 0.0) > QUIET_SECONDS

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"] or 0) if self.steps else 0

    @property
    def done(self) -> bool:
        return self.total is not None and self.step >= self.total

    @property
    def step_seconds(self) -> float:
        """The pace of late; NaN where it is not known."""
        return median(column(self.steps, "step_seconds")[-RECENT:]) if self.steps else math.nan

    @property
    def seconds_left(self) -> float:
        return (self.total - self.step) * self.step_seconds if self.total is not None else math.nan

    @property
    def logged_every(self) -> int:
        """Steps between two records."""
        every = section(self.about, "config").get("logging_steps")
        return every if isinstance(every, int) and every > 0 else 1

    @property
    def quiet(self) -> bool:
        """Whether nothing came for much longer than a logged step takes."""
        usual = self.step_seconds * self.logged_every
        if self.done or self.silent_seconds is None or not math.isfinite(usual):
            return False
        return self.silent_seconds > max(QUIET_SECONDS, QUIET_FACTOR * usual)

    def known(self, key: str) -> np.ndarray:
        """The numbers of a column that are numbers."""
        values = column(self.steps, key)
        return values[np.isfinite(values)]


def read_progress(directory: Path, follower: Follower, now: float) -> Progress:
    """`now` is a time of day in seconds, as files have. Raises ValueError where a file is not what a run writes."""
    records = follower.records()
    steps, _ = latest([record for record in records if "eval_loss" not in record])
    evaluations, _ = latest([record for record in records if "eval_loss" in record])
    return Progress(
        directory=directory,
        about=about_now(directory / "run.json"),
        steps=steps,
        evaluations=evaluations,
        checkpoints=checkpoints(directory, ""),
        saving=max(checkpoints(directory, r"\.partial"), default=None),
        silent_seconds=silence(directory, now),
        left_out=follower.left_out,
        gone=gone(directory / "lock"),  # as lightseq/training/output_directory.py calls it
    )


def gone(lock: Path) -> str | None:
    """`process 12 on HOST`, of which a run's lock speaks, if this is that host and there is no such process."""
    try:
        words = re.match(r"process (\d+) on (\S+)$", lock.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    here = words is not None and words[2] == socket.gethostname() and Path("/proc/self").exists()
    return words[0] if words is not None and here and not Path(f"/proc/{words[1]}").exists() else None


def about_now(path: Path) -> Mapping[str, object]:
    """What run.json says; nothing while it is being written."""
    try:
        return read_about(path)
    except ValueError:
        return {}


def checkpoints(directory: Path, ending: str) -> tuple[int, ...]:
    names = [path.name for path in directory.glob("checkpoint-*")] if directory.is_dir() else []
    matches = [re.fullmatch(rf"checkpoint-(\d+){ending}", name) for name in names]
    return tuple(sorted(int(match[1]) for match in matches if match))


def silence(directory: Path, now: float) -> float | None:
    files = [path for name in ("metrics.jsonl", "run.json") if (path := directory / name).is_file()]
    return now - max(path.stat().st_mtime for path in files) if files else None
