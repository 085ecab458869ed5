"""Draws what benchmarks/attention.py measured and prints its table: `python3 -m analysis attention FILE...`."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from . import command
from .figures import GREY, STYLE, subtitle
from .markdown import table_lines
from .pictures import add_format, add_output, draw_each, folder_of
from .points import CEILING, OURS, Line, Point, Table, read_tables, shown
from .summary import GIB

# A colour a family, a marker each within it; lightseq's own lines are strong, the ceiling black and dashed.
FAMILIES: Mapping[str, str] = {
    "ulysses": "#E69F00",
    "torch-cp": "#009E73",
    "ring-flash-attn": "#CC79A7",
    "ringmaster": "#8C8C8C",
}
OUR_COLORS = ("#0072B2", "#D55E00", "#56B4E9")
OTHER_COLOR = "#7A5195"
MARKERS = "os^Dv<>PX"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def gib(point: Point) -> str:
    return "" if point.peak_memory_bytes is None else f"{point.peak_memory_bytes / GIB:.2f}"


def exposed(point: Point) -> str:
    return "" if point.exposed_seconds is None else f"{1e3 * point.exposed_seconds:.2f}"


def milliseconds(point: Point) -> str:
    return f"{1e3 * point.seconds[1]:,.2f}" if point.seconds else ""


def tflops(point: Point) -> str:
    return "" if point.tflops is None else number(point.tflops)


CELLS: Mapping[str, tuple[str, Callable[[Point], str]]] = {
    "tflops": ("TFLOP/s per GPU", tflops),
    "milliseconds": ("milliseconds, median", milliseconds),
    "memory": ("peak GiB per GPU", gib),
    "exposed": ("exposed communication, milliseconds", exposed),
}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis attention",
        usage="python3 -m analysis attention FILE... [--only LINE...] [--value NAME] [--output DIR] [--format FORMAT]",
        description="Draws TFLOP/s per GPU against the length from records of benchmarks/attention.py, and prints a "
        "Markdown table of them: one picture and one table for every number of heads, ranks and so on.",
    )
    out.add_argument("files", metavar="FILE", nargs="+", type=Path, help="JSONL; later ones win where points repeat")
    out.add_argument("--only", metavar="LINE", nargs="+", help="lines by their labels, in this order (default: all)")
    out.add_argument("--value", choices=CELLS, default="tflops", help="what the table shows (default: %(default)s)")
    add_output(out, "beside FILE")
    add_format(out)
    return out


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)

    def read(notes: list[str]) -> list[Table]:
        tables = read_tables(arguments.files, notes)
        return [only(table, arguments.only) for table in tables] if arguments.only else tables

    return command.run(
        arguments.files,
        read,
        lambda tables, files: draw(
            tables, folder_of(arguments.output, [file.parent for file in files]), arguments.format
        ),
        lambda tables: (line for one in tables for line in (*markdown(one, arguments.value), "", *remarks(one), "")),
    )


def only(table: Table, labels: Sequence[str]) -> Table:
    """Raises ValueError for a label that no line has."""
    by_label = {line.label: line for line in table.lines}
    for label in labels:
        if label not in by_label:
            raise ValueError(f"--only {label!r} is none of: {', '.join(by_label)}")
    return replace(table, lines=tuple(by_label[label] for label in labels))


# ---- the table ------------------------------------------------------------------------------------------------------


def markdown(table: Table, value: str) -> list[str]:
    """A row a line, a column a length."""
    unit, cell = CELLS[value]
    rows = [["", *map(shown, table.lengths)]]
    for line in table.lines:
        found = [line.at(length) for length in table.lengths]
        rows.append([line.label, *("" if p is None else "–" if p.skipped else cell(p) for p in found)])
    return [f"{unit}; {table.title}", "", *table_lines(rows)]


def remarks(table: Table) -> list[str]:
    """How steady the times were, and why points are missing."""
    measured = [(point, line) for line in table.lines for point in line.measured]
    out = []
    if measured:
        point, line = max(measured, key=lambda pair: pair[0].spread)
        out.append(f"Medians. Widest spread: {point.spread:.1%} of the median ({line.label}, {shown(point.length)}).")
    reasons: dict[tuple[str, str], list[str]] = {}
    for line in table.lines:
        for point in line.points:
            if point.skipped:
                reasons.setdefault((line.label, point.skipped), []).append(shown(point.length))
    for (label, why), lengths in reasons.items():
        where = "everywhere" if len(lengths) == len(table.lengths) else ", ".join(lengths)
        out.append(f"– {label}, {where}: {why}")
    return out


# ---- the figure -----------------------------------------------------------------------------------------------------


def draw(tables: Sequence[Table], output: Path, form: str = "png") -> list[Path]:
    return draw_each("attention", tables, figure, STYLE, output, form)


def figure(table: Table) -> Figure:
    drawn = [line for line in table.lines if line.measured]
    if drawn and len(table.lengths) == 1:
        return bars(table, drawn)
    out = Figure(figsize=(11, max(7.5, 2.5 + 0.26 * len(drawn))), layout="constrained")
    axes = out.subplots()
    for line, look in zip(drawn, looks(drawn), strict=True):
        draw_line(axes, line, look)
    axes.set_title("Attention layer, forward and backward", loc="left")
    axes.set(xlabel="tokens in the sequence", ylabel="TFLOP/s per GPU, the causal half counted")
    axes.set_xscale("log", base=2)
    axes.set_xticks(table.lengths, [shown(length) for length in table.lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    if drawn:
        out.legend(loc="outside right upper", labelspacing=0.7)
    subtitle(out, table.title)
    return out


def bars(table: Table, drawn: Sequence[Line]) -> Figure:
    """Of one length, the fastest on top; the ceiling as a line through all."""
    out = Figure(figsize=(11, 1.8 + 0.42 * len(drawn)), layout="constrained")
    axes = out.subplots()
    for line in drawn:
        (look,) = looks([line])  # one colour for all of a family
        value, (low, high) = line.measured[0].tflops or 0.0, line.measured[0].bounds
        spread = ([value - low], [high - value])
        axes.barh(line.label, value, color=look["color"], height=0.7, zorder=2)
        axes.errorbar(value, line.label, xerr=spread, fmt="none", ecolor=GREY, elinewidth=1.2, capsize=3, zorder=3)
        axes.annotate(number(value), (0, line.label), (6, 0), textcoords="offset points", va="center", color="white")
        if line.implementation == CEILING:
            axes.axvline(value, color="black", linestyle="--", linewidth=1.2, zorder=4)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title(f"Attention layer over {shown(table.lengths[0])} tokens, forward and backward", loc="left")
    axes.set(xlabel="TFLOP/s per GPU, the causal half counted")
    subtitle(out, table.title)
    return out


def looks(lines: Sequence[Line]) -> list[dict[str, object]]:
    """Every line's own colour and marker, by its family."""
    counts: dict[str, int] = {}
    out = []
    for line in lines:
        family = next((name for name in FAMILIES if line.implementation.startswith(name)), line.implementation)
        i = counts[family] = counts.get(family, -1) + 1
        out.append(look(family, i))
    return out


