"""Accounts for every millisecond of profiled steps by name: `python3 -m analysis profile OUTPUT_DIR [--rank N]`."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightseq.profiling.host_trace import host_breakdown
from lightseq.profiling.trace import IDLE, PHASES, StepBreakdown, device_spans, gpu_breakdown, read_trace
from lightseq.profiling.traffic import transfers_by_kind

from . import traffic
from .pictures import add_format, save
from .runs import read_about
from .summary import GIB
from .timeline import figure

GPU_CAPTION = "ms a step; hidden: beside something of another row"
CPU_CAPTION = "ms a step of the thread that trains, with its waits for other ranks in exchange and collectives"
PYTHON = "Python between operators"


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis profile",
        usage="python3 -m analysis profile OUTPUT_DIR [--rank N] [--kernels N] [--timeline]",
        description="Where the time of the steps went that --profile_steps traced: every millisecond once, under the "
        "name of what the device was busy with; communication where it was not hidden. On a CPU by operator.",
    )
    out.add_argument("run", metavar="OUTPUT_DIR", type=Path, help="a run's directory, or a trace")
    out.add_argument("--rank", type=int, default=0, help="whose trace (default: 0)")
    out.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="list the N kernels (CPU: operators) that took longest"
    )
    out.add_argument("--timeline", action="store_true", help="draw what runs beside a layer's attention, too")
    out.add_argument("--output", metavar="DIR", type=Path, help="where the picture goes (default: beside the trace)")
    add_format(out)
    return out


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    path = arguments.run
    if path.is_dir():
        path = path / "profile" / f"rank{arguments.rank}.json.gz"
    try:
        events = read_trace(path)
        spans, moved = device_spans(events)[0], transfers_by_kind(events)
        if arguments.timeline and not spans:
            raise ValueError(f"{path} holds nothing that ran on a GPU, which --timeline draws; leave it out")
        account = gpu_breakdown(events) if spans else host_breakdown(events)
        picture = figure(spans, str(path)) if arguments.timeline else None
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(table(account))
    if moved:
        console.print(traffic.table(moved, account.steps))
    if arguments.kernels:
        console.print(kernel_table(account, arguments.kernels))
    if about := memory_of(path):
        console.print(memory_table(about))
    if picture is not None:
        output = arguments.output or path.parent
        output.mkdir(parents=True, exist_ok=True)
        for written in save(picture, output, "timeline", arguments.format):
            print(written)
    return 0


def table(account: StepBreakdown) -> Table:
    """A row a kind, the longest first. What one thread of a CPU does hides nothing."""
    hides = bool(account.hidden)
    out = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,  # it fits 80 columns
        title=f"{account.step_ms:.1f} ms a step, mean of {account.steps}",
        caption=GPU_CAPTION if hides else CPU_CAPTION,
    )
    found = {phase for _, phase in account.spent}
    phases = [phase for phase in (*PHASES, "") if phase in found] if found != {""} else []  # older traces have none
    headings = [phase or "between" for phase in phases]
    out.add_column("", no_wrap=True)
    for heading in (*headings, "total", "%", *(["hidden"] if hides else []), "calls"):
        out.add_column(heading, justify="right", no_wrap=True)
    totals: dict[str, float] = defaultdict(float)
    for (kind, _), ms in account.spent.items():
        totals[kind] += ms
    for kind, ms in _longest(totals):
        cells = [f"{account.spent.get((kind, phase), 0):.1f}" for phase in phases]
        hidden = [f"{account.hidden[kind]:.1f}" if account.hidden[kind] > 0.05 else ""] if hides else []
        launches = f"{account.launches[kind] / account.steps:.0f}" if kind != IDLE else ""
        name = kind if hides or kind != IDLE else PYTHON
        out.add_row(name, *cells, f"{ms:.1f}", f"{100 * ms / account.step_ms:.1f}", *hidden, launches)
    sums = [f"{sum(ms for (_, p), ms in account.spent.items() if p == phase):.1f}" for phase in phases]
    out.add_section()
    out.add_row("all", *sums, f"{sum(totals.values()):.1f}", *[""] * (2 + hides))
    return out


def memory_of(trace: Path) -> Mapping[str, Any]:
    """What the summary beside a trace says of memory; nothing where there is none."""
    path = trace.with_name(f"summary-{trace.name.partition('.')[0]}.json")
    about = read_about(path).get("memory")
    return about if isinstance(about, dict) else {}


def memory_table(about: Mapping[str, Any]) -> Table:
    """The peak by what it was for; what the process holds of the device, and what all processes hold."""
    out = Table(box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0), title="memory of the GPU, GiB")
    out.add_column("", no_wrap=True)
    out.add_column("", justify="right", no_wrap=True)
    for name, size in _longest(about.get("parts", {})):
        out.add_row(name.replace("_", " "), f"{size / GIB:.2f}")
    out.add_section()
    for key, name in (("peak", "peak of tensors"), ("own", "held by this process"), ("all", "held by all processes")):
        if key in about:
            out.add_row(name, f"{about[key] / GIB:.2f}")
    return out


def kernel_table(account: StepBreakdown, count: int) -> Table:
    out = Table(box=box.SIMPLE_HEAD)
    out.add_column("ms a step", justify="right", min_width=9)
    out.add_column("kernel or operator", overflow="ellipsis", no_wrap=True, max_width=64)
    for name, ms in _longest(account.names)[:count]:
        out.add_row(f"{ms:.2f}", name)
    return out


def _longest(times: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])
