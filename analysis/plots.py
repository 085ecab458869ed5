"""Draws what a YAML file asks of the runs of an experiment: `python3 -m analysis plots --config FILE [--output DIR]`.

Speed, memory, MFU, training time and loss (or any key of metrics.jsonl) over a setting or over the steps, a line or
bars for every combination of the settings that tell runs apart. `analysis/configs/` has files for `launch/sweeps/`.
"""

import argparse
import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from .figures import STYLE, subtitle
from .flags import shown_setting, stands_on
from .jsonl import readable, say
from .pictures import COMPARED, add_format, folder_of, save
from .plot_axes import Point, draw_over, draw_steps, is_number, order, tick, upright
from .plot_metrics import HOST_MEMORY, STEP, WHOLE, Metric, metric_of
from .plots_file import Plot, read_plots, short
from .runs import Run, read_run
from .summary import settled

HEIGHT = 5.0  # inches, with room for three rows of a legend
ROW_HEIGHT = 0.22
# Differ between any two runs and say nothing of them, or follow from the flags.
NEVER = (
    *("output_dir", "overwrite_output_dir", "command", "commit", "launch", "date", "total_steps", "data_ranks"),
    *("first_step", "sequence_ranks", "attention_buffer_bytes", "tokens_per_rank"),
)
LENGTHS = ("model_max_length", "tokens_per_rank")


class NothingToDraw(ValueError):
    """A figure that no run at hand is of: the others can be drawn all the same."""


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis plots",
        usage="python3 -m analysis plots --config FILE [--runs DIR...] [--output DIR] [--format png|svg|both]",
        description="Draws the figures that a YAML file asks for, from the runs below a directory.",
    )
    out.add_argument("--config", metavar="FILE", type=Path, required=True, help="such as analysis/configs/flash.yaml")
    out.add_argument("--runs", metavar="DIR", type=Path, nargs="+", help="in the place of the file's `runs`")
    out.add_argument(
        "--output", metavar="DIR", type=Path, help=f"for the pictures (default: DIR; of several, {COMPARED})"
    )
    add_format(out)
    return out


def main(words: Sequence[str]) -> int:
    arguments = parser().parse_args(words)
    notes: list[str] = []
    try:
        file = read_plots(arguments.config)
        directories = arguments.runs or file.runs
        runs = found_runs(directories, notes)
        output = folder_of(arguments.output, directories)
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
    timed = "; its training time is not drawn" if any(over_a_setting(plot, "time") for plot in file.plots) else ""
    say([*notes, *(line for run in runs for line in (*run.notes, *(f"{line}{timed}" for line in unfinished(run))))])
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


def over_a_setting(plot: Plot, metric: str) -> bool:
    return plot.metric == metric and plot.x != STEP


def unfinished(run: Run) -> tuple[str, ...]:
    """A line where the run has not come to its end, or has not been logged to it."""
    last, total = int(run.column(STEP)[-1]), run.about.get("total_steps")
    if not isinstance(total, int) or last >= total:
        return ()
    return (f"{run.label}: only {last} of {total} steps are there",)


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
        asked = ", ".join(f"{short(key)} {' or '.join(words)}" for key, words in plot.where.items())
        raise NothingToDraw(f"figure {plot.name}: no run has {asked}; make some, or change `where`")
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
    if over_a_setting(plot, "time"):
        kept = [run for run in kept if not unfinished(run)]
        if not kept:
            raise NothingToDraw(f"figure {plot.name}: no run came to its last step; its time would be of a part")
    groups = grouped(plot, kept)
    out = Figure(figsize=(8, HEIGHT), layout="constrained")
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
        subtitle(out, text)
    if len(groups) > 1:
        columns = max(1, 90 // (8 + max(map(len, groups))))
        out.set_figheight(HEIGHT + ROW_HEIGHT * max(0, math.ceil(len(groups) / columns) - 3))
        out.legend(loc="outside lower left", ncols=columns)
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
    return tick(value) if key in LENGTHS and value is not None and is_number(value) else shown_setting(key, value)


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
