"""Axes, curves, bars and legends that several figures share."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from lightseq.config.lengths import format_tokens

from .style import BLUE, GREY, INK, WIDE

SMALLEST_SPAN = 1e-3  # of the value; a loss that barely changes fills no axis with its last digits
FEW = 20  # lines with at most this many points have markers
MARKED = 8  # points with a marker on longer lines
LOG_SCALE = " (log scale)"
LOG_FROM, BARS_LOG_FROM = 8.0, 20.0  # highest over lowest value from which an axis is logarithmic
SMALL_TITLE: Mapping[str, Any] = {"loc": "right", "fontsize": 9.5, "fontweight": "normal", "color": GREY}
LETTERS_PER_INCH = 11.5  # in a legend or a subtitle
NEAR_EDGE = 0.85  # of the width; lines that end before it have no leader to their name
LINE_INCHES = 0.2  # height of a line of text


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


# ---- text around the axes -------------------------------------------------------------------------------------------


def subtitle(figure: Figure, *texts: str) -> None:
    """Writes grey lines above the axes, wrapped to the figure's width."""
    letters = int(LETTERS_PER_INCH * figure.get_figwidth())
    lines = [textwrap.fill(text, letters, break_on_hyphens=False) for text in texts if text]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10.5, color=GREY)


def legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    """Adds a legend below the axes, in as many columns as fit, and makes room for its rows."""
    letters = LETTERS_PER_INCH * figure.get_figwidth()
    columns = max(1, int(letters / (8 + max(len(str(handle.get_label())) for handle in handles))))
    figure.set_figheight(figure.get_figheight() + 1.1 * LINE_INCHES * math.ceil(len(handles) / columns))
    figure.legend(handles=handles, loc="outside lower left", ncols=min(columns, len(handles)))


def label_lines(axes: Axes) -> None:
    """Names each line at the right of the axes, near its last point, and makes the figure large enough for the names.

    The limits of the axes have to be final.
    """
    known = {line: np.isfinite(line.get_xydata()).all(axis=1) for line in axes.lines}
    lines = [line for line in axes.lines if known[line].any() and not str(line.get_label()).startswith("_")]
    figure = axes.figure
    figure.set_figwidth(
        figure.get_figwidth() + max((len(str(line.get_label())) for line in lines), default=0) / LETTERS_PER_INCH
    )
    figure.set_figheight(max(figure.get_figheight(), 2.0 + LINE_INCHES * len(lines)))
    ends = {line: line.get_xydata()[known[line]][-1] for line in lines}
    to_axes = axes.transScale + axes.transLimits
    heights = {line: float(np.clip(to_axes.transform(end)[1], 0, 1)) for line, end in ends.items()}
    in_order = sorted(lines, key=heights.__getitem__)
    places = spread([heights[line] for line in in_order], LINE_INCHES / (figure.get_figheight() - 1.5))
    for line, place in zip(in_order, places, strict=True):
        look = {key: getattr(line, f"get_{key}")() for key in ("color", "marker", "linestyle", "linewidth")}
        figure.add_artist(Line2D([1.03, 1.055, 1.08], [place] * 3, markevery=[1], transform=axes.transAxes, **look))
        if to_axes.transform(ends[line])[0] > NEAR_EDGE:
            leader = {"arrowstyle": "-", "color": line.get_color(), "alpha": 0.5, "shrinkA": 0, "shrinkB": 3}
            ends_at = {"xycoords": "data", "textcoords": "axes fraction", "annotation_clip": False}
            axes.annotate("", ends[line], (1.03, place), **ends_at, arrowprops=leader)
        axes.text(1.09, place, str(line.get_label()), transform=axes.transAxes, va="center", fontsize=10)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Moves sorted places apart to at least `gap`, and below 1 as far as there is room."""
    out: list[float] = []
    for place in places:
        out.append(max(place, out[-1] + gap) if out else place)
    highest = 1.0
    for i in reversed(range(len(out))):
        out[i] = min(out[i], highest)
        highest = out[i] - gap
    return out


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
    """Starts the axis of values at zero, or makes it logarithmic if they are far apart. Bars are horizontal."""
    is_bars = bool(axes.patches)
    name, axis = ("x", axes.xaxis) if is_bars else ("y", axes.yaxis)
    lowest, highest = (values.min(), values.max()) if values.size else (0.0, 0.0)
    factor = BARS_LOG_FROM if is_bars else LOG_FROM
    if may_be_logarithmic and lowest > 0 and highest >= factor * lowest:
        axes.set(**{f"{name}scale": "log"})
        if is_bars:  # bars start at zero, which a logarithmic axis cannot show
            axes.set_xlim(lowest / 3, 3 * highest)
    else:
        top = 1.15 * highest if is_bars else max(axes.get_ylim()[1], 1.05 * highest)  # room for the labels of bars
        axes.set(**{f"{name}lim": (0, top or 1.0)})
    plain_ticks(axis)


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


def draw_curve(axes: Axes, x: np.ndarray, y: np.ndarray, place: int = 0, count: int = 1, **look: Any) -> None:
    """Plots a line with markers. They are on other points than those of the other `count` lines, which may coincide."""
    known = np.flatnonzero(np.isfinite(y))
    every = max(count if count > 1 else 1, len(known) // MARKED if len(known) > FEW else 1)
    marked = known[(every * place // count) % max(1, len(known)) :: every]
    axes.plot(x, y, **{"marker": "o", "linewidth": WIDE, "markevery": [int(i) for i in marked], **look})


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
    """Plots a line with a pale bar from the lowest to the highest value of each point."""
    x, y = [point.x for point in points], [point.value for point in points]
    line, caps, bars = axes.errorbar(x, y, ranges(points), capsize=2.5, elinewidth=1.0, **look)
    line.set_label(label)  # not of the error bars, which the legend would repeat
    for artist in (*caps, *bars):
        artist.set_alpha(0.45)


def draw_bars(axes: Axes, groups: Mapping[str, Mapping[str, Point]], shades: Mapping[str, str]) -> None:
    """Draws bars from the top down, each with its name at the left, below the heading of its group, if it has one.

    `shades` has the colors of names. The figure gets the height that fits.
    """
    ticks: dict[float, str] = {}
    row, beside = 0.0, axes.get_yaxis_transform()
    for heading, points in groups.items():
        if heading:
            axes.text(0.01, row + 0.1, heading, transform=beside, va="center", fontweight="bold")
            row += 1
        for name, point in points.items():
            ticks[row] = name
            whiskers = {"xerr": ranges([point]), "capsize": 3, "ecolor": INK} if point.high > point.low else {}
            bar = axes.barh(row, point.value, 0.8, color=shades.get(name, BLUE), **whiskers)
            axes.bar_label(bar, [three_digits(point.value)], padding=4, fontsize=9.5, color=GREY)
            axes.text(0.01, row, point.note, transform=beside, va="center", fontsize=9.5, color=GREY)
            row += 1
        row += 0.4
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(row - 0.8, -0.7)
    axes.figure.set_figheight(1.7 + 0.3 * row)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def three_digits(value: float) -> str:
    """Formats 50800 as 50.8k and 7 as 7.00."""
    if not np.isfinite(value):
        return ""
    thousands = value >= 1000
    return f"{value / 1000 if thousands else value:#.3g}".removesuffix(".") + ("k" if thousands else "")
