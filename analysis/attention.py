"""Attention benchmark: `python3 -m analysis attention FILE...` plots TFLOP/s by length and prints a table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightseq.config.lengths import format_tokens

from .benchmark import Benchmark
from .drawing import (
    GREY,
    length_axis,
    new_figure,
    subtitle,
)
from .records import Record, read_lines

CEILING = "single-gpu"  # the kernel on one GPU, an upper bound for every implementation
OURS = "lightseq"
SETTING = (
    "heads",
    "kv_heads",
    "head_dim",
    "dtype",
    "batch",
    "world",
    "documents",
    "window",
    "device",
)  # must be equal in one table
KEYS = (
    *("implementation", "request", "kernel", "transport", "length", "skipped", "seconds_min", "seconds_median"),
    *("seconds_max", "tflops_per_gpu"),
)
# A color per family, a marker per line. lightseq has the widest lines; the ceiling is black and dashed.
FAMILY_COLORS: Mapping[str, str] = {
    "ulysses": "#E69F00",
    "torch-cp": "#009E73",
    "ring-flash-attn": "#CC79A7",
    "ringmaster": "#8C8C8C",
}
OUR_COLORS = ("#0072B2", "#D55E00", "#56B4E9")
OTHER_COLOR = "#7A5195"
MARKERS = "os^Dv<>PX"


@dataclass(frozen=True)
class LengthTable:
    """Records by label and length that share one setting. The ceiling comes first, then the fastest."""

    setting: Mapping[str, Any]
    lines: Mapping[str, Mapping[int, Record]]

    @property
    def lengths(self) -> list[int]:
        return sorted({length for line in self.lines.values() for length in line})

    @property
    def measured(self) -> dict[str, list[Record]]:
        """Measured records by label, without skipped ones."""
        found = {label: [r for r in line.values() if r["tflops_per_gpu"]] for label, line in self.lines.items()}
        return {label: records for label, records in found.items() if records}

    @property
    def title(self) -> str:
        s = self.setting
        batch = f", batch {s['batch']}" if s["batch"] > 1 else ""
        documents = f", documents {s['documents']}" if s["documents"] else ""
        window = f", window {s['window']:,}" if s["window"] else ""
        heads = f"{s['heads']}/{s['kv_heads']} heads of {s['head_dim']}"
        return f"{s['world']} × {s['device']}, {heads}, {s['dtype']}{batch}{documents}{window}"


# ---- the records ----------------------------------------------------------------------------------------------------


def read_points(path: Path, notes: list[str]) -> list[Record]:
    """Returns the records of a file, each with the device of the header before it."""
    device = "unknown device"

    def parse(record: Record) -> Record | None:
        nonlocal device
        if "benchmark" in record:
            device = str(record.get("hardware", {}).get("device", device))
            return None
        if "relative_error_out" in record:
            raise ValueError("has errors instead of times; give files written without --check")
        documents, window = record.get("documents") or "", record.get("window") or 0  # "": one document; 0: no window
        record = {**record, "device": device, "documents": documents, "window": window}
        if missing := [key for key in (*SETTING, *KEYS) if key not in record]:
            raise ValueError(f"has no {missing[0]!r}; it should be a record of benchmarks/attention.py")
        return record

    return [record for record in read_lines(path, parse, notes) if record]


def setting_of(record: Record) -> tuple[Any, ...]:
    return tuple(record[key] for key in SETTING)


def tables_of(records: Iterable[Record]) -> list[LengthTable]:
    """Returns one table per setting. Later records replace earlier ones of the same line and length.

    Every table has the ceiling, which was measured on one GPU.
    """
    records = list(records)
    settings = {setting_of(record) for record in records if record["implementation"] != CEILING}
    tables = []
    for setting in sorted(settings or set(map(setting_of, records))):
        named = dict(zip(SETTING, setting, strict=True))
        alone = setting_of({**named, "world": 1})
        mine = [
            record
            for record in records
            if setting_of(record) == (alone if record["implementation"] == CEILING else setting)
        ]
        tables.append(LengthTable(named, numbered_lines(mine)))
    return tables


def numbered_lines(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """Returns records by label and length: the ceiling first, then by speed at the longest length."""
    lines: dict[str, dict[int, Record]] = {}
    for record in sorted(records, key=lambda record: int(record["length"])):
        lines.setdefault(label_of(record, records), {})[record["length"]] = record
    lengths = sorted({record["length"] for record in records}, reverse=True)

    def slowness(label: str) -> tuple[bool, list[float]]:
        line = lines[label]
        rates = [line[length]["tflops_per_gpu"] or 0.0 if length in line else 0.0 for length in lengths]
        return implementation(line) != CEILING, [-rate for rate in rates]

    return {label: lines[label] for label in sorted(lines, key=slowness)}


def implementation(line: Mapping[int, Record]) -> str:
    return str(next(iter(line.values()))["implementation"])


def label_of(record: Record, records: Sequence[Record]) -> str:
    """Returns a line's label. It names kernel and transport only if the implementation ran with several."""
    name, kernel, transport = (record[key] for key in ("implementation", "kernel", "transport"))
    if name not in (CEILING, OURS):
        return str(name)
    mine = [other for other in records if other["implementation"] == name and not other["skipped"]]
    several_kernels = len({other["kernel"] for other in mine}) > 1
    several_transports = len({other["transport"] for other in mine}) > 1
    words = ["one GPU" if name == CEILING else f"{OURS} {record['request']}"]
    words += [kernel] if kernel and (name == CEILING or several_kernels) else []
    words += [transport] if transport and several_transports else []
    return ", ".join(words)


