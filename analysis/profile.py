"""Time of profiled steps: `python3 -m analysis profile OUTPUT_DIR` prints tables."""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.table import Table

from lightseq.profiling.trace import PHASES, read_trace, summary

from .output import GIB, number_table, print_tables
from .records import Record
from .runs import read_json_object, section

LARGE = 2**20  # bytes; smaller transfers have no meaningful rate


def main(arguments: argparse.Namespace) -> int:
    path = arguments.run
    if path.is_dir():
        path = path / "profile" / f"rank{arguments.rank}.json.gz"
    profile = summary(read_trace(path))
    written = read_json_object(path.with_name(f"summary-{path.name.partition('.')[0]}.json"))
    print_tables(time_table(profile))
    if profile["moved"]:
        print_tables(traffic_table(profile["moved"]))
    if memory := section(written, "memory"):
        print_tables(memory_table(memory))
    return 0


def time_table(profile: Record) -> Table:
    """Returns a table with a row per kind of work, the longest first."""
    spent, hidden = profile["spent"], profile["hidden_ms"]
    times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # by kind and phase
    for part in spent:
        times[part["kind"]][part["phase"]] += part["ms"]
    found = {part["phase"] for part in spent}
    phases = [phase for phase in (*PHASES, "") if phase in found] if found != {""} else []  # some traces have none
    out = number_table(
        [*(phase or "between" for phase in phases), "total", "%", *(["hidden"] if hidden else [])],
        pad_edge=False,
        padding=0,  # to fit 80 columns
        title=f"{profile['step_ms']:.1f} ms per step, mean of {profile['steps']}",
        caption="ms per step" + ("; hidden: at the same time as another row" if hidden else ""),
    )
    totals = {kind: sum(of_phase.values()) for kind, of_phase in times.items()}
    for kind, ms in longest_first(totals):
        cells = [f"{times[kind][phase]:.1f}" for phase in phases]
        beside = [f"{hidden[kind]:.1f}" if hidden.get(kind, 0.0) > 0.05 else ""] if hidden else []
        share = f"{100 * ms / profile['step_ms']:.1f}"
        out.add_row(kind, *cells, f"{ms:.1f}", share, *beside)
    sums = [f"{sum(of_phase[phase] for of_phase in times.values()):.1f}" for phase in phases]
    out.add_section()
    out.add_row("all", *sums, f"{sum(totals.values()):.1f}")
    return out


def traffic_table(moved: Sequence[Record]) -> Table:
    """Returns a table with a row per kind of collective or copy. Small transfers are launch-bound and have no rate."""
    out = number_table(
        ("calls", "MiB per step", "MiB each", "GB/s", "highest"),
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title="data transfers",
        caption="GB/s include waiting for the last rank; the highest is closest to the link rate",
    )
    for kind in moved:
        size = kind["bytes"] / kind["calls"]
        numbers = [kind["bytes"] / 2**20, size / 2**20]
        numbers += [kind["gb_per_second"], kind["highest_gb_per_second"]] if size >= LARGE else []
        out.add_row(kind["kind"], f"{kind['calls']:.0f}", *(f"{x:,.0f}" if x >= 1 else f"{x:.2f}" for x in numbers))
    return out


def memory_table(memory: Record) -> Table:
    """Returns a table of peak memory by purpose, and of memory held by this process and by all processes."""
    out = number_table(("GiB",), pad_edge=False, title="GPU memory, GiB", show_header=False)
    for name, size in longest_first(memory.get("parts", {})):
        out.add_row(name.replace("_", " "), f"{size / GIB:.2f}")
    out.add_section()
    for key, name in (("peak", "peak of tensors"), ("own", "held by this process"), ("all", "held by all processes")):
        if key in memory:
            out.add_row(name, f"{memory[key] / GIB:.2f}")
    return out


def longest_first(times: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])
