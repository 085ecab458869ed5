"""Draws what a YAML file asks of the runs of an experiment: `python3 -m analysis plots --config FILE [--output DIR]`.

Speed, memory, MFU, training time and loss (or any key of metrics.jsonl) over a setting or over the steps, a line or
bars for every combination of the settings that tell runs apart. `analysis/configs/` has files for `launch/sweeps/`.
"""

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    StrMethodFormatter,
)

from .figures import GREY, STYLE, colors, dots
from .flags import shown, stands_on
from .jsonl import readable, say
from .pictures import add_format, save
from .plot_metrics import HOST_MEMORY, STEP, WHOLE, Metric, metric_of
from .plots_file import SHORT, Plot, read_plots
from .points import shown as shown_length
from .runs import Run, read_run
from .summary import settled

LOG_FROM = 8.0  # times the smallest, and an axis is logarithmic


# Differ between any two runs and say nothing of them, or follow from the flags.
NEVER = (
    *("output_dir", "overwrite_output_dir", "command", "commit", "launch", "date", "total_steps", "data_ranks"),
    *("sequence_ranks", "attention_buffer_bytes", "tokens_per_rank"),
)
LENGTHS = ("model_max_length", "tokens_per_rank")


class NothingToDraw(ValueError):
    """A figure that no run at hand is of: the others can be drawn all the same."""


@dataclass(frozen=True)
class Point:
    """A run in a figure: where it stands, what it came to, and the range of its steps."""

    x: str
    value: float
    low: float
    high: float


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis plots", usage="python3 -m analysis plots --config FILE [--output DIR] [--format png|svg|both]",
        description="Draws the figures that a YAML file asks for, from the runs below a directory.",
    )  # fmt: skip
    out.add_argument("--config", metavar="FILE", type=Path, required=True, help="such as analysis/configs/flash.yaml")
    out.add_argument("--runs", metavar="DIR", type=Path, nargs="+", help="in the place of the file's `runs`")
    out.add_argument("--output", metavar="DIR", type=Path, help="for the pictures (default: the first of the runs)")
    add_format(out)
    return out


def main(words: Sequence[str]) -> int:
    arguments = parser().parse_args(words)
    notes: list[str] = []
    try:
        file = read_plots(arguments.config)
        directories = arguments.runs or file.runs
        runs = found_runs(directories, notes)
        output = arguments.output or directories[0]
        output.mkdir(parents=True, exist_ok=True)
        pictures: list[Path] = []
        left_out: list[str] = []
        with matplotlib.rc_context(dict(STYLE)):
            for plot in file.plots:
                try:
                    pictures += save(figure(plot, runs), output, plot.name, arguments.format)
                except NothingToDraw as why:
                    left_out.append(str(why))
        if not pictures:
            raise ValueError(left_out[0])
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2
    print(*pictures, sep="\n")
    say([*notes, *(line for run in runs for line in (*run.notes, *unfinished(run)))])
    for line in left_out:
        print(f"analysis: left out, {line}", file=sys.stderr)
    return 0


def found_runs(directories: Sequence[Path], notes: list[str]) -> list[Run]:
    """Every run below the directories that can be read; raises ValueError where there is none."""
    paths = sorted({path.parent for directory in directories for path in directory.rglob("metrics.jsonl")})
    runs = readable(paths, lambda path: read_run(path, path.name), notes)
    if not runs:
        raise ValueError(f"no run below {', '.join(map(str, directories))}; make them, or name others with --runs")
    return runs


def unfinished(run: Run) -> tuple[str, ...]:
    """A line where the run has not come to its end, or has not been logged to it."""
    last, total = int(run.column(STEP)[-1]), run.about.get("total_steps")
    if not isinstance(total, int) or last >= total:
        return ()
    return (f"{run.label}: only {last} of {total} steps are there; its training time is not drawn",)


def settings(run: Run) -> Mapping[str, str]:
    """What a run was asked for and what was chosen, as words."""
    config = run.about.get("config")
    known = {**(config if isinstance(config, dict) else {}), **run.about}
    words = {key: str(value) for key, value in known.items() if isinstance(value, str | int | float) or value is None}
    if ranks := known.get("sequence_ranks"):
        words["tokens_per_rank"] = f"{known['model_max_length'] / ranks:g}" if "model_max_length" in known else "None"
    return {**words, "dtype": next((d for d in ("bf16", "fp16") if words.get(d) == "True"), "float32")}


