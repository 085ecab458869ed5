"""Knows how runs are drawn: which figures there are, what each panel shows, and the look they share."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from .pictures import save
from .runs import Run, column, described
from .summary import GIB, settled, smoothed

# Okabe and Ito's colours, told apart by colour-blind readers too; without their yellow, too pale on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#555555"
FEW = 20
LETTERS_AN_INCH = 12  # of a figure's subtitle
STYLE: Mapping[str, object] = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.8,
    "lines.scale_dashes": False,
    "lines.dashed_pattern": (8, 4),
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "figure.dpi": 110,
    "savefig.dpi": 110,
}


@dataclass(frozen=True)
class Curve:
    """One column of the metrics, multiplied into the panel's unit; `name` tells it from its panel's other curves."""

    key: str
    scale: float = 1.0
    dash: str = "-"
    name: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes, from zero: the curves of every run that knows them.

    Where runs tend to coincide, earlier ones are drawn wider, so that they show beneath the later ones.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    coincide: bool = False


def colors(count: int) -> list[str]:
    """One colour a run, safe for colour-blind readers; past the seven, shades that differ in lightness."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    shades = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, count))
    return [matplotlib.colors.to_hex(shade) for shade in shades]


def throughput_panels(runs: Sequence[Run]) -> list[Panel]:
    return [
        Panel("Throughput", "tokens per second, all ranks together", (Curve("tokens_per_second"),)),
        Panel("Step time", "seconds per step", (Curve("step_seconds"),)),
    ]


def memory_panels(runs: Sequence[Run]) -> list[Panel]:
    device = Panel(
        "GPU memory",
        "GiB per GPU, peak",
        (
            Curve("peak_memory_allocated_bytes", 1 / GIB, "-", "allocated by tensors"),
            Curve("peak_memory_reserved_bytes", 1 / GIB, "--", "reserved by the allocator"),
        ),
        coincide=True,
    )
    host = Panel("Host memory", "GiB resident in one process", (Curve("host_rss_bytes", 1 / GIB),), coincide=True)
    return [panel for panel in (device, host) if drawn(panel, runs)] or [host]


def mfu_panels(runs: Sequence[Run]) -> list[Panel]:
    """MFU for runs on a chip whose peak is known; where some are not, the arithmetic all of them did."""
    share = Panel(
        "Model FLOPs utilization (MFU)",
        "% of the chip's dense peak (FP8 with --fp8, else bf16)",
        (Curve("mfu", 100.0),),
    )
    rate = Panel("Model arithmetic", "model TFLOP/s per GPU or CPU process", (Curve("model_tflops_per_gpu"),))
    if all(run.knows("mfu") for run in runs):
        return [share]
    return [share, rate] if any(run.knows("mfu") for run in runs) else [rate]


FIGURES: Mapping[str, Callable[[Sequence[Run]], list[Panel]]] = {
    "throughput": throughput_panels,
    "memory": memory_panels,
    "mfu": mfu_panels,
}


def drawn(panel: Panel, runs: Sequence[Run]) -> bool:
    return any(run.knows(curve.key) for run in runs for curve in panel.curves)


def draw_panel(axes: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    label(axes, panel.title, panel.unit, runs)
    if not drawn(panel, runs):
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY)
        return
    wider = min(2.0, 4.0 / max(1, len(runs) - 1))  # than the next; of many runs, none is a band
    for place, (run, color) in enumerate(zip(runs, colors(len(runs)), strict=True), 1):
        width = 1.6 + (wider * (len(runs) - place) if panel.coincide else 0.0)
        for curve in panel.curves:
            values = curve.scale * run.column(curve.key)
            axes.plot(
                run.column("step"), values, curve.dash, color=color, linewidth=width, marker=dots(values), markersize=4
            )
    fit_from_zero(axes, [curve.scale * run.column(curve.key) for run in runs for curve in panel.curves])


