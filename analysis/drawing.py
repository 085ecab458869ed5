"""Style of all figures, and the axes, curves, bars and legends that several of them share."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from lightseq.config.lengths import format_tokens

# Okabe and Ito's palette for color-blind readers, without yellow, which is too pale on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#555555"
SMALLEST_SPAN = 1e-3  # of the value; a loss that barely changes fills no axis with its last digits
FEW = 20  # lines with at most this many points have markers
THINNEST = 1.6  # points; width of a line above all others
LOG_SCALE = " (log scale)"
LOG_FROM, BARS_LOG_FROM = 8.0, 20.0  # highest over lowest value from which an axis is logarithmic
SMALL_TITLE: Mapping[str, Any] = {"loc": "right", "fontsize": 9.5, "fontweight": "normal"}
LETTERS_PER_INCH = 11.5  # in a legend or a subtitle
matplotlib.rcParams.update(
    {
        "font.size": 11,
        "axes.titlesize": 13,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "grid.color": "#DDDDDD",
        "grid.linewidth": 0.8,
        "lines.scale_dashes": False,
        "lines.dashed_pattern": (8, 4),
        "legend.frameon": False,
        "legend.fontsize": 10.5,
        "figure.dpi": 110,
    }
)


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, output: Path, name: str) -> Path:
    """Saves a figure as PNG in a directory and returns its path."""
    for axes in figure.axes:
        name_log_scales(axes)
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name}.png"
    figure.savefig(path)
    return path


def name_log_scales(axes: Axes) -> None:
    """Adds to the labels of logarithmic axes that they are."""
    for axis in (axes.xaxis, axes.yaxis):
        label = axis.get_label_text()
        if axis.get_scale() == "log" and label and not label.endswith(LOG_SCALE):
            axis.set_label_text(label + LOG_SCALE)


def colors(count: int) -> list[str]:
    """Returns `count` colors. More than seven come from a sequential colormap."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    return [matplotlib.colors.to_hex(shade) for shade in matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, count))]


# ---- text around the axes -------------------------------------------------------------------------------------------


def subtitle(figure: Figure, text: str) -> None:
    """Writes a grey line above the axes, wrapped to the figure's width."""
    lines = textwrap.fill(text, int(LETTERS_PER_INCH * figure.get_figwidth()), break_on_hyphens=False)
    figure.suptitle(lines, x=0.01, ha="left", fontsize=10.5, color=GREY)


def legend_below(figure: Figure, handles: Sequence[Artist] | None = None, share: float = 1.0) -> None:
    """Adds a legend below the axes, in as many columns as fit into a share of the width, and makes room for its rows.

    The default are the handles of the first axes.
    """
    handles = handles or figure.axes[0].get_legend_handles_labels()[0]
    letters = share * LETTERS_PER_INCH * figure.get_figwidth()
    columns = max(1, int(letters / (8 + max(len(str(handle.get_label())) for handle in handles))))
    figure.set_figheight(figure.get_figheight() + 0.22 * math.ceil(len(handles) / columns))
    figure.legend(handles=handles, loc="outside lower left", ncols=min(columns, len(handles)))


# ---- axes -----------------------------------------------------------------------------------------------------------


def step_axis(axes: Axes) -> None:
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [format_tokens(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens in the sequence")


def value_axis(axes: Axes, values: np.ndarray, may_be_logarithmic: bool) -> None:
    """Starts the vertical axis at zero, or makes it logarithmic if the finite values are far apart."""
    lowest, highest = (values.min(), values.max()) if values.size else (0.0, 0.0)
    factor = BARS_LOG_FROM if axes.patches else LOG_FROM
    if may_be_logarithmic and lowest > 0 and highest >= factor * lowest:
        axes.set_yscale("log")
        if axes.patches:  # bars start at zero, which a logarithmic axis cannot show
            axes.set_ylim(lowest / 3, 2 * highest)
    else:
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.05 * highest))  # close points are not at the edge
    plain_ticks(axes.yaxis)


