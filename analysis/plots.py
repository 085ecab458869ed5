"""Figures of an experiment: `python3 -m analysis plots --config FILE` draws the figures that a YAML file describes.

A figure shows speed, memory, MFU, training time, loss or any key of metrics.jsonl by setting or by step, with a line or
bars for each combination of the settings in `series`. `analysis/configs/` has a file for each sweep.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from .drawing import label_lines, new_figure, plain_ticks, save, span_of, subtitle, value_axis
from .metrics import METRICS, Metric, metric_of
from .output import output_dir, print_lines
from .plots_figure import draw_settings, draw_steps, number_first
from .plots_file import STEP, Plot, read_plots, short_name
from .records import print_notes, read_each
from .runs import Run, describe, past_warmup, phrase, read_run, section, settings, versions

AUTO = "auto"


class NothingToDraw(ValueError):
    """Error for a figure without runs. The other figures are still drawn."""


def main(arguments: argparse.Namespace) -> int:
    notes: list[str] = []
    file = read_plots(arguments.config)
    directories = arguments.runs or file.runs
    runs = find_runs(directories, notes)
    output = output_dir(arguments.output, "plots", directories)
    pictures: list[Path] = []
    left_out: list[str] = []
    for plot in file.plots:
        try:
            pictures.append(save(figure(plot, runs), output, plot.name))
        except NothingToDraw as reason:
            left_out.append(str(reason))
    if not pictures:
        raise ValueError(left_out[0])
    print_lines(pictures)
    timed = "; its training time is not drawn" if any(each.metric == "time" for each in file.plots) else ""
    print_notes(notes)
    for run in runs:
        print_notes(run.notes)
        if not run.is_finished:
            print_notes([f"{run.label}: only {run.last_step} of {run.info['total_steps']} steps exist{timed}"])
    for line in left_out:
        print(f"analysis: left out, {line}", file=sys.stderr)
    return 0


# ---- the runs -------------------------------------------------------------------------------------------------------


def find_runs(directories: Sequence[Path], notes: list[str]) -> list[Run]:
    """Returns the readable runs below the directories. Raises ValueError if there are none."""
    paths = sorted({path.parent for directory in directories for path in directory.rglob("metrics.jsonl")})
    runs = read_each(paths, lambda path: read_run(path, path.name), notes)
    if not runs:
        raise ValueError(
            f"no run below {', '.join(map(str, directories))}; train some, or give other directories with --runs"
        )
    return list(runs.values())


def is_one_of(value: str | None, words: Sequence[str]) -> bool:
    """Compares a setting with YAML words, where true and null stand for True and None."""
    return str(value).casefold().replace("none", "null") in [word.casefold().replace("none", "null") for word in words]


def drawable_runs(plot: Plot, metric: Metric, runs: Sequence[Run]) -> list[Run]:
    """Returns the runs that have the metric. Raises NothingToDraw if there are none."""
    if plot.x != STEP:
        found = [run for run in runs if np.isfinite(metric.point(run, "").value)]
    elif metric.key:
        found = [run for run in runs if run.has(metric.key)]
    else:
        raise ValueError(f"figure {plot.name}: {plot.metric} covers all traced steps together; set x to a setting")
    if not found:
        raise NothingToDraw(f"figure {plot.name}: no run has {plot.metric}; {metric.remedy}")
    return found


def check_settings(plot: Plot, runs: Sequence[Run]) -> None:
    """Raises ValueError for a setting that no run has, such as a misspelled one."""
    known = {short_name(key) for run in runs for key in settings(run.info)} | {STEP}
    for place, key in (("x", plot.x), *(("series", key) for key in plot.series)):
        if short_name(key) not in known:
            like = difflib.get_close_matches(short_name(key), known, n=1)
            remedy = f"did you mean {like[0]}?" if like else "give a key of run.json or of its config"
            raise ValueError(f"figure {plot.name}: {place}: no run has a setting {short_name(key)}; {remedy}")


def group_runs(plot: Plot, runs: Sequence[Run]) -> dict[tuple[str, ...], list[Run]]:
    """Returns the runs of each line by the words that name it. Raises ValueError if two runs are the same point."""
    pairs = []
    for run in runs:
        asked = section(run.info, "config")
        pairs.append((settings(run.info) | {key: AUTO for key in plot.series if asked.get(key) == AUTO}, run))
    pairs.sort(key=lambda pair: [number_first(pair[0].get(key, "")) for key in plot.series])
    varied = [key for key in plot.series if len({known.get(key) for known, _ in pairs}) > 1]
    groups: dict[tuple[str, ...], list[Run]] = {}
    for known, run in pairs:
        name = tuple(phrase(key, known.get(key)) for key in varied or plot.series)
        groups.setdefault(name or (run.label if plot.x == STEP else "all",), []).append(run)
    for name, mine in groups.items() if plot.x != STEP else ():
        places = [settings(run.info).get(plot.x) for run in mine]
        if twice := [place for place in places if places.count(place) > 1]:
            raise ValueError(
                f"figure {plot.name}: {places.count(twice[0])} runs of {', '.join(name)} have {plot.x} {twice[0]}; "
                "add the setting that differs to `series`, or select runs with `where`"
            )
    return groups


# ---- the figure -----------------------------------------------------------------------------------------------------


def figure(plot: Plot, runs: Sequence[Run]) -> Figure:
    """Draws a figure. Raises NothingToDraw if no run is left, ValueError if two runs are the same point."""
    chosen = [run for run in runs if all(is_one_of(settings(run.info).get(key), of) for key, of in plot.where.items())]
    if not chosen:
        asked = ", ".join(f"{short_name(key)} {' or '.join(words)}" for key, words in plot.where.items())
        raise NothingToDraw(f"figure {plot.name}: no run has {asked}; train some, or change `where`")
    check_settings(plot, chosen)
    metric = metric_of(plot.metric)
    if plot.metric == "memory" and not any(run.has(metric.key) for run in chosen):
        metric = METRICS["host_memory"]
    chosen = drawable_runs(plot, metric, chosen)
    groups = group_runs(plot, chosen)
    infos = [run.info for run in chosen]
    lines = [describe(infos, without=(plot.x, *plot.series)), versions(infos)]
    out = new_figure(8, 4.8)
    axes = out.subplots()
    if plot.x == STEP:
        draw_steps(axes, groups, metric)
        values = np.concatenate([past_warmup(metric.column(run)) for run in chosen])
    else:
        points = {
            name: [metric.point(run, settings(run.info).get(plot.x, "none")) for run in mine]
            for name, mine in groups.items()
        }
        draw_settings(axes, plot.x, points)
        everywhere = [point for mine in points.values() for point in mine]
        values = np.array([end for point in everywhere for end in (point.low, point.high)])
        if any(point.high > point.low for point in everywhere):
            lines.append("Medians after the warm-up; whiskers from the lowest to the highest step")
    axes.set_title(plot.title or metric.title)
    axes.set(**{"xlabel" if axes.patches else "ylabel": metric.unit})
    values = values[np.isfinite(values)]
    if metric.from_zero or metric.logarithmic or axes.patches or not values.size:
        # Not by step: a first step that compiles would always make the axis logarithmic.
        value_axis(axes, values, may_be_logarithmic=metric.logarithmic and plot.x != STEP)
    else:
        axes.set_ylim(*span_of([axes.dataLim.intervaly]))
        plain_ticks(axes.yaxis)
    if len(groups) > 1 and not axes.patches:
        label_lines(axes)
    subtitle(out, *lines)
    return out
