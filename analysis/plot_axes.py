"""Knows how a figure that a YAML file asks for is drawn: curves over steps, lines or bars over a setting, its axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
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

from .figures import GREY, colors, dots
from .flags import shown_setting
from .plot_metrics import STEP, Metric
from .plots_file import Plot, short
from .points import shown as shown_length
from .runs import Run

LOG_FROM = 8.0  # times the smallest, and an axis is logarithmic


@dataclass(frozen=True)
class Point:
    """A run in a figure: where it stands, what it came to, and the range of its steps."""

    x: str
    value: float
    low: float
    high: float


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
        draw_bars(axes, plot.x, places, groups)


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
        highest = float(values.max()) if values.size else 0.0
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.05 * highest))  # points that lie close are not at the edge
    if axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def draw_bars(axes: Axes, setting: str, places: Sequence[str], groups: Mapping[str, Sequence[Point]]) -> None:
    width = 0.8 / len(groups)
    for i, ((name, points), color) in enumerate(zip(groups.items(), colors(len(groups)), strict=True)):
        at = [places.index(p.x) + (i - (len(groups) - 1) / 2) * width for p in points]
        spread = [[p.value - p.low for p in points], [p.high - p.value for p in points]]
        ranges = spread if np.nanmax(spread) > 0 else None
        values = [p.value for p in points]
        bars = axes.bar(at, values, 0.92 * width, yerr=ranges, color=color, ecolor=GREY, capsize=3, label=name)
        axes.bar_label(bars, [number(p.value) for p in points], padding=2, fontsize=9, color=GREY)
    axes.margins(y=0.1)  # room for the values above the highest
    axes.set_xticks(
        range(len(places)), [tick(place) if is_number(place) else shown_setting(setting, place) for place in places]
    )
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
