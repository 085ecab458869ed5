"""Draws what `python3 -m lightseq plan --attention` predicted: `python3 -m analysis cluster FILE [--output DIR]`."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from . import command
from .figures import COLORS, GREY, STYLE, subtitle
from .jsonl import read_lines
from .pictures import add_format, save
from .points import shown

MARKERS = "osD^vP*"
KEYS = ("gpus", "schedule", "head_groups", "ulysses_size", "efficiency", "fastest", "skipped")
RING_SIZE = 15

Record = Mapping[str, Any]


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis cluster",
        usage="python3 -m analysis cluster FILE [--output DIR] [--format png|svg|both]",
        description="Draws predicted efficiency of attention against the number of GPUs.",
    )
    out.add_argument("file", metavar="FILE", type=Path, help="JSONL of python3 -m lightseq plan --attention")
    out.add_argument("--output", metavar="DIR", type=Path, help="where the picture goes (default: beside the file)")
    add_format(out)
    return out


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    output = arguments.output or arguments.file.parent
    return command.run(
        [arguments.file],
        lambda notes: read(arguments.file, notes),
        lambda found, _: draw(*found, output, arguments.format),
    )


def read(path: Path, notes: list[str]) -> tuple[Record, list[Record]]:
    """The header and the points of a plan."""
    values = read_lines(path, lambda value: value, notes)
    if (
        not values
        or values[0].get("plan") != "attention"
        or not all(key in value for value in values[1:] for key in KEYS)
    ):
        raise ValueError(f"{path} is no plan of attention; make it with python3 -m lightseq plan --attention")
    if not any(value["efficiency"] for value in values[1:]):
        raise ValueError(f"{path} holds no schedule that can be had; plan more schedules or other numbers of GPUs")
    return values[0], values[1:]


def draw(about: Record, records: Sequence[Record], output: Path, form: str) -> list[Path]:
    output.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(dict(STYLE)):
        return save(figure(about, records), output, "cluster", form)


def figure(about: Record, records: Sequence[Record]) -> Figure:
    out = Figure(figsize=(10, 6), layout="constrained")
    axes = out.subplots()
    names = list(dict.fromkeys(r["schedule"] for r in records if r["efficiency"]))
    for i, name in enumerate(names):
        draw_line(axes, name, [r for r in records if r["schedule"] == name and r["efficiency"]], i)
    mark_fastest(axes, [r for r in records if r["fastest"]])
    gpus = sorted({r["gpus"] for r in records})
    if gpus[0] < about["gpus_per_host"] < gpus[-1]:
        border(axes, about["gpus_per_host"])
    axes.set_title("Attention layer, forward and backward: predicted efficiency", loc="left")
    axes.set(xlabel="GPUs that share the sequence", ylabel="share of one GPU's kernel rate that each GPU keeps")
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [str(n) for n in gpus])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.05)
    out.legend(loc="outside right center", labelspacing=0.8)
    subtitle(out, described(about))
    return out


def draw_line(axes: Axes, name: str, points: Sequence[Record], i: int) -> None:
    """Two-level schedules, which split heads inside a place, are strong."""
    ordered = sorted(points, key=lambda r: r["gpus"])
    two_levels = any(1 < r["ulysses_size"] < r["gpus"] for r in ordered)
    axes.plot(
        [r["gpus"] for r in ordered],
        [r["efficiency"] for r in ordered],
        label=name,
        color=COLORS[i % len(COLORS)],
        marker=MARKERS[i % len(MARKERS)],
        markersize=6,
        linewidth=2.8 if two_levels else 1.6,
        markeredgecolor="white",
        markeredgewidth=0.6,
        zorder=3 if two_levels else 2,
    )
    if two_levels:
        for r in ordered:
            axes.annotate(
                f"×{r['ulysses_size']}",
                (r["gpus"], r["efficiency"]),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=COLORS[i % len(COLORS)],
            )


def mark_fastest(axes: Axes, points: Sequence[Record]) -> None:
    axes.plot(
        [r["gpus"] for r in points],
        [r["efficiency"] for r in points],
        "o",
        markersize=RING_SIZE,
        markerfacecolor="none",
        markeredgecolor=GREY,
        markeredgewidth=1.2,
        label="fastest",
        zorder=4,
    )


def border(axes: Axes, gpus_per_host: int) -> None:
    axes.axvline(gpus_per_host * 2**0.5, color=GREY, linewidth=1.0, linestyle=":")
    axes.text(
        gpus_per_host * 2**0.55, 0.02, "several hosts →", color=GREY, fontsize=10, transform=axes.get_xaxis_transform()
    )


def described(about: Record) -> str:
    return (
        f"{shown(about['length'])} tokens, {about['heads']}/{about['kv_heads']} heads of {about['head_dim']}, "
        f"{about['gpus_per_host']} GPUs a host; rates: {about['rates_from']}; ×n: ranks that split heads"
    )
