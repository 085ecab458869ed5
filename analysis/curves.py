"""Plots of training runs: `python3 -m analysis OUTPUT_DIR...` draws loss, throughput, memory and MFU."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.table import Table

from .drawing import (
    FEW,
    SMALL_TITLE,
    draw_curve,
    legend_below,
    new_figure,
    plain_ticks,
    save,
    span_of,
    step_axis,
    subtitle,
)
from .metrics import METRICS, Metric
from .output import GIB, format_number, number_table, output_dir, print_lines, print_tables
from .records import print_notes
from .runs import Run, column, describe, median, past_warmup, peak_memory, read_runs, smooth, versions
from .style import GREY, THIN, looks

RUNS_PER_TABLE = 3  # fits a narrow terminal


SHOWN = ("speed", "mfu", "model_tflops_per_gpu", "memory", "host_memory", "latency", "grad_norm", "learning_rate")
PANELS = tuple(map(METRICS.__getitem__, SHOWN))
THROUGHPUT, MFU, TFLOPS, GPU_MEMORY, HOST_MEMORY, STEP_TIME, *_ = PANELS
RESERVED = replace(GPU_MEMORY, key="peak_memory_reserved_bytes")  # dashed, beside the allocated memory


def main(arguments: argparse.Namespace) -> int:
    notes: list[str] = []
    runs = read_runs(arguments.runs, notes)
    output = output_dir(arguments.output, "curves", [run.directory for run in runs])
    pictures = [save(figure, output, name) for name, figure in figures(runs).items()]
    print_notes([*notes, *(note for run in runs for note in run.notes)])
    print_lines(f"{run.label}: {text}" for run in runs if (text := describe([run.info])))
    print_tables(*(table(runs[first : first + RUNS_PER_TABLE]) for first in range(0, len(runs), RUNS_PER_TABLE)))
    print_lines(pictures)
    return 0


# ---- the table ------------------------------------------------------------------------------------------------------


def table(runs: Sequence[Run]) -> Table:
    caption = "medians skip the warm-up: the first 10% of logged steps, at most 10"
    out = number_table([run.label for run in runs], caption=caption)
    columns = [table_cells(run) for run in runs]
    for name in columns[0]:
        out.add_row(name, *(cells[name] for cells in columns))
    return out


def table_cells(run: Run) -> dict[str, str]:
    loss, (memory, place) = run.column("loss"), peak_memory(run)

    def median_of(key: str, form: str, scale: float = 1.0) -> str:
        return format_number(form, scale * median(run.unprofiled(key)))

    return {
        "steps": str(run.last_step),
        "loss, first → last": f"{loss[0]:.3f} → {loss[-1]:.3f}",
        "loss, smoothed, at the end": format_number("{:.3f}", smooth(loss)[-1]),
        "tokens per second, median": median_of("tokens_per_second", "{:,.0f}"),
        "step time, median": median_of("step_seconds", "{:.3g} s"),
        "peak memory": f"{format_number('{:.2f} GiB', memory / GIB)} {place}",
        "MFU, median": median_of("mfu", "{:.1f} %", 100),
        "model TFLOP/s per GPU": median_of("model_tflops_per_gpu", "{:.3g}"),
    }


# ---- the figures ----------------------------------------------------------------------------------------------------


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Returns figures by file name. Shows MFU if a run has it, model FLOP/s if a run lacks MFU."""
    memory = [metric for metric in (GPU_MEMORY, HOST_MEMORY) if any(run.has(metric.key) for run in runs)]
    has_mfu = [run.has("mfu") for run in runs]
    utilization = [MFU] * any(has_mfu) + [TFLOPS] * (not all(has_mfu))
    return {
        "loss": loss_figure(runs),
        "throughput": panel_figure(runs, [THROUGHPUT, STEP_TIME]),
        "memory": panel_figure(runs, memory or [HOST_MEMORY]),
        "mfu": panel_figure(runs, utilization),
    }