def draw_loss(axes: Axes, runs: Sequence[Run]) -> None:
    """Each logged loss thin under its moving mean, or alone where there are few; evaluations as diamonds."""
    label(axes, "Training loss", "cross-entropy, nats per token", runs)
    for run, color in zip(runs, colors(len(runs)), strict=True):
        steps, loss = run.column("step"), run.column("loss")
        if is_smoothed(run):
            axes.plot(steps, loss, color=color, linewidth=1.0, alpha=0.4)
            axes.plot(steps, smoothed(loss), color=color, linewidth=2.0)
        else:
            axes.plot(steps, loss, color=color, linewidth=1.6, marker=dots(loss), markersize=4)
        if run.evaluations:
            points = column(run.evaluations, "step"), column(run.evaluations, "eval_loss")
            axes.plot(*points, "D", color=color, markersize=7, markeredgecolor="white", zorder=3)


def is_smoothed(run: Run) -> bool:
    return len(run.steps) > FEW


def dots(values: np.ndarray) -> str:
    """Few points are marked: a line through one of them is invisible."""
    return "o" if np.isfinite(values).sum() <= FEW else ""


def label(axes: Axes, title: str, unit: str, runs: Sequence[Run]) -> None:
    last = max(run.column("step")[-1] for run in runs)
    axes.set_title(title, loc="left")
    axes.set(xlabel="training step", ylabel=unit, xlim=(0, 1.02 * max(last, 1)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def fit_from_zero(axes: Axes, columns: Sequence[np.ndarray]) -> None:
    """Show the usual range from zero; say what lies above it, as a first step that compiles does."""
    known = [values[np.isfinite(values)] for values in columns if np.isfinite(values).any()]
    highest = max(values.max() for values in known)
    usual = max(np.percentile(settled(values), 98) for values in known)
    top = 1.1 * highest if highest <= 1.5 * usual else 1.25 * usual
    axes.set_ylim(0, top if top > 0 else 1)
    if top >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    above = sum(int((values > top).sum()) for values in known)
    if above:
        text = f"not shown: {above} higher {'point' if above == 1 else 'points'}, up to {highest:,.3g}"
        axes.set_title(text, loc="right", fontsize=9.5, fontweight="normal", color=GREY)


def legend(figure: Figure, runs: Sequence[Run], forms: Sequence[Line2D]) -> None:
    """Below the axes, a colour a run left, what the forms of lines mean right; above, what ran, if that is one."""
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
    what = {described(run) for run in runs}
    if len(what) == 1:
        subtitle(figure, what.pop())


def subtitle(figure: Figure, text: str) -> None:
    """What a figure stands on, above it, in as many lines as it takes."""
    lines = textwrap.fill(text, int(LETTERS_AN_INCH * figure.get_figwidth()), break_on_hyphens=False)
    figure.suptitle(lines, x=0.01, ha="left", fontsize=10.5, color=GREY)


def canvas(panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8 if panels == 1 else 11, 5), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def loss_figure(runs: Sequence[Run]) -> Figure:
    figure, (axes,) = canvas(1)
    draw_loss(axes, runs)
    forms = []
    if any(is_smoothed(run) for run in runs):
        forms += [
            Line2D([], [], color=GREY, linewidth=1.0, alpha=0.6, label="as logged"),
            Line2D([], [], color=GREY, linewidth=2.0, label="smoothed (running mean)"),
        ]
    if any(run.evaluations for run in runs):
        forms.append(Line2D([], [], color=GREY, marker="D", linestyle="", markersize=7, label="evaluation"))
    legend(figure, runs, forms)
    return figure


def panel_figure(runs: Sequence[Run], panels: Sequence[Panel]) -> Figure:
    figure, every_axes = canvas(len(panels))
    for axes, panel in zip(every_axes, panels, strict=True):
        draw_panel(axes, panel, runs)
    forms = [
        Line2D([], [], color=GREY, linestyle=curve.dash, label=curve.name)
        for panel in panels
        for curve in panel.curves
        if curve.name
    ]
    legend(figure, runs, forms)
    return figure


def draw(runs: Sequence[Run], output: Path, form: str = "png") -> list[Path]:
    """Every figure of the runs as files in `output`, which is made where it is missing."""
    output.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(dict(STYLE)):
        figures = {"loss": loss_figure(runs)}
        figures |= {name: panel_figure(runs, panels(runs)) for name, panels in FIGURES.items()}
        return [path for name, figure in figures.items() for path in save(figure, output, name, form)]