def plain_ticks(axis: Axis) -> None:
    """Puts few round numbers on an axis whose limits are final. Long ones have commas and no power of ten."""
    low, high = axis.get_view_interval()
    is_log = axis.get_scale() == "log"
    if is_log and high >= 10 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    else:
        axis.set_major_locator(MaxNLocator(7, steps=(1, 2, 5, 10)))
    if is_log or high >= 1000:
        axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axis.set_minor_locator(NullLocator())


def span_of(columns: Iterable[np.ndarray]) -> tuple[float, float]:
    """Returns axis limits around all values. They are never so close that tick labels need many digits."""
    values = np.concatenate([np.asarray(values, dtype=float) for values in columns])
    known = values[np.isfinite(values)]
    if not known.size:
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    span = max(high - low, SMALLEST_SPAN * abs(high)) or 1.0
    middle = (low + high) / 2
    return middle - 0.55 * span, middle + 0.55 * span


# ---- curves, lines and bars -----------------------------------------------------------------------------------------


def widths(count: int) -> list[float]:
    """Returns widths of lines, the first the widest, so that it stays visible where lines coincide."""
    return [float(width) for width in np.linspace(THINNEST + min(4.0, 1.2 * (count - 1)), THINNEST, count)]


def draw_curve(axes: Axes, x: np.ndarray, y: np.ndarray, style: str = "-", **look: Any) -> None:
    """Plots a line, with dots if it is short, because a line with one point is invisible."""
    marker = "o" if np.isfinite(y).sum() <= FEW else ""
    axes.plot(x, y, style, **{"marker": marker, "markersize": 4, "linewidth": THINNEST, **look})


class Point(NamedTuple):
    """A value with its range, or a note where there is no value."""

    x: Any
    value: float
    low: float
    high: float
    note: str = ""


def ranges(points: Sequence[Point]) -> list[list[float]]:
    """Returns the lengths of error bars below and above the values."""
    return [[point.value - point.low for point in points], [point.high - point.value for point in points]]


def draw_line(axes: Axes, points: Sequence[Point], label: str, **look: Any) -> None:
    """Plots a line with a bar from the lowest to the highest value of each point."""
    x, y = [point.x for point in points], [point.value for point in points]
    line, *_ = axes.errorbar(x, y, ranges(points), capsize=3, elinewidth=1.0, **look)
    line.set_label(label)  # not of the error bars, which the legend would repeat


def draw_bars(
    axes: Axes, ticks: Mapping[Any, str], groups: Mapping[str, Sequence[Point]], shades: Sequence[Any]
) -> None:
    """Draws a group of labeled bars at each tick: one bar per name and color. `ticks` has the text at each x."""
    width = 0.86 / len(groups)
    for i, ((name, points), color) in enumerate(zip(groups.items(), shades, strict=True)):
        at = [list(ticks).index(point.x) + (i - (len(groups) - 1) / 2) * width for point in points]
        error = {"yerr": ranges(points), "capsize": 3} if np.nansum(ranges(points)) > 0 else {}
        bars = axes.bar(at, [point.value for point in points], 0.94 * width, color=color, label=name, **error)
        axes.bar_label(bars, [three_digits(point.value) for point in points], padding=3, fontsize=9, color=GREY)
        for x, point in zip(at, points, strict=True):
            if point.note:
                look = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 8.5, "color": GREY}
                axes.text(x, 0.02, point.note, transform=axes.get_xaxis_transform(), **look)
    axes.margins(y=0.1)  # room for the label of the highest bar
    axes.set_xticks(range(len(ticks)), list(ticks.values()))
    axes.grid(visible=False, axis="x")


def three_digits(value: float) -> str:
    """Formats 50800 as 50.8k and 7 as 7.00."""
    if not np.isfinite(value):
        return ""
    thousands = value >= 1000
    return f"{value / 1000 if thousands else value:#.3g}".removesuffix(".") + ("k" if thousands else "")