def spread(record: Record) -> float:
    """Returns the highest minus the lowest time, as a share of the median."""
    return float((record["seconds_max"] - record["seconds_min"]) / record["seconds_median"])


def error_bars(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Returns the distances of the slowest and fastest repeats from the medians, in TFLOP/s."""
    below = [r["tflops_per_gpu"] * (1 - r["seconds_median"] / r["seconds_max"]) for r in records]
    above = [r["tflops_per_gpu"] * (r["seconds_median"] / r["seconds_min"] - 1) for r in records]
    return below, above


# ---- the table ------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def table_rows(table: LengthTable) -> list[list[str]]:
    """Returns a header row and a row per line, with a column per length."""

    def cell(record: Record | None) -> str:
        if record is None:
            return ""
        return "–" if record["skipped"] else number(record["tflops_per_gpu"])

    rows = [["TFLOP/s per GPU", *map(format_tokens, table.lengths)]]
    return rows + [[label, *(cell(line.get(n)) for n in table.lengths)] for label, line in table.lines.items()]


def remarks(table: LengthTable) -> list[str]:
    """Returns the spread of the times and the reasons for missing points."""
    measured = [(record, label) for label, records in table.measured.items() for record in records]
    out = []
    if measured:
        record, label = max(measured, key=lambda pair: spread(pair[0]))
        where = f"{label}, {format_tokens(record['length'])}"
        out.append(f"Medians. Widest spread: {spread(record):.1%} of the median ({where}).")
    reasons: dict[tuple[str, str], list[str]] = {}
    for label, line in table.lines.items():
        for length, record in line.items():
            if record["skipped"]:
                reasons.setdefault((label, record["skipped"]), []).append(format_tokens(length))
    for (label, reason), lengths in reasons.items():
        where = "everywhere" if len(lengths) == len(table.lengths) else ", ".join(lengths)
        out.append(f"– {label}, {where}: {reason}")
    return out


# ---- the figure -----------------------------------------------------------------------------------------------------


def figure(table: LengthTable) -> Figure | None:
    """Plots TFLOP/s by length, as bars if there is one length. Returns None if nothing was measured."""
    lines = table.measured
    if not lines:
        return None
    if len(table.lengths) == 1:
        return bar_figure(table)
    out = new_figure(11, max(7.5, 2.5 + 0.26 * len(lines)))
    axes = out.subplots()
    for (label, records), look in zip(lines.items(), looks(lines.values()), strict=True):
        draw_line(axes, label, records, look)
    axes.set_title("Attention layer, forward and backward", loc="left")
    axes.set_ylabel("TFLOP/s per GPU, counting the causal half")
    length_axis(axes, table.lengths)
    axes.set_ylim(bottom=0)
    out.legend(loc="outside right upper", labelspacing=0.7)
    subtitle(out, table.title)
    return out


def draw_line(axes: Axes, label: str, records: Sequence[Record], look: Mapping[str, Any]) -> None:
    """Plots medians with error bars from the slowest to the fastest repeat."""
    lengths, rates = [r["length"] for r in records], [r["tflops_per_gpu"] for r in records]
    axes.plot(lengths, rates, label=label, markeredgecolor="white", markeredgewidth=0.6, **look)
    bars = {"fmt": "none", "ecolor": look["color"], "elinewidth": 1.0, "capsize": 3, "zorder": look.get("zorder", 2)}
    axes.errorbar(lengths, rates, error_bars(records), **bars)


def bar_figure(table: LengthTable) -> Figure:
    """Plots one length as bars, the fastest at the top, with the ceiling as a line across all bars."""
    out = new_figure(11, 1.8 + 0.42 * len(table.measured))
    axes = out.subplots()
    for label, records in table.measured.items():
        (look,) = looks([records])  # all bars of a family share a color
        rate = records[0]["tflops_per_gpu"]
        axes.barh(label, rate, color=look["color"], height=0.7, zorder=2)
        bars = {"fmt": "none", "ecolor": GREY, "elinewidth": 1.2, "capsize": 3, "zorder": 3}
        axes.errorbar(rate, label, xerr=error_bars(records), **bars)
        axes.annotate(number(rate), (0, label), (6, 0), textcoords="offset points", va="center", color="white")
        if records[0]["implementation"] == CEILING:
            axes.axvline(rate, color="black", linestyle="--", linewidth=1.2, zorder=4)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title(f"Attention layer over {format_tokens(table.lengths[0])} tokens, forward and backward", loc="left")
    axes.set(xlabel="TFLOP/s per GPU, counting the causal half")
    subtitle(out, table.title)
    return out


def looks(lines: Iterable[Sequence[Record]]) -> list[dict[str, Any]]:
    """Returns color, marker and width of each line by its family and its place in the family."""
    counts: dict[str, int] = {}
    out: list[dict[str, Any]] = []
    for records in lines:
        name = str(records[0]["implementation"])
        family = next((family for family in FAMILY_COLORS if name.startswith(family)), name)
        i = counts[family] = counts.get(family, -1) + 1
        marker = MARKERS[i % len(MARKERS)]
        if family == CEILING:
            out.append({"color": "black", "linestyle": "--", "marker": marker, "markersize": 4, "linewidth": 1.8})
        elif family == OURS:
            color, marker = OUR_COLORS[i % len(OUR_COLORS)], MARKERS[i // len(OUR_COLORS) % len(MARKERS)]
            out.append({"color": color, "marker": marker, "linewidth": 2.0, "markersize": 7, "zorder": 3})
        else:
            color = FAMILY_COLORS.get(family, OTHER_COLOR)
            out.append({"color": color, "marker": marker, "linewidth": 1.3, "markersize": 6, "zorder": 2})
    return out


BENCHMARK = Benchmark(
    name="attention",
    title="Attention layer, forward and backward",
    description="Plots TFLOP/s per GPU by length",
    read=read_points,
    group=tables_of,
    figure=figure,
    table_rows=table_rows,
    remarks=remarks,
)
