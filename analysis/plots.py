"""Figures of an experiment: `python3 -m analysis plots --config FILE` draws the figures that a YAML file describes.

A figure shows speed, memory, MFU, training time, loss or any key of metrics.jsonl by setting or by step, with a line or
bars for each combination of the settings in `series`. `analysis/configs/` has a file for each sweep.
"""

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from .drawing import legend_below, new_figure, save, subtitle
from .output import output_dir, print_lines
from .plots_figure import (
    HOST_MEMORY,
    Metric,
    draw_over_setting,
    draw_steps,
    is_number,
    metric_of,
    number_first,
    set_vertical_scale,
    tick,
)
from .plots_file import STEP, Plot, read_plots, short_name
from .records import print_notes, read_each
from .runs import Run, hardware_and_versions, past_warmup, read_run, section, setting_text

AUTO = "auto"
LENGTHS = ("model_max_length", "tokens_per_rank")


class NothingToDraw(ValueError):
    """Error for a figure without runs. The other figures are still drawn."""


def main(arguments: argparse.Namespace) -> int:
    notes: list[str] = []
    file = read_plots(arguments.config)
    directories = arguments.runs or file.runs
    runs = find_runs(directories, notes)
    output = output_dir(arguments.output, directories)
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


def settings(run: Run) -> Mapping[str, str]:
    """Returns a run's flags and automatic choices as strings."""
    known = {**section(run.info, "config"), **run.info}
    words = {key: str(value) for key, value in known.items() if isinstance(value, str | int | float) or value is None}
    length, ranks = known.get("model_max_length"), known.get("sequence_ranks")
    if isinstance(ranks, int) and ranks:
        words["tokens_per_rank"] = f"{length / ranks:g}" if isinstance(length, int) else "None"
    return {**words, "dtype": next((d for d in ("bf16", "fp16") if words.get(d) == "True"), "float32")}


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
    known = {short_name(key) for run in runs for key in settings(run)} | {STEP}
    for place, key in (("x", plot.x), *(("series", key) for key in plot.series)):
        if short_name(key) not in known:
            like = difflib.get_close_matches(short_name(key), known, n=1)
            remedy = f"did you mean {like[0]}?" if like else "give a key of run.json or of its config"
            raise ValueError(f"figure {plot.name}: {place}: no run has a setting {short_name(key)}; {remedy}")


def group_runs(plot: Plot, runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Returns the runs of each line by legend label. Raises ValueError if two runs are the same point."""
    pairs = [(settings(run), run) for run in runs]
    for key in plot.series if plot.x != STEP else ():
        if _auto_repeats(plot, key, pairs):
            pairs = [({**known, key: AUTO} if asked_auto(run, key) else known, run) for known, run in pairs]
    pairs.sort(key=lambda pair: [number_first(pair[0].get(key, "")) for key in plot.series])
    varied = [key for key in plot.series if len({known.get(key) for known, _ in pairs}) > 1]
    groups: dict[str, list[Run]] = {}
    for known, run in pairs:
        name = ", ".join(f"{short_name(key)} {legend_text(key, known.get(key))}" for key in varied or plot.series)
        groups.setdefault(name or (run.label if plot.x == STEP else "all"), []).append(run)
    for name, mine in groups.items() if plot.x != STEP else ():
        places = [settings(run).get(plot.x) for run in mine]
        if twice := [place for place in places if places.count(place) > 1]:
            raise ValueError(
                f"figure {plot.name}: {places.count(twice[0])} runs of {name} have {plot.x} {twice[0]}; "
                "add the setting that differs to `series`, or select runs with `where`"
            )
    return groups


def asked_auto(run: Run, key: str) -> bool:
    return section(run.info, "config").get(key) == AUTO


def _auto_repeats(plot: Plot, key: str, pairs: Sequence[tuple[Mapping[str, str], Run]]) -> bool:
    """Returns whether `auto` chose for one run what another run of the same point asked for by name."""
    points: dict[tuple[str | None, ...], set[bool]] = {}
    for known, run in pairs:
        point = tuple(known.get(name) for name in (plot.x, *plot.series))
        points.setdefault(point, set()).add(asked_auto(run, key))
    return any(len(asked) > 1 for asked in points.values())


def legend_text(key: str, value: str | None) -> str:
    return tick(value) if key in LENGTHS and value is not None and is_number(value) else setting_text(key, value)


# ---- the figure -----------------------------------------------------------------------------------------------------


def figure(plot: Plot, runs: Sequence[Run]) -> Figure:
    """Draws a figure. Raises NothingToDraw if no run is left, ValueError if two runs are the same point."""
    chosen = [run for run in runs if all(is_one_of(settings(run).get(key), of) for key, of in plot.where.items())]
    if not chosen:
        asked = ", ".join(f"{short_name(key)} {' or '.join(words)}" for key, words in plot.where.items())
        raise NothingToDraw(f"figure {plot.name}: no run has {asked}; train some, or change `where`")
    check_settings(plot, chosen)
    metric = metric_of(plot.metric)
    if plot.metric == "memory" and not any(run.has(metric.key) for run in chosen):
        metric = HOST_MEMORY
    chosen = drawable_runs(plot, metric, chosen)
    groups = group_runs(plot, chosen)
    out = new_figure(8, 4.8)
    axes = out.subplots()
    axes.set(title=plot.title or metric.title, ylabel=metric.unit)
    if plot.x == STEP:
        draw_steps(axes, groups, metric)
        values = np.concatenate([past_warmup(metric.column(run)) for run in chosen])
    else:
        points = {
            name: [metric.point(run, settings(run).get(plot.x, "none")) for run in mine]
            for name, mine in groups.items()
        }
        draw_over_setting(axes, plot.x, points)
        values = np.array([end for mine in points.values() for p in mine for end in (p.low, p.high)])
    set_vertical_scale(axes, plot, metric, values[np.isfinite(values)])
    if text := hardware_and_versions([run.info for run in chosen]):
        subtitle(out, text)
    if len(groups) > 1:
        legend_below(out)
    return out