def figure(plot: Plot, runs: Sequence[Run]) -> Figure:
    """Raises ValueError where no run is left, or two are the same point."""
    kept = [run for run in runs if all(is_one_of(settings(run).get(key), of) for key, of in plot.where.items())]
    if not kept:
        raise NothingToDraw(f"figure {plot.name}: no run is left by {dict(plot.where)}; change `where`")
    check_settings(plot, kept)
    metric = metric_of(plot.metric)
    if plot.metric == "memory" and not any(run.knows(metric.key) for run in kept):
        metric = HOST_MEMORY
    if metric.of_profile is not None:
        kept = [run for run in kept if run.profile and np.isfinite(metric.of_profile(run.profile))]
        if plot.x == STEP:
            raise ValueError(f"figure {plot.name}: {plot.metric} is of the traced steps together; let x be a setting")
        if not kept:
            raise NothingToDraw(
                f"figure {plot.name}: no run has traced steps that tell {plot.metric} (--profile_steps, on GPUs)"
            )
    elif not any(run.knows(metric.key) for run in kept):
        raise NothingToDraw(f"figure {plot.name}: no run knows {metric.key}; choose another metric")
    if plot.metric == "time" and plot.x != STEP:
        kept = [run for run in kept if not unfinished(run)]
        if not kept:
            raise NothingToDraw(f"figure {plot.name}: no run came to its last step; its time would be of a part")
    groups = grouped(plot, kept)
    out = Figure(figsize=(8, 5), layout="constrained")
    axes = out.subplots()
    axes.set_title(plot.title or metric.title, loc="left")
    axes.set_ylabel(metric.unit)
    if plot.x == STEP:
        draw_steps(axes, groups, metric)
        values = np.concatenate([settled(metric.scale * run.column(metric.key)) for run in kept])
    else:
        points = {name: [point(run, plot, metric) for run in of] for name, of in groups.items()}
        draw_over(axes, plot, points)
        values = np.array([end for of in points.values() for p in of for end in (p.low, p.high)])
    upright(axes, plot, metric, values[np.isfinite(values)])
    if text := stands_on([run.about for run in kept]):
        out.suptitle(text, x=0.01, ha="left", fontsize=10.5, color=GREY)
    if len(groups) > 1:
        out.legend(loc="outside lower left", ncols=max(1, 90 // (8 + max(map(len, groups)))))
    return out


def check_settings(plot: Plot, runs: Sequence[Run]) -> None:
    """Raises ValueError for a setting that no run has, as a misspelt one."""
    known = {short(key) for run in runs for key in settings(run)} | {STEP}
    for place, key in (("x", plot.x), *(("series", key) for key in plot.series or ())):
        if short(key) not in known:
            like = difflib.get_close_matches(short(key), known, n=1)
            remedy = f"did you mean {like[0]}?" if like else "give a key of run.json or of its config"
            raise ValueError(f"figure {plot.name}: {place}: no run has a setting {short(key)}; {remedy}")


def is_one_of(value: str | None, words: Sequence[str]) -> bool:
    """YAML has true and null where run.json gave True and None."""
    return str(value).casefold().replace("none", "null") in [word.casefold().replace("none", "null") for word in words]


def grouped(plot: Plot, runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by what tells them apart, in words."""
    every = [settings(run) for run in runs]
    series = plot.series if plot.series is not None else tuple(
        key for key in every[0] if key not in (plot.x, *NEVER) and len({each.get(key) for each in every}) > 1
    )  # fmt: skip
    telling = [key for key in series if len({each.get(key) for each in every}) > 1] or series
    groups: dict[str, list[Run]] = {}
    together = sorted(zip(every, runs, strict=True), key=lambda pair: [order(pair[0].get(key, "")) for key in series])
    for each, run in together:
        name = ", ".join(f"{short(key)} {as_read(key, each.get(key))}" for key in telling) or run.label
        groups.setdefault(name if series else "all", []).append(run)
    if plot.x == STEP:
        return groups
    for name, of in groups.items():
        places = [settings(run).get(plot.x) for run in of]
        if twice := [place for place in places if places.count(place) > 1]:
            raise ValueError(
                f"figure {plot.name}: {places.count(twice[0])} runs of {name} have {plot.x} {twice[0]}; "
                "name what tells them apart in `series`, or choose in `where`"
            )
    return groups


def as_read(key: str, value: str | None) -> str:
    """A setting's value in a legend."""
    return tick(value) if key in LENGTHS and value is not None and is_number(value) else shown(value)


def short(key: str) -> str:
    return next((word for word, name in SHORT.items() if name == key), key)


def point(run: Run, plot: Plot, metric: Metric) -> Point:
    x = settings(run).get(plot.x, "none")
    if metric.of_profile is not None:
        value = metric.of_profile(run.profile)
        return Point(x, value, value, value)
    values = metric.scale * run.column(metric.key)
    if plot.metric in WHOLE:
        value = float(WHOLE[plot.metric](run, values)) if run.knows(metric.key) else np.nan
        return Point(x, value, value, value)
    known = settled(metric.scale * run.pace(metric.key))
    if not known.size:
        return Point(x, np.nan, np.nan, np.nan)
    return Point(x, float(np.median(known)), float(known.min()), float(known.max()))


def draw_steps(axes: Axes, groups: Mapping[str, Sequence[Run]], metric: Metric) -> None:
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    left = len(groups)
    for (name, runs), color in zip(groups.items(), colors(len(groups)), strict=True):
        left -= 1  # earlier ones are wider, and show beneath later ones that coincide
        look = {"color": color, "linewidth": 1.6 + min(5.0, 0.9 * left)}
        for place, run in enumerate(runs):
            values = metric.scale * run.column(metric.key)
            label = name if place == 0 else None
            axes.plot(run.column(STEP), values, marker=dots(values), markersize=4, label=label, **look)


def draw_over(axes: Axes, plot: Plot, groups: Mapping[str, Sequence[Point]]) -> None:
    places = sorted({point.x for points in groups.values() for point in points}, key=order)
    axes.set_xlabel({"model_max_length": "tokens of a sequence", "world_size": "ranks"}.get(plot.x, short(plot.x)))
    if len(places) > 1 and all(is_number(place) for place in places):
        draw_lines(axes, places, groups)
    else:
        draw_bars(axes, places, groups)


def draw_lines(axes: Axes, places: Sequence[str], groups: Mapping[str, Sequence[Point]]) -> None:
    for (name, points), color in zip(groups.items(), colors(len(groups)), strict=True):
        points = sorted(points, key=lambda p: float(p.x))
        x, y = [float(p.x) for p in points], [p.value for p in points]
        spread = [[p.value - p.low for p in points], [p.high - p.value for p in points]]
        axes.errorbar(x, y, yerr=spread, color=color, marker="o", markersize=5, capsize=3, label=name)
    numbers = [float(place) for place in places]
    if min(numbers) > 0 and max(numbers) >= LOG_FROM * min(numbers):
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(numbers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FixedFormatter([tick(place) for place in places]))


def upright(axes: Axes, plot: Plot, metric: Metric, values: np.ndarray) -> None:
    """The vertical axis: from zero where the metric has one, logarithmic with plain numbers where values are far apart.

    Over the steps a first one that compiles would always be far from the others.
    """
    positive = values[values > 0]
    wide = positive.size == values.size > 0 and values.max() >= LOG_FROM * values.min()
    by_itself = metric.logarithmic and wide and plot.x != STEP
    if positive.size and (plot.scale == "log" or (plot.scale is None and by_itself)):
        axes.set_yscale("log")
        if axes.patches:  # bars have no foot there
            axes.set_ylim(positive.min() / 3, 2 * positive.max())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        return
    if metric.from_zero or metric.logarithmic:
        axes.set_ylim(bottom=0)
    if axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def draw_bars(axes: Axes, places: Sequence[str], groups: Mapping[str, Sequence[Point]]) -> None:
    width = 0.8 / len(groups)
    for i, ((name, points), color) in enumerate(zip(groups.items(), colors(len(groups)), strict=True)):
        at = [places.index(p.x) + (i - (len(groups) - 1) / 2) * width for p in points]
        spread = [[p.value - p.low for p in points], [p.high - p.value for p in points]]
        ranges = spread if np.nanmax(spread) > 0 else None
        values = [p.value for p in points]
        bars = axes.bar(at, values, 0.92 * width, yerr=ranges, color=color, ecolor=GREY, capsize=3, label=name)
        axes.bar_label(bars, [number(p.value) for p in points], padding=2, fontsize=9, color=GREY)
    axes.margins(y=0.1)  # room for the values above the highest
    axes.set_xticks(range(len(places)), [tick(place) if is_number(place) else shown(place) for place in places])
    axes.grid(axis="x", visible=False)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def tick(place: str) -> str:
    value = float(place)
    return shown_length(int(value)) if value.is_integer() and value >= 1024 else f"{value:g}"


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def order(word: str) -> tuple[float, str]:
    return (float(word), "") if is_number(word) else (np.inf, word)
