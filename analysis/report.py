"""One HTML page of all results below a directory: `python3 -m analysis report DIR [--output FILE]`."""

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import attention, largest, step
from .benchmark import Benchmark
from .records import Record, json_object, print_notes, read_lines
from .runs import Run, read_run

SHOWN = "runs, sweeps, and what benchmarks/attention.py, step.py and largest.py write"
TITLE = "Results: "  # begins the title of every page
LINE_LIMIT, FIRST_LINES = 2**20, 8  # of what is read to tell one kind of file from another
SKIPPED = re.compile(r"^(\..*|checkpoint-\d+.*|__pycache__)$")
BENCHMARKS: tuple[Benchmark[Any], ...] = (attention.BENCHMARK, step.BENCHMARK, largest.BENCHMARK)


@dataclass
class Found:
    """Results below a directory, by their kind, and notes on files that are not shown."""

    root: Path
    runs: list[Run] = field(default_factory=list)
    sweeps: dict[Path, list[Record]] = field(default_factory=dict)  # the cells of each sweep.jsonl
    benchmarks: dict[str, dict[Path, list[Record]]] = field(default_factory=dict)  # records by kind and file
    others: list[Path] = field(default_factory=list)  # of kinds that are not shown
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # on lines of files that are shown

    def name(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path != self.root else self.root.resolve().name

    @property
    def summary(self) -> str:
        benchmarks = sum(map(len, self.benchmarks.values()))
        counts = {"training run": len(self.runs), "sweep": len(self.sweeps), "benchmark file": benchmarks}
        return ", ".join(f"{count} {noun}{'s' if count > 1 else ''}" for noun, count in counts.items() if count)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="analysis report",
        usage="python3 -m analysis report RESULTS_DIR [--output FILE.html]",
        description="Gathers training runs, sweeps and benchmarks below a directory into one HTML page that needs "
        "nothing else: no network, no other file. Install with: pip install 'lightseq[report]'.",
    )
    parser.add_argument("directory", metavar="RESULTS_DIR", type=Path, help="where to look, in all folders below too")
    parser.add_argument("--output", metavar="FILE", type=Path, help="the page (default: RESULTS_DIR/report.html)")
    arguments = parser.parse_args(argv)
    try:
        from .report_page import render
    except ImportError as error:
        package = str(error.name).split(".")[0]
        if package not in ("jinja2", "plotly"):
            raise
        raise ValueError(f"the page needs {package}; pip install 'lightseq[report]'") from None
    directory = arguments.directory
    output = arguments.output or directory / "report.html"
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory; name one that holds runs or benchmarks")
    found = find(directory)
    if not found.summary:
        raise ValueError(f"nothing to show below {directory}: {reason(found.left_out)}")
    if output.is_file() and TITLE not in output.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{output} is there and was not written by analysis report; name another with --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(found, f"{TITLE}{directory.resolve().name}"), encoding="utf-8")
    notes = [f"not shown: {line}" for line in found.left_out]
    if count := len(found.others):
        notes.append(f"not shown: {count} file{'s' * (count > 1)} of other kinds than {SHOWN}; the page names them")
    print_notes([*notes, *found.notes])
    print(f"{found.summary}\n{output}")
    return 0


def reason(left_out: Sequence[str]) -> str:
    if not left_out:
        return "no run (metrics.jsonl), sweep or benchmark is there"
    more = f" (and {len(left_out) - 1} more files)" if len(left_out) > 1 else ""
    return f"{left_out[0]}{more}"


def find(root: Path) -> Found:
    """Reads everything below a directory; unreadable files are noted."""
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
    """Adds a file to its kind. Raises ValueError if it cannot be read."""
    folder = path.parent
    if path.name == "run.json":
        if not (folder / "metrics.jsonl").exists():
            found.left_out.append(f"{folder} has a run.json and no metrics.jsonl; the run has logged no step")
        return
    if path.name == "metrics.jsonl":
        found.runs.append(read_run(folder, found.name(folder)))
    elif path.name == "sweep.jsonl":
        found.sweeps[path] = not_empty(path, read_lines(path, check_cell, found.notes))
    elif (benchmark := benchmark_of(path)) is not None:
        records = not_empty(path, benchmark.read(path, found.notes))
        found.benchmarks.setdefault(benchmark.name, {})[path] = records
    else:
        found.others.append(path)


def benchmark_of(path: Path) -> Benchmark[Any] | None:
    """Returns the benchmark that wrote a file, which its first object tells."""
    first = first_object(path)
    kind = first.get("benchmark") or ("attention" if "tflops_per_gpu" in first else None)
    return next((b for b in BENCHMARKS if kind in (b.name, f"{b.name}-probe")), None)


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


def check_cell(record: Record) -> Record:
    if "name" not in record or not isinstance(record.get("flags"), dict):
        raise ValueError("is no cell of a sweep")
    return record
