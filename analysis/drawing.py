"""Style, ticks and files of figures, and Markdown tables."""

import argparse
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator, ScalarFormatter
from rich.console import Console, RenderableType

from lightseq.config.lengths import format_tokens

GIB = 2.0**30

# Okabe and Ito's palette for color-blind readers, without yellow, which is too pale on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#555555"
MAX_TICKS, TICK_STEPS = 7, (1, 2, 5, 10)
SMALLEST_SPAN = 1e-3  # of the value; a loss that barely changes fills no axis with its last digits
FEW = 20  # lines with at most this many points have markers
STYLE: Mapping[str, Any] = {
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
SMALL_TITLE: Mapping[str, Any] = {"loc": "right", "fontsize": 9.5, "fontweight": "normal"}
LETTERS_PER_INCH = 12  # in a figure's subtitle

SHARED_OUTPUT = Path("outputs/compare")  # for plots of several results


# ---- flags and files ------------------------------------------------------------------------------------------------


def add_output_flag(parser: argparse.ArgumentParser, beside: str | None) -> None:
    default = f"{beside}; {SHARED_OUTPUT} for several" if beside else f"{SHARED_OUTPUT}"
    text = f"directory for the plots (default: {default})"
    parser.add_argument("--output", metavar="DIR", type=Path, help=text)


def output_dir(asked: Path | None, results: Sequence[Path]) -> Path:
    """Returns the directory for plots: that of a single result, or a shared one for several."""
    if asked is not None:
        return asked
    return results[0] if len(results) == 1 else SHARED_OUTPUT


def save(figure: Figure, output: Path, name: str) -> Path:
    """Saves a figure as PNG in a directory and returns its path."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name}.png"
    figure.savefig(path)
    return path


# ---- figures --------------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def colors(count: int) -> list[str]:
    """Returns `count` colors. More than seven come from a sequential colormap."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    return [matplotlib.colors.to_hex(shade) for shade in matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, count))]


def subtitle(figure: Figure, text: str) -> None:
    """Writes a grey line above the axes, wrapped to the figure's width."""
    lines = textwrap.fill(text, int(LETTERS_PER_INCH * figure.get_figwidth()), break_on_hyphens=False)
    figure.suptitle(lines, x=0.01, ha="left", fontsize=10.5, color=GREY)


def marker(values: np.ndarray) -> str:
    """Returns a dot for short lines, because a line with one point is invisible."""
    return "o" if np.isfinite(values).sum() <= FEW else ""


def log2_axis(axes: Axes, numbers: Sequence[float], labels: Sequence[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, labels)
    axes.xaxis.set_minor_locator(NullLocator())


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    log2_axis(axes, lengths, [format_tokens(length) for length in lengths])
    axes.set_xlabel("tokens in the sequence")


# ---- ticks ----------------------------------------------------------------------------------------------------------


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


def plain_ticks(axis: Axis) -> None:
    """Puts at most seven round numbers on a linear axis, written in full instead of as offsets from one value."""
    axis.set_major_locator(MaxNLocator(MAX_TICKS - 1, steps=TICK_STEPS))
    axis.set_major_formatter(ScalarFormatter(useOffset=False))


def log_ticks(low: float, high: float) -> list[float]:
    """Returns at most seven round numbers between two positive numbers, for a logarithmic axis."""
    if high < 10 * low:
        ticks = MaxNLocator(MAX_TICKS - 1, steps=TICK_STEPS).tick_values(low, high)
        return [float(tick) for tick in ticks if low <= tick <= high]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits, stride in ((1, 2, 5), 1), ((1, 3), 1), *(((1,), stride) for stride in range(1, len(decades) + 1)):
        ticks = [digit * 10.0**power for power in decades[::stride] for digit in digits]
        shown = [tick for tick in ticks if low <= tick <= high]
        if len(shown) <= MAX_TICKS:
            break
    return shown


def round_log_ticks(axis: Axis, text: Callable[[float], str]) -> None:
    """Puts `log_ticks` on a logarithmic axis whose limits are final."""
    ticks = log_ticks(*sorted(axis.get_view_interval()))
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([text(tick) for tick in ticks]))
    axis.set_minor_locator(NullLocator())


# ---- tables ---------------------------------------------------------------------------------------------------------


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table with aligned columns. The first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        numbers = [text.rjust(width) for text, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join((cells[0].ljust(widths[0]), *numbers))} |"

    rule = f"|{'|'.join(['-' * (widths[0] + 2), *('-' * (width + 1) + ':' for width in widths[1:])])}|"
    return [line(rows[0]), rule, *map(line, rows[1:])]


def print_lines(lines: Iterable[object]) -> None:
    for line in lines:
        print(line)


def print_rich(*parts: RenderableType) -> None:
    """Prints tables as wide as the terminal, without trailing spaces."""
    console = Console(highlight=False)
    with console.capture() as capture:
        console.print(*parts)
    print_lines(line.rstrip() for line in capture.get().splitlines())


def format_number(form: str, value: float) -> str:
    return form.format(value) if np.isfinite(value) else "-"