def look(family: str, i: int) -> dict[str, object]:
    if family == CEILING:
        return {
            "color": "black",
            "linestyle": "--",
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 4,
            "linewidth": 1.8,
        }
    if family == OURS:
        color, marker = OUR_COLORS[i % len(OUR_COLORS)], MARKERS[i // len(OUR_COLORS) % len(MARKERS)]
        return {"color": color, "marker": marker, "linewidth": 2.0, "markersize": 7, "zorder": 3}
    color = FAMILIES.get(family, OTHER_COLOR)
    return {"color": color, "marker": MARKERS[i % len(MARKERS)], "linewidth": 1.3, "markersize": 6, "zorder": 2}


def draw_line(axes: Axes, line: Line, look: Mapping[str, object]) -> None:
    """Medians, with a bar from the slowest repeat to the fastest."""
    values = [point.tflops or 0.0 for point in line.measured]
    bounds = [point.bounds for point in line.measured]
    below = [value - low for value, (low, _) in zip(values, bounds, strict=True)]
    above = [high - value for value, (_, high) in zip(values, bounds, strict=True)]
    lengths = [point.length for point in line.measured]
    axes.plot(lengths, values, label=line.label, markeredgecolor="white", markeredgewidth=0.6, **look)
    color, order = look["color"], look.get("zorder", 2)
    axes.errorbar(lengths, values, (below, above), fmt="none", ecolor=color, elinewidth=1.0, capsize=3, zorder=order)
