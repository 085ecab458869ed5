"""Draws the largest models that fit, as benchmarks/largest.py found them: `python3 -m analysis largest FILE...`."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from . import command
from .figures import COLORS, GREY, STYLE, colors, subtitle
from .flags import stands_on
from .jsonl import read_lines, readable
from .markdown import table_lines
from .pictures import add_format, add_output, draw_each, folder_of
from .points import shown
from .summary import GIB

WHAT = {"weights": "weights alone", "training": "whole steps"}
STRATEGIES = {"all": "all dimensions grow", "n_layers": "layers alone grow"}
BILLION = 1e9
KEYS = ("what", "strategy", "tokens", "flags", "gpus", "gpu_memory", "hardware")
FOUND = ("largest", "parameters", "peak_bytes", "too_large", "too_many_parameters", "reason")
TRIED = ("length", "fits", "peak_bytes")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    device: str


@dataclass(frozen=True)
class Limits:
    """What was found on one kind of device, and searches that have not come to their end, by their probes."""

    setting: Setting
    found: tuple[Record, ...]
    unfinished: tuple[tuple[Record, ...], ...]


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis largest",
        usage="python3 -m analysis largest FILE... [--output DIR] [--format png|svg|both]",
        description="Draws the parameters of the largest models that fit, from records of benchmarks/largest.py, and "
        "prints a Markdown table of them.",
    )
    out.add_argument("files", metavar="FILE", nargs="+", type=Path, help="JSONL; later ones win where searches repeat")
    add_output(out, "beside FILE")
    add_format(out)
    return out


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)

    def draw(limits: Sequence[Limits], files: Sequence[Path]) -> list[Path]:
        output = folder_of(arguments.output, [file.parent for file in files])
        drawn = [one for one in limits if one.found]
        return draw_each("largest", drawn, figure, STYLE, output, arguments.format) if drawn else []

    return command.run(
        arguments.files,
        lambda notes: read(arguments.files, notes),
        draw,
        lambda limits: (line for one in limits for line in (*markdown(one), "", *remarks(one), "")),
    )


# ---- the records ----------------------------------------------------------------------------------------------------


def read(paths: Sequence[Path], notes: list[str]) -> list[Limits]:
    """By device. A search made twice counts as it ended last."""
    files = readable(paths, lambda path: read_lines(path, record_of, notes), notes)
    searches: dict[str, dict[tuple[str, ...], list[Record]]] = {}
    for record in (record for file in files for record in file):
        device = str(record["hardware"].get("device", "unknown device"))
        searches.setdefault(device, {}).setdefault(key(record), []).append(record)
    if not searches:
        raise ValueError(f"no records in {', '.join(map(str, paths))}; the search has tried nothing yet")
    return [limits(device, list(mine.values())) for device, mine in searches.items()]


def record_of(value: Record) -> Record:
    kind = value.get("benchmark")
    if kind not in ("largest", "largest-probe") or not isinstance(value.get("hardware"), dict):
        raise ValueError("is not a record of benchmarks/largest.py")
    if missing := [name for name in (*KEYS, *(FOUND if kind == "largest" else TRIED)) if name not in value]:
        raise ValueError(f"has no {missing[0]!r}; it should be a record of benchmarks/largest.py")
    return value


def key(record: Record) -> tuple[str, ...]:
    return tuple(str(record[name]) for name in KEYS[:-1])


def limits(device: str, searches: Sequence[Sequence[Record]]) -> Limits:
    ends = [[r for r in records if r["benchmark"] == "largest"] for records in searches]
    unfinished = tuple(tuple(records) for records, end in zip(searches, ends, strict=True) if not end)
    found = sorted((end[-1] for end in ends if end), key=lambda r: (r["what"] != "weights", series(r), r["gpus"]))
    return Limits(Setting(device), tuple(found), unfinished)


def series(record: Record) -> str:
    """All but the number of GPUs, in words."""
    words = [WHAT.get(record["what"], str(record["what"]))]
    words += [STRATEGIES.get(record["strategy"], str(record["strategy"]))]
    words += [f"{shown(record['tokens'])} tokens"] if record["tokens"] else []
    words += [f"{record['gpu_memory']:g} GiB a GPU"] if record["gpu_memory"] else []
    return ", ".join((*words, *filter(None, [record["flags"]])))


def gpus(record: Record) -> str:
    return f"{record['gpus']} GPU{'s' if record['gpus'] > 1 else ''}"


# ---- the table ------------------------------------------------------------------------------------------------------


def markdown(one: Limits) -> list[str]:
    rows = [["largest model that fits", "GPUs", "scale", "parameters", "GiB a GPU", "too large"]]
    for r in one.found:
        peak = f"{r['peak_bytes'] / GIB:.1f}" if r["peak_bytes"] else ""
        above = f"{r['too_many_parameters']:,}" if r["too_many_parameters"] else ""
        rows.append([series(r), str(r["gpus"]), str(r["largest"]), f"{r['parameters']:,}", peak, above])
    return [one.setting.device, "", *table_lines(rows)]


def remarks(one: Limits) -> list[str]:
    """Why the next size did not fit, and searches that were cut off."""
    reasons = dict.fromkeys(str(r["reason"]) for r in one.found if r["too_large"])
    out = [f"What is too large: {'; '.join(reasons)}."] if reasons else []
    for probes in one.unfinished:
        fits = max((r for r in probes if r["fits"]), key=lambda r: r["length"], default=None)
        said = f"scale {fits['length']} fits" if fits else "nothing that was tried fits"
        size = f" in {fits['peak_bytes'] / GIB:.1f} GiB a GPU" if fits and fits["peak_bytes"] else ""
        out.append(f"{series(probes[0])}, {gpus(probes[0])}: not searched to the end; {said}{size} so far.")
    return out


# ---- the figure -----------------------------------------------------------------------------------------------------


def figure(one: Limits) -> Figure:
    """Over GPUs where there are several numbers of them, else a bar a search."""
    out = Figure(figsize=(9, 5), layout="constrained")
    axes = out.subplots()
    if len({r["gpus"] for r in one.found}) > 1:
        draw_lines(axes, one.found)
        out.legend(loc="outside lower left")
    else:
        out.set_figheight(1.5 + 0.9 * len(one.found))
        draw_bars(axes, one.found)
    axes.set_title("The largest model that fits", loc="left")
    subtitle(out, stands_on([{**r, "world_size": r["gpus"]} for r in one.found]))
    return out


def draw_lines(axes: Axes, found: Sequence[Record]) -> None:
    """A line a search; what is too large as a short line above each point."""
    names = list(dict.fromkeys(series(r) for r in found))
    for name, color in zip(names, colors(len(names)), strict=True):
        mine = [r for r in found if series(r) == name]
        x, y = [r["gpus"] for r in mine], [r["parameters"] / BILLION for r in mine]
        above = [
            (r["too_many_parameters"] or r["parameters"]) / BILLION - size for r, size in zip(mine, y, strict=True)
        ]
        axes.errorbar(x, y, yerr=([0] * len(y), above), color=color, marker="o", capsize=4, label=name)
    counts = sorted({r["gpus"] for r in found})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.xaxis.set_major_formatter(FixedFormatter([str(count) for count in counts]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="GPUs", ylabel="billions of parameters\n(above each: too large)")
    axes.set_ylim(bottom=0)


def draw_bars(axes: Axes, found: Sequence[Record]) -> None:
    """What fits, and pale up to what is too large: the limit lies between."""
    for place, r in enumerate(found):
        size, above = r["parameters"] / BILLION, (r["too_many_parameters"] or r["parameters"]) / BILLION
        axes.barh(place, above, 0.6, color=COLORS[0], alpha=0.25)
        axes.barh(place, size, 0.6, color=COLORS[0])
        peak = f"\n{r['peak_bytes'] / GIB:.0f} GiB a GPU" if r["peak_bytes"] else ""
        text = f"{size:,.3g} billion{peak}"
        axes.annotate(text, (above, place), (6, 0), textcoords="offset points", va="center", fontsize=9.5, color=GREY)
    axes.set_yticks(range(len(found)), [series(r).replace(", ", "\n") for r in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(0, 1.2 * axes.dataLim.x1)  # with room for what stands beside the longest
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("billions of parameters; pale: up to the next size, which is too large")
