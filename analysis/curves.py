"""Plots of training runs: `python3 -m analysis OUTPUT_DIR...` draws loss, throughput, memory and MFU."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from rich import box
from rich.table import Table
from rich.text import Text

from .drawing import (
    FEW,
    GIB,
    GREY,
    SMALL_TITLE,
    add_output_flag,
    colors,
    format_number,
    marker,
    new_figure,
    output_dir,
    plain_ticks,
    print_lines,
    print_rich,
    save,
    span_of,
    subtitle,
)
from .records import print_notes
from .runs import Run, column, describe, median, past_warmup, peak_memory, read_runs, smooth

RUNS_PER_TABLE = 3  # fits a narrow terminal


@dataclass(frozen=True)
class Curve:
    """A metric in its panel's unit. `name` labels it in panels with several metrics."""

    key: str
    scale: float = 1.0
    dash: str = "-"
    name: str = ""


@dataclass(frozen=True)
class Panel:
    """Axes with the same metrics of every run. With `coincide`, earlier runs have wider lines to stay visible."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    coincide: bool = False

    def is_known(self, runs: Sequence[Run]) -> bool:
        return any(run.has(curve.key) for run in runs for curve in self.curves)


THROUGHPUT = Panel("Throughput", "tokens per second, all ranks", (Curve("tokens_per_second"),))
STEP_TIME = Panel("Step time", "seconds per step", (Curve("step_seconds"),))
GPU_MEMORY = Panel(
    "GPU memory",
    "GiB per GPU, peak",
    (
        Curve("peak_memory_allocated_bytes", 1 / GIB, "-", "allocated by tensors"),
        Curve("peak_memory_reserved_bytes", 1 / GIB, "--", "reserved by the allocator"),
    ),
    coincide=True,
)
HOST_MEMORY = Panel("Host memory", "GiB resident per process", (Curve("host_rss_bytes", 1 / GIB),), coincide=True)
MFU = Panel(
    "Model FLOPs utilization (MFU)", "% of the chip's dense peak (FP8 with --fp8, else bf16)", (Curve("mfu", 100.0),)
)
TFLOPS = Panel("Model FLOP/s", "model TFLOP/s per GPU (or CPU process)", (Curve("model_tflops_per_gpu"),))
GRADIENT_NORM = Panel("Gradient norm", "before clipping", (Curve("grad_norm"),))
LEARNING_RATE = Panel("Learning rate", "", (Curve("learning_rate"),))
PANELS = (THROUGHPUT, MFU, TFLOPS, GPU_MEMORY, HOST_MEMORY, STEP_TIME, GRADIENT_NORM, LEARNING_RATE)


def main(argv: Sequence[str], commands: str) -> int:
    arguments = parser(commands).parse_args(argv)
    notes: list[str] = []
    runs = read_runs(arguments.runs, notes)
    output = output_dir(arguments.output, [run.directory for run in runs])
    pictures = [save(figure, output, name) for name, figure in figures(runs).items()]
    print_notes([*notes, *(note for run in runs for note in run.notes)])
    for run in runs:
        if text := describe(run):
            print(f"{run.label}: {text}")
    print_rich(*tables(runs))
    print_lines(pictures)
    return 0


def parser(commands: str) -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis",
        usage="python3 -m analysis OUTPUT_DIR... [--output DIR]",
        description="Draws loss, throughput, memory and MFU from the metrics.jsonl of runs.",
        epilog=commands,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("runs", metavar="OUTPUT_DIR", nargs="+", type=Path, help="the --output_dir of a training run")
    add_output_flag(out, "OUTPUT_DIR")
    return out


# ---- the table ------------------------------------------------------------------------------------------------------


def tables(runs: Sequence[Run]) -> list[Table]:
    """Returns tables of up to three runs, one column per run."""
    return [table(runs[first : first + RUNS_PER_TABLE]) for first in range(0, len(runs), RUNS_PER_TABLE)]


def table(runs: Sequence[Run]) -> Table:
    caption = "medians skip the warm-up: the first 10% of logged steps, at most 10"
    out = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    out.add_column("", no_wrap=True)
    for run in runs:
        out.add_column(Text(run.label), justify="right", overflow="fold")
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
    memory = [panel for panel in (GPU_MEMORY, HOST_MEMORY) if panel.is_known(runs)] or [HOST_MEMORY]
    has_mfu = [run.has("mfu") for run in runs]
    utilization = [MFU] * any(has_mfu) + [TFLOPS] * (not all(has_mfu))
    return {
        "loss": loss_figure(runs),
        "throughput": panel_figure(runs, [THROUGHPUT, STEP_TIME]),
        "memory": panel_figure(runs, memory),
        "mfu": panel_figure(runs, utilization),
    }


def loss_figure(runs: Sequence[Run]) -> Figure:
    """Plots each loss and its running mean, or only the loss of short runs. Evaluations are diamonds."""
    figure, (axes,) = figure_of_panels(1)
    label_axes(axes, "Training loss", "cross-entropy, nats per token", runs)
    for run, color in zip(runs, colors(len(runs)), strict=True):
        steps, loss = run.column("step"), run.column("loss")
        if len(run.steps) > FEW:
            axes.plot(steps, loss, color=color, linewidth=1.0, alpha=0.4)
            axes.plot(steps, smooth(loss), color=color, linewidth=2.0)
        else:
            axes.plot(steps, loss, color=color, linewidth=1.6, marker=marker(loss), markersize=4)
        if run.evaluations:
            points = column(run.evaluations, "step"), column(run.evaluations, "eval_loss")
            axes.plot(*points, "D", color=color, markersize=7, markeredgecolor="white", zorder=3)
    losses = [run.column("loss") for run in runs] + [column(run.evaluations, "eval_loss") for run in runs]
    axes.set_ylim(*span_of(losses))
    plain_ticks(axes.yaxis)
    forms = []
    if any(len(run.steps) > FEW for run in runs):
        forms += [
            Line2D([], [], color=GREY, linewidth=1.0, alpha=0.6, label="as logged"),
            Line2D([], [], color=GREY, linewidth=2.0, label="smoothed (running mean)"),
        ]
    if any(run.evaluations for run in runs):
        forms.append(Line2D([], [], color=GREY, marker="D", linestyle="", markersize=7, label="evaluation"))
    add_legend(figure, runs, forms)
    return figure


def panel_figure(runs: Sequence[Run], panels: Sequence[Panel]) -> Figure:
    figure, every_axes = figure_of_panels(len(panels))
    for axes, panel in zip(every_axes, panels, strict=True):
        draw_panel(axes, panel, runs)
    named = [curve for panel in panels for curve in panel.curves if curve.name]
    add_legend(figure, runs, [Line2D([], [], color=GREY, linestyle=c.dash, label=c.name) for c in named])
    return figure


def figure_of_panels(panels: int) -> tuple[Figure, list[Axes]]:
    figure = new_figure(8 if panels == 1 else 11, 5)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def draw_panel(axes: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    label_axes(axes, panel.title, panel.unit, runs)
    if not panel.is_known(runs):
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY)
        return
    wider = min(2.0, 4.0 / max(1, len(runs) - 1))  # than the next line, but not too wide for many runs
    for place, (run, color) in enumerate(zip(runs, colors(len(runs)), strict=True), 1):
        width = 1.6 + (wider * (len(runs) - place) if panel.coincide else 0.0)
        for curve in panel.curves:
            values = curve.scale * run.column(curve.key)
            look = {"color": color, "linewidth": width, "marker": marker(values), "markersize": 4}
            axes.plot(run.column("step"), values, curve.dash, **look)
    limit_to_usual(axes, [curve.scale * run.column(curve.key) for run in runs for curve in panel.curves])


def label_axes(axes: Axes, title: str, unit: str, runs: Sequence[Run]) -> None:
    axes.set_title(title, loc="left")
    axes.set(xlabel="training step", ylabel=unit, xlim=(0, 1.02 * max(1, *(run.last_step for run in runs))))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def limit_to_usual(axes: Axes, columns: Sequence[np.ndarray]) -> None:
    """Starts the axis at zero and cuts off rare high values, such as a first step that compiles. A note counts them."""
    top = usual_top(columns)
    axes.set_ylim(0, top)
    if top >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if above := sum(int((values > top).sum()) for values in columns):
        largest = max(np.nanmax(values) for values in columns if np.isfinite(values).any())
        text = f"not shown: {above} higher {'point' if above == 1 else 'points'}, up to {largest:,.3g}"
        axes.set_title(text, color=GREY, **SMALL_TITLE)


def usual_top(columns: Sequence[np.ndarray]) -> float:
    """Returns the upper axis limit: above all values, or above the usual ones if a few are much higher."""
    known = [values[np.isfinite(values)] for values in columns if np.isfinite(values).any()]
    largest = max(values.max() for values in known)
    usual = max(np.percentile(past_warmup(values), 98) for values in known)
    top = 1.1 * largest if largest <= 1.5 * usual else 1.25 * usual
    return float(top) if top > 0 else 1.0


def add_legend(figure: Figure, runs: Sequence[Run], forms: Sequence[Line2D]) -> None:
    """Adds legends of colors and line styles below the axes, and the runs' common setting above."""
    lines = [
        Line2D([], [], color=color, linewidth=3, label=run.label)
        for run, color in zip(runs, colors(len(runs)), strict=True)
    ]
    letters = (50 if forms else 90) * figure.get_figwidth() / 8
    columns = max(1, min(len(runs), int(letters / (8 + max(len(run.label) for run in runs)))))
    rows = max(math.ceil(len(runs) / columns), len(forms))
    figure.set_figheight(figure.get_figheight() + 0.22 * rows)
    figure.legend(handles=lines, loc="outside lower left", ncols=columns)
    if forms:
        figure.legend(handles=forms, loc="outside lower right")
    settings = {describe(run) for run in runs}
    if len(settings) == 1:
        subtitle(figure, settings.pop())
