"""Writes one self-contained page of all results below a directory: `python3 -m analysis report DIR [--output FILE]`."""

import argparse
import html
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from .blocks import Section, embedded
from .jsonl import json_object, read_lines, say
from .largest import read as read_largest
from .points import read_tables
from .report_benchmarks import WORST, attention_section, errors_section, largest_section, step_section
from .report_runs import read_cells, runs_section, sweep_section
from .runs import Run, read_run
from .step_points import read_comparisons

PAGE = Path(__file__).resolve().parent / "page"
SCRIPTS = ("dom.js", "axes.js", "lines.js", "bars.js", "table.js", "page.js")
LINE_LIMIT, FIRST_LINES = 2**20, 8  # of what is read to tell one kind of file from another
SHOWN = "runs, sweeps, and what benchmarks/attention.py, step.py and largest.py write"
TITLE = "Results: "  # begins that of every page
PASSED_OVER = re.compile(r"^(\..*|checkpoint-\d+.*|__pycache__)$")


@dataclass
class Found:
    """Files by what they hold, and a word on each that is not shown."""

    runs: list[Run] = field(default_factory=list)
    sweeps: list[Path] = field(default_factory=list)
    attention: list[Path] = field(default_factory=list)
    errors: list[Path] = field(default_factory=list)
    steps: list[Path] = field(default_factory=list)
    largest: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)  # of kinds that are not shown
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # on lines of the others


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis report",
        usage="python3 -m analysis report RESULTS_DIR [--output FILE.html]",
        description="Gathers training runs, sweeps and benchmarks below a directory into one HTML page that needs "
        "nothing else: no network, no other file.",
    )
    out.add_argument("directory", metavar="RESULTS_DIR", type=Path, help="where to look, in all folders below too")
    out.add_argument("--output", metavar="FILE", type=Path, help="the page (default: RESULTS_DIR/report.html)")
    return out


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    output = arguments.output or arguments.directory / "report.html"
    try:
        if not arguments.directory.is_dir():
            raise ValueError(f"{arguments.directory} is no directory; name one that holds runs or benchmarks")
        found = find(arguments.directory)
        sections = sections_of(found, arguments.directory)
        if not sections:
            raise ValueError(nothing_below(arguments.directory, found.left_out))
        check_replaceable(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(
            page(title_of(arguments.directory), sections, [*found.left_out, *found.notes]), encoding="utf-8"
        )
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2
    say([*(f"not shown: {reason}" for reason in found.left_out), *found.notes])
    say(note for run in found.runs for note in run.notes)  # which stand beside the table of runs, too
    print(f"{summary(found)}\n{output}")
    return 0


def check_replaceable(output: Path) -> None:
    """Raises ValueError for a file that is there and is not such a page."""
    if output.is_file() and TITLE not in output.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{output} is there and was not written by analysis report; name another with --output")


def nothing_below(directory: Path, left_out: Sequence[str]) -> str:
    if not left_out:
        return f"nothing to show below {directory}: no run (metrics.jsonl), sweep or benchmark is there"
    more = f" (and {len(left_out) - 1} more files)" if len(left_out) > 1 else ""
    return f"nothing to show below {directory}: {left_out[0]}{more}"


# ---- what there is --------------------------------------------------------------------------------------------------


def find(directory: Path) -> Found:
    found = Found()
    for path in files(directory):
        try:
            file(path, directory, found)
        except (ValueError, OSError, KeyError, TypeError) as error:
            found.left_out.append(str(error) if isinstance(error, ValueError | OSError) else f"{path}: {error!r}")
    if found.others:
        names = ", ".join(str(path.relative_to(directory)) for path in found.others)
        are = "is" if len(found.others) == 1 else "are"
        found.left_out.append(f"{names} {are} of another kind than this page shows ({SHOWN})")
    return found


def files(directory: Path) -> Iterator[Path]:
    """All JSONL, and what says that there was a run. What is hidden or inside checkpoints is passed over."""
    for path in sorted(directory.iterdir()):
        if PASSED_OVER.match(path.name):
            continue
        if path.is_dir():
            yield from files(path) if not path.is_symlink() else ()
        elif path.suffix == ".jsonl" or path.name == "run.json":
            yield path


def file(path: Path, root: Path, found: Found) -> None:
    """Puts the file where it belongs, once it is known to be readable. Raises ValueError where it is not."""
    if path.name == "run.json":
        if not (path.parent / "metrics.jsonl").exists():
            found.left_out.append(f"{path.parent} has a run.json and no metrics.jsonl; the run has logged no step")
        return
    first, second = first_objects(path)
    if path.name == "metrics.jsonl":
        label = str(path.parent.relative_to(root)) if path.parent != root else root.resolve().name
        found.runs.append(read_run(path.parent, label))
    elif path.name == "sweep.jsonl":
        read_cells(path, found.notes)
        found.sweeps.append(path)
    elif first.get("benchmark") == "step":
        read_comparisons([path], found.notes)
        found.steps.append(path)
    elif first.get("benchmark") in ("largest", "largest-probe"):
        read_largest([path], found.notes)
        found.largest.append(path)
    elif WORST in first or WORST in second:
        read_lines(path, dict, found.notes)
        found.errors.append(path)
    elif first.get("benchmark") == "attention" or "tflops_per_gpu" in first:
        read_tables([path], found.notes)
        found.attention.append(path)
    else:
        found.others.append(path)


def first_objects(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The first two of the first lines that are objects; what kind of file it is shows there."""
    with path.open(encoding="utf-8", errors="replace") as opened:
        lines = [opened.readline(LINE_LIMIT) for _ in range(FIRST_LINES)]
    found: list[Mapping[str, Any]] = []
    for line in lines:
        with suppress(ValueError):
            found.append(json_object(line))
    return (*found, {}, {})[:2]


def sections_of(found: Found, root: Path) -> list[Section]:
    out = []
    if found.runs:
        out.append(runs_section(found.runs))
    for i, path in enumerate(found.sweeps):
        below = {run.directory.name: run for run in found.runs if path.parent in run.directory.parents}
        name = str(path.parent.relative_to(root)) if path.parent != root else root.resolve().name
        out.append(sweep_section(name, read_cells(path, []), below, i))
    kinds: tuple[tuple[list[Path], Callable[[Sequence[Path], Path], Section]], ...] = (
        (found.attention, attention_section),
        (found.errors, errors_section),
        (found.steps, step_section),
        (found.largest, largest_section),
    )
    return out + [make(paths, root) for paths, make in kinds if paths]


def summary(found: Found) -> str:
    counts = (
        (len(found.runs), "training run"),
        (len(found.sweeps), "sweep"),
        (len(found.attention + found.errors + found.steps + found.largest), "benchmark file"),
    )
    return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count)


# ---- the page -------------------------------------------------------------------------------------------------------


def title_of(directory: Path) -> str:
    return f"{TITLE}{directory.resolve().name}"


def page(title: str, sections: Sequence[Section], left_out: Sequence[str]) -> str:
    """The whole page. Everything that was measured is in one JSON object, which the script draws as text."""
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    parts = {
        "TITLE": html.escape(title),
        "CONTENTS": html.escape(f"Written {made}, of: {', '.join(section.title for section in sections)}."),
        "STYLE": (PAGE / "page.css").read_text(encoding="utf-8"),
        "SCRIPT": "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "DATA": embedded({"title": title, "made": made, "sections": sections, "left_out": left_out}),
    }
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"@(TITLE|CONTENTS|STYLE|SCRIPT|DATA)@", lambda match: parts[match[1]], template)
