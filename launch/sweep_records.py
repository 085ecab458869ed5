"""Records of a sweep's cells: sweep.jsonl, with one object per cell, and the files of the runs themselves."""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TextIO

from launch.sweep_file import Cell
from lightseq.config.train_config import TrainConfig
from lightseq.utils.files import parse_json, read_json, record_lines

FILE: Final = "sweep.jsonl"
FAILED: Final = ("failed", "timeout")


@dataclass(frozen=True)
class Record:
    """A line of sweep.jsonl."""

    name: str
    status: str  # done, failed, timeout, stopped, submitted or pending
    seconds: float | None  # from the start of its processes to their end
    error: str | None  # the line of its log that names the cause
    job_id: str | None
    output_dir: str
    command: str  # as typed in the repository root
    ranks: int
    flags: Mapping[str, str]


def lock(path: Path, remedy: str) -> TextIO:
    """Opens and locks a file until it is closed, also by processes that inherit it. Raises ValueError if it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(f"{path.parent} is in use ({error.strerror}); {remedy}") from error
    return file


def read_records(directory: Path, notes: list[str]) -> dict[str, Record]:
    """Returns the records by name, and adds a note for each line that is not a record.

    Raises ValueError for a file without any record, so that a foreign file is not overwritten.
    """
    path = directory / FILE
    lines = record_lines(path) if path.is_file() else []
    names = {field.name for field in fields(Record)}
    found: dict[str, Record] = {}
    refused: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = Record(**{key: value for key, value in parse_json(line).items() if key in names})
        except (ValueError, AttributeError, TypeError):
            refused.append(f"{path} line {number} is cut off, or not a record of a sweep")
        else:
            found[record.name] = record
    if refused and not found:
        raise ValueError(f"{refused[0]}; remove the file")
    notes += [f"{line}; it is left out, and the files of its cell decide" for line in refused]
    return found


def write_records(directory: Path, records: Iterable[Record]) -> None:
    """Replaces the file at once: a reader sees the old file or the new one."""
    directory.mkdir(parents=True, exist_ok=True)
    beside = directory / f".{FILE}"
    beside.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records), encoding="utf-8")
    os.replace(beside, directory / FILE)


def current_record(cell: Cell, record: Record | None, command: str) -> Record:
    """Returns a cell's present record: by its files, else by an earlier record with the same flags and ranks."""
    flags = dict(zip((f.removeprefix("--") for f in cell.flags[::2]), cell.flags[1::2], strict=True))
    fresh = Record(cell.name, "pending", None, None, None, str(cell.output_dir), command, cell.ranks, flags)
    noted = record if record is not None and (record.flags, record.ranks) == (flags, cell.ranks) else None
    if finished(cell):
        seconds = noted.seconds if noted is not None and noted.status in ("done", "submitted") else None
        return replace(fresh, status="done", seconds=seconds, job_id=noted.job_id if noted else None)
    if noted is None or noted.status == "done":  # its files are gone, or other flags wrote them
        return fresh
    return replace(noted, command=command)


def finished(cell: Cell) -> bool:
    """Returns whether the cell's directory holds a finished run of exactly these flags."""
    try:
        run = read_json(cell.output_dir / "run.json")
        config, total, ranks = run["config"], run["total_steps"], run["world_size"]
        if ranks != cell.ranks or comparable(config) != comparable(cell.config.to_json()):
            return False
        every = cell.config.logging_steps
        return {*range(every, total + 1, every), total} <= logged_steps(cell.output_dir)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's config without its directory, launcher, and where it resumed, because a requeued job resumes.

    Flags that are newer than the run have their defaults.
    """
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    ignored = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "max_restarts", "nproc_per_node")
    return {key: value for key, value in {**defaults, **config}.items() if key not in ignored}


def logged_steps(directory: Path) -> set[int]:
    """Returns the numbers of a run's logged steps, without lines that are incomplete or not records."""
    found = set()
    for line in record_lines(directory / "metrics.jsonl")[:-1]:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and type(record.get("step")) is int and "loss" in record:
            found.add(record["step"])
    return found