def loss_figure(runs: Sequence[Run]) -> Figure:
    """Plots each loss and its running mean, or only the loss of short runs. Held-out loss is dashed, with diamonds."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    evaluates = any(run.evaluations for run in runs)
    label_axes(
        axes, "Training and held-out loss" if evaluates else "Training loss", "cross-entropy, nats per token", runs
    )
    diamonds = {"marker": "D", "linestyle": "--", "markersize": 7}
    for run, look in styles(runs):
        steps, loss, is_long = run.column("step"), run.column("loss"), len(run.steps) > FEW
        if is_long:
            axes.plot(steps, loss, color=look["color"], linewidth=THIN, alpha=0.4)
        draw_curve(axes, steps, smooth(loss) if is_long else loss, **look)
        if run.evaluations:
            points = column(run.evaluations, "step"), column(run.evaluations, "eval_loss")
            axes.plot(*points, color=look["color"], zorder=3, **diamonds)
    axes.set_ylim(*span_of(losses(runs)))
    plain_ticks(axes.yaxis)
    notes = ["thin: as logged, thick: running mean"] if any(len(run.steps) > FEW for run in runs) else []
    notes += ["diamonds: held out (evaluation)"] if evaluates else []
    said = "; ".join(notes)
    add_legend(figure, runs, said[:1].upper() + said[1:])
    return figure


def losses(runs: Sequence[Run]) -> list[np.ndarray]:
    """Returns the training and evaluation losses of runs."""
    return [run.column("loss") for run in runs] + [column(run.evaluations, "eval_loss") for run in runs]


def panel_figure(runs: Sequence[Run], panels: Sequence[Metric]) -> Figure:
    figure = new_figure(8 if len(panels) == 1 else 11, 5)
    for axes, metric in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_panel(axes, metric, runs)
    is_memory = GPU_MEMORY in panels
    add_legend(figure, runs, "Solid: allocated by tensors, dashed: reserved by the allocator" if is_memory else "")
    return figure


def draw_panel(axes: Axes, metric: Metric, runs: Sequence[Run]) -> None:
    label_axes(axes, metric.title, metric.unit, runs)
    if not any(run.has(metric.key) for run in runs):
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY)
        return
    drawn = {"-": metric} | ({"--": RESERVED} if metric is GPU_MEMORY else {})
    for run, look in styles(runs):
        for dash, each in drawn.items():
            draw_curve(axes, run.column("step"), each.column(run), **{**look, "linestyle": dash})
    limit_to_usual(axes, [each.column(run) for run in runs for each in drawn.values()])


def styles(runs: Sequence[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """Returns each run's look, the same in every panel."""
    places = [{"place": place, "count": len(runs)} for place in range(len(runs))]
    return [(run, look | at) for run, look, at in zip(runs, looks([[run.label] for run in runs]), places, strict=True)]


def label_axes(axes: Axes, title: str, unit: str, runs: Sequence[Run]) -> None:
    step_axis(axes)
    axes.set_title(title)
    axes.set(ylabel=unit, xlim=(0, 1.02 * max(1, *(run.last_step for run in runs))))


def limit_to_usual(axes: Axes, columns: Sequence[np.ndarray]) -> None:
    """Starts the axis at zero and cuts off rare high values, such as a first step that compiles. A note counts them."""
    top = usual_top(columns)
    axes.set_ylim(0, top)
    plain_ticks(axes.yaxis)
    if above := sum(int((values > top).sum()) for values in columns):
        largest = max(np.nanmax(values) for values in columns if np.isfinite(values).any())
        text = f"not shown: {above} higher {'point' if above == 1 else 'points'}, up to {largest:,.3g}"
        axes.set_title(text, **SMALL_TITLE)


def usual_top(columns: Sequence[np.ndarray]) -> float:
    """Returns the upper axis limit: above all values, or above the usual ones if a few are much higher."""
    known = [values[np.isfinite(values)] for values in columns if np.isfinite(values).any()]
    largest = max(values.max() for values in known)
    usual = max(np.percentile(past_warmup(values), 98) for values in known)
    top = 1.1 * largest if largest <= 1.5 * usual else 1.25 * usual
    return float(top) if top > 0 else 1.0


def add_legend(figure: Figure, runs: Sequence[Run], note: str) -> None:
    """Adds the runs below the axes, and what they have in common and a note above."""
    handles = [
        Line2D([], [], label=run.label, **{key: look[key] for key in ("color", "marker", "linestyle")})
        for run, look in styles(runs)
    ]
    legend_below(figure, handles)
    infos = [run.info for run in runs]
    subtitle(figure, describe(infos), versions(infos), note)
