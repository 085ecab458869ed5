"""Records of a sweep's cells: sweep.jsonl, with one object per cell, and the files of the runs themselves."""

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from launch.sweep_cells import Cell
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
    family: str
    ranks: int
    flags: Mapping[str, str]


def pending(cell: Cell, command: str) -> Record:
    flags = dict(zip((f.removeprefix("--") for f in cell.flags[::2]), cell.flags[1::2], strict=True))
    return Record(cell.name, "pending", None, None, None, str(cell.output_dir), command, cell.family, cell.ranks, flags)


def read_records(directory: Path, notes: list[str]) -> dict[str, Record]:
    """Returns the records by name, and adds a note for each line that is not a record.

    Raises ValueError for a file without any record, so that a foreign file is not overwritten.
    """
    path = directory / FILE
    if not path.is_file():
        return {}
    found: dict[str, Record] = {}
    refused: list[str] = []
    for number, line in enumerate(record_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = _record(line)
        except (ValueError, AttributeError, TypeError):
            refused.append(f"{path} line {number} is cut off, or not a record of a sweep")
        else:
            found[record.name] = record
    if refused and not found:
        raise ValueError(f"{refused[0]}; remove the file")
    notes += [f"{line}; it is left out, and the files of its cell decide" for line in refused]
    return found


def _record(line: str) -> Record:
    known = {field.name for field in fields(Record)}
    return Record(**{key: value for key, value in parse_json(line).items() if key in known})


def write_records(directory: Path, records: Iterable[Record]) -> None:
    """Replaces the file at once: a reader sees the old file or the new one."""
    directory.mkdir(parents=True, exist_ok=True)
    beside = directory / f".{FILE}"
    beside.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records), encoding="utf-8")
    os.replace(beside, directory / FILE)


def current_record(cell: Cell, record: Record | None, command: str) -> Record:
    """Returns a cell's present record: by its files, else by an earlier record with the same flags and ranks."""
    fresh = pending(cell, command)
    noted = record if record is not None and (record.flags, record.ranks) == (fresh.flags, fresh.ranks) else None
    if finished(cell):
        seconds = noted.seconds if noted is not None and noted.status in ("done", "submitted") else None
        return replace(fresh, status="done", seconds=seconds, job_id=noted.job_id if noted else None)
    if noted is None or noted.status == "done":  # its files are gone, or other flags wrote them
        return fresh
    return replace(noted, command=command)


def finished(cell: Cell) -> bool:
    """Returns whether the cell's directory holds a finished run of exactly these flags."""
    run = _read_json(cell.output_dir / "run.json")
    config, total = run.get("config"), run.get("total_steps")
    if not isinstance(config, dict) or not isinstance(total, int) or run.get("world_size") != cell.ranks:
        return False
    if comparable(config) != comparable(cell.config.to_json()):
        return False
    every = cell.config.logging_steps
    wanted = {*range(every, total + 1, every), total}
    return wanted <= {record["step"] for record in steps(cell.output_dir)}


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's config without its directory, launcher, and where it resumed, because a requeued job resumes.

    Flags that are newer than the run have their defaults.
    """
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    ignored = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "max_restarts", "nproc_per_node")
    return {key: value for key, value in {**defaults, **config}.items() if key not in ignored}


def steps(directory: Path) -> list[dict[str, Any]]:
    """Returns a run's logged steps so far, without lines that are incomplete or not records."""
    path = directory / "metrics.jsonl"
    lines = record_lines(path)[:-1] if path.is_file() else []
    found = []
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and type(record.get("step")) is int and "loss" in record:
            found.append(record)
    return found


def median_step(directory: Path) -> float:
    """Returns the median seconds of a step, without the first if there are more; NaN if none is known."""
    every = (record.get("step_seconds") for record in steps(directory))
    known = [seconds for seconds in every if isinstance(seconds, int | float) and seconds]
    return statistics.median(known[1:] or known) if known else math.nan


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
