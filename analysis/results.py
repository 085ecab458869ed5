"""Results below a directory, found by the kinds of their files."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import attention, evaluate, largest, step
from .benchmark import Benchmark
from .evaluate import Evaluation
from .records import Record, check_cell, json_object, read_lines
from .runs import Run, read_run

LINE_LIMIT, FIRST_LINES = 2**20, 8  # characters and lines read to tell kinds of files apart
SKIPPED = re.compile(r"^(\..*|checkpoint-\d+.*|__pycache__)$")
CHECK_KEYS = ("check", "status", "detail")
PLAN_KEYS = (
    *("command", "config", "hardware", "fits", "peak_bytes", "usable_gpu_bytes", "host_bytes", "step_seconds"),
    *("tokens_per_second", "mfu", "longest_length", "schedule", "to_fit", "faster", "notes"),
)
BENCHMARKS: tuple[Benchmark, ...] = (attention.BENCHMARK, step.BENCHMARK, largest.BENCHMARK)


@dataclass
class Found:
    """Results below a directory by kind, and notes on files that are not shown."""

    root: Path
    runs: list[Run] = field(default_factory=list)
    sweeps: dict[Path, list[Record]] = field(default_factory=dict)  # the cells of each sweep.jsonl
    benchmarks: dict[str, dict[Path, list[Record]]] = field(default_factory=dict)  # records by kind and file
    evaluations: list[Evaluation] = field(default_factory=list)
    verifications: dict[Path, list[Record]] = field(default_factory=dict)  # a header and the checks of each file
    plans: dict[Path, list[Record]] = field(default_factory=dict)
    others: list[Path] = field(default_factory=list)  # files of other kinds, not shown
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # about lines that were skipped in files that are shown

    def name(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path != self.root else self.root.resolve().name

    @property
    def summary(self) -> str:
        counts = {
            "training run": len(self.runs),
            "sweep": len(self.sweeps),
            "benchmark file": sum(map(len, self.benchmarks.values())),
            "evaluation": len(self.evaluations),
            "verification": len(self.verifications),
            "plan": sum(map(len, self.plans.values())),
        }
        return ", ".join(f"{count} {noun}{'s' if count > 1 else ''}" for noun, count in counts.items() if count)


def find(root: Path) -> Found:
    """Reads all results below a directory and notes the files that cannot be read."""
    found = Found(root)
    for path in result_files(root):
        try:
            add(path, found)
        except (ValueError, OSError, KeyError, TypeError) as error:
            found.left_out.append(str(error) if isinstance(error, ValueError | OSError) else f"{path}: {error!r}")
    found.notes += [note for run in found.runs for note in run.notes]
    return found


def result_files(directory: Path) -> Iterator[Path]:
    """Yields JSONL files and run.json, except those in hidden folders and checkpoints."""
    for path in sorted(directory.iterdir()):
        if SKIPPED.match(path.name):
            continue
        if path.is_dir():
            yield from result_files(path) if not path.is_symlink() else ()
        elif path.suffix == ".jsonl" or path.name == "run.json":
            yield path


def add(path: Path, found: Found) -> None:
    """Adds a file to the results of its kind. Raises ValueError if it cannot be read."""
    folder = path.parent
    if path.name == "run.json":
        if not (folder / "metrics.jsonl").exists():
            found.left_out.append(f"{folder} has a run.json but no metrics.jsonl; the run has logged no step")
        return
    if path.name == "metrics.jsonl":
        found.runs.append(read_run(folder, found.name(folder)))
    elif path.name == "sweep.jsonl":
        found.sweeps[path] = not_empty(path, read_lines(path, check_cell, found.notes))
    elif path.name == "evaluation.jsonl":
        found.evaluations.append(evaluate.read(folder, found.name(folder), found.notes))
    elif path.name == "verify.jsonl":
        found.verifications[path] = read_verification(path, found.notes)
    elif first_object(path).get("plan") == "training":
        found.plans[path] = not_empty(path, read_lines(path, check_plan, found.notes))
    elif (benchmark := benchmark_of(first_object(path))) is not None:
        records = not_empty(path, benchmark.read(path, found.notes))
        found.benchmarks.setdefault(benchmark.name, {})[path] = records
    else:
        found.others.append(path)


def benchmark_of(first: Record) -> Benchmark | None:
    """Returns the benchmark that wrote a file, judging by the file's first object."""
    kind = first.get("benchmark", "attention" if "tflops_per_gpu" in first else "")
    return next((each for each in BENCHMARKS if kind in each.keys), None)


def first_object(path: Path) -> Record:
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [file.readline(LINE_LIMIT) for _ in range(FIRST_LINES)]
    for line in lines:
        with suppress(ValueError):
            return json_object(line)
    return {}


def not_empty(path: Path, records: list[Any]) -> list[Any]:
    if not records:
        raise ValueError(f"{path} has no records")
    return records


def read_verification(path: Path, notes: list[str]) -> list[Record]:
    """Returns the header and the checks that `lightseq verify` wrote."""
    header, *checks = not_empty(path, read_lines(path, lambda record: record, notes))
    if "passed" not in header or not all(key in row for row in checks for key in CHECK_KEYS):
        raise ValueError(f"{path} is not a verification; write it with lightseq verify --output_dir DIR")
    return [header, *checks]


def check_plan(record: Record) -> Record:
    if record.get("plan") != "training":
        raise ValueError("is not a plan of a training run")
    if missing := [key for key in PLAN_KEYS if key not in record]:
        raise ValueError(f"has no {missing[0]!r}; write it again with lightseq plan --output FILE")
    return record
