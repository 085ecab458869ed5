"""Time of profiled steps: `python3 -m analysis profile OUTPUT_DIR` prints tables."""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rich import box
from rich.table import Table

from lightseq.config.parser import whole_number
from lightseq.profiling.trace import (
    PHASES,
    StepBreakdown,
    device_spans,
    gpu_breakdown,
    phase_breakdown,
    read_trace,
)
from lightseq.profiling.transfers import Transfers, transfers_by_kind

from .drawing import GIB, print_rich
from .records import Record
from .runs import read_json_object, section

LARGE = 2**20  # bytes; smaller transfers have no meaningful rate


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="analysis profile",
        usage="python3 -m analysis profile OUTPUT_DIR [--rank N] [--kernels N]",
        description="Shows where the time of steps traced with --profile_steps went. Each millisecond counts once: as "
        "computation, or as communication that no kernel hides. Traces of a CPU are split by phase.",
    )
    parser.add_argument("run", metavar="OUTPUT_DIR", type=Path, help="directory of a run, or a trace file")
    parser.add_argument("--rank", type=whole_number, default=0, help="rank whose trace is read (default: 0)")
    parser.add_argument("--kernels", type=whole_number, default=0, metavar="N", help="list the N slowest kernels")
    arguments = parser.parse_args(argv)
    path = arguments.run
    if path.is_dir():
        path = path / "profile" / f"rank{arguments.rank}.json.gz"
    events = read_trace(path)
    spans, moved = device_spans(events)[0], transfers_by_kind(events)
    account = gpu_breakdown(events) if spans else phase_breakdown(events)
    print_rich(time_table(account))
    if moved:
        print_rich(traffic_table(moved, account.steps))
    if arguments.kernels:
        print_rich(kernel_table(account, arguments.kernels))
    summary = read_json_object(path.with_name(f"summary-{path.name.partition('.')[0]}.json"))
    if memory := section(summary, "memory"):
        print_rich(memory_table(memory))
    return 0


def new_table(headings: Sequence[str], **options: object) -> Table:
    """Returns an empty table with a column of names and columns of numbers."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left", **options)  # type: ignore[arg-type]
    out.add_column("", no_wrap=True)
    for heading in headings:
        out.add_column(heading, justify="right", no_wrap=True)
    return out


def time_table(account: StepBreakdown) -> Table:
    """Returns a table with a row per kind of work, the longest first."""
    hides = bool(account.hidden)
    found = {phase for _, phase in account.spent}
    phases = [phase for phase in (*PHASES, "") if phase in found] if found != {""} else []  # some traces have none
    caption = "ms per step" + ("; hidden: at the same time as another row" if hides else "")
    out = new_table(
        [*(phase or "between" for phase in phases), "total", "%", *(["hidden"] if hides else []), "calls"],
        padding=0,  # to fit 80 columns
        title=f"{account.step_ms:.1f} ms per step, mean of {account.steps}",
        caption=caption,
    )
    totals: dict[str, float] = defaultdict(float)
    for (kind, _), ms in account.spent.items():
        totals[kind] += ms
    for kind, ms in longest_first(totals):
        cells = [f"{account.spent.get((kind, phase), 0):.1f}" for phase in phases]
        hidden = [f"{account.hidden[kind]:.1f}" if account.hidden[kind] > 0.05 else ""] if hides else []
        calls = f"{account.launches[kind] / account.steps:.0f}" if account.launches[kind] else ""
        out.add_row(kind, *cells, f"{ms:.1f}", f"{100 * ms / account.step_ms:.1f}", *hidden, calls)
    sums = [f"{sum(ms for (_, p), ms in account.spent.items() if p == phase):.1f}" for phase in phases]
    out.add_section()
    out.add_row("all", *sums, f"{sum(totals.values()):.1f}", *[""] * (2 + hides))
    return out


def traffic_table(kinds: Mapping[str, Transfers], steps: int) -> Table:
    """Returns a table with a row per kind of collective or copy. Small transfers are launch-bound and have no rate."""
    out = new_table(
        ("calls", "MiB per step", "MiB each", "GB/s", "highest"),
        padding=(0, 1, 0, 0),
        title="data transfers",
        caption="GB/s include waiting for the last rank; the highest is closest to the link rate",
    )
    for name, kind in kinds.items():
        size, rates = median(kind.sizes), kind.rates
        numbers = [sum(kind.sizes) / steps / 2**20, size / 2**20]
        numbers += [median(rates) / 1e9, max(rates) / 1e9] if size >= LARGE else []
        out.add_row(name, f"{len(kind.sizes) / steps:.0f}", *(f"{x:,.0f}" if x >= 1 else f"{x:.2f}" for x in numbers))
    return out


def memory_table(memory: Record) -> Table:
    """Returns a table of peak memory by purpose, and of memory held by this process and by all processes."""
    out = Table(box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0), title="GPU memory, GiB")
    out.add_column("", no_wrap=True)
    out.add_column("", justify="right", no_wrap=True)
    for name, size in longest_first(memory.get("parts", {})):
        out.add_row(name.replace("_", " "), f"{size / GIB:.2f}")
    out.add_section()
    for key, name in (("peak", "peak of tensors"), ("own", "held by this process"), ("all", "held by all processes")):
        if key in memory:
            out.add_row(name, f"{memory[key] / GIB:.2f}")
    return out


def kernel_table(account: StepBreakdown, count: int) -> Table:
    out = Table(box=box.SIMPLE_HEAD)
    out.add_column("ms per step", justify="right", min_width=9)
    out.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=64)
    for name, ms in longest_first(account.names)[:count]:
        out.add_row(f"{ms:.2f}", name)
    return out


def longest_first(times: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])
