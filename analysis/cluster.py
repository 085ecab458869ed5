"""Plot of predicted attention: `python3 -m analysis cluster FILE` reads `lightseq plan --attention` output."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lightseq.config.lengths import format_tokens

from .drawing import (
    COLORS,
    GREY,
    add_output_flag,
    log2_axis,
    new_figure,
    output_dir,
    save,
    subtitle,
)
from .records import Record, print_notes, read_lines

MARKERS = "osD^vP*"
KEYS = ("gpus", "schedule", "head_groups", "ulysses_size", "efficiency", "fastest", "skipped")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="analysis cluster",
        usage="python3 -m analysis cluster FILE [--output DIR]",
        description="Plots the predicted efficiency of attention by number of GPUs.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="JSONL from python3 -m lightseq plan --attention")
    add_output_flag(parser, "beside FILE")
    arguments = parser.parse_args(argv)
    notes: list[str] = []
    header, records = read(arguments.file, notes)
    output = output_dir(arguments.output, [arguments.file.parent])
    picture = save(figure(header, records), output, "cluster")
    print_notes(notes)
    print(picture)
    return 0


def read(path: Path, notes: list[str]) -> tuple[Record, list[Record]]:
    """Returns the header and the points of an attention plan."""
    header, *points = read_lines(path, lambda record: record, notes) or [{}]
    if header.get("plan") != "attention" or not all(key in point for point in points for key in KEYS):
        raise ValueError(f"{path} is not an attention plan; write it with python3 -m lightseq plan --attention")
    if not any(point["efficiency"] for point in points):
        raise ValueError(f"{path} has no possible schedule; plan more schedules or other numbers of GPUs")
    return header, points


def figure(header: Record, records: Sequence[Record]) -> Figure:
    out = new_figure(10, 6)
    axes = out.subplots()
    names = dict.fromkeys(r["schedule"] for r in records if r["efficiency"])
    for i, name in enumerate(names):
        points = [r for r in records if r["schedule"] == name and r["efficiency"]]
        draw_schedule(axes, sorted(points, key=lambda r: r["gpus"]), COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)])
    fastest = [r for r in records if r["fastest"]]
    ring = {"markersize": 15, "markerfacecolor": "none", "markeredgecolor": GREY, "markeredgewidth": 1.2, "zorder": 4}
    axes.plot([r["gpus"] for r in fastest], [r["efficiency"] for r in fastest], "o", label="fastest", **ring)
    gpus, host = sorted({r["gpus"] for r in records}), header["gpus_per_host"]
    if gpus[0] < host < gpus[-1]:
        axes.axvline(host * 2**0.5, color=GREY, linewidth=1.0, linestyle=":")
        text = {"color": GREY, "fontsize": 10, "transform": axes.get_xaxis_transform()}
        axes.text(host * 2**0.55, 0.02, "several hosts →", **text)
    axes.set_title("Attention layer, forward and backward: predicted efficiency", loc="left")
    axes.set(xlabel="GPUs per sequence", ylabel="efficiency: share of the kernel rate on one GPU")
    log2_axis(axes, gpus, [str(n) for n in gpus])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.05)
    out.legend(loc="outside right center", labelspacing=0.8)
    subtitle(
        out,
        f"{format_tokens(header['length'])} tokens, {header['heads']}/{header['kv_heads']} heads of "
        f"{header['head_dim']}, {host} GPUs per host; rates: {header['rates_from']}; ×n: heads split over n ranks",
    )
    return out


def draw_schedule(axes: Axes, points: Sequence[Record], color: str, marker: str) -> None:
    """Plots a schedule. Two-level schedules have a wide line, labeled with the ranks that split heads."""
    two_levels = any(1 < r["ulysses_size"] < r["gpus"] for r in points)
    axes.plot(
        [r["gpus"] for r in points],
        [r["efficiency"] for r in points],
        label=points[0]["schedule"],
        color=color,
        marker=marker,
        markersize=6,
        linewidth=2.8 if two_levels else 1.6,
        markeredgecolor="white",
        markeredgewidth=0.6,
        zorder=3 if two_levels else 2,
    )
    for r in points if two_levels else ():
        above = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 9, "color": color}
        axes.annotate(f"×{r['ulysses_size']}", (r["gpus"], r["efficiency"]), **above)
