"""Draws what benchmarks/step.py measured and prints its table: `python3 -m analysis step FILE...`."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from . import command
from .figures import GREY, STYLE, subtitle
from .markdown import table_lines
from .pictures import add_format, add_output, draw_each, folder_of
from .points import shown
from .step_points import FLOOR, OURS, Comparison, Step, read_comparisons
from .summary import GIB

COLORS = {OURS: "#0072B2", FLOOR: "#E69F00", "accelerate": "#009E73", "deepspeed": "#CC79A7"}
OTHER_COLOR = "#7A5195"
GROUP_WIDTH = 0.86  # of the place of a length
WIDE_RANGE = 20.0  # from where on the shortest bars of a linear axis say nothing

Value = Callable[[Step], float | None]


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis step",
        usage="python3 -m analysis step FILE... [--output DIR] [--format png|svg|both]",
        description="Draws tokens per second and peak memory by length from records of benchmarks/step.py, and prints "
        "a Markdown table of them: one picture and one table for every model, number of layers and of ranks.",
    )
    out.add_argument("files", metavar="FILE", nargs="+", type=Path, help="JSONL; later ones win where points repeat")
    add_output(out, "beside FILE")
    add_format(out)
    return out


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    return command.run(
        arguments.files,
        lambda notes: read_comparisons(arguments.files, notes),
        lambda found, files: draw(
            found, folder_of(arguments.output, [file.parent for file in files]), arguments.format
        ),
        lambda found: (line for one in found for line in (*markdown(one), "", *remarks(one), "")),
    )


# ---- the table ------------------------------------------------------------------------------------------------------


def markdown(comparison: Comparison) -> list[str]:
    """A row a point, the fastest of a length first."""
    on_gpu = any(step.mfu is not None for step in comparison.steps)
    rows = [["", "tokens", "tokens/s", f"÷ {FLOOR}", "MFU" if on_gpu else "TFLOP/s", "peak GiB"]]
    for step in comparison.steps:
        rows.append([step.label, shown(step.length), *cells(step, comparison.ratio(step), on_gpu)])
    return [comparison.setting.title, "", *table_lines(rows)]


def cells(step: Step, ratio: float | None, on_gpu: bool) -> list[str]:
    if step.tokens_per_second is None:
        return ["–", "", "", ""]
    used = f"{step.mfu:.1%}" if step.mfu is not None else ""
    return [
        f"{step.tokens_per_second:,.0f}",
        "" if ratio is None else f"{ratio:.2f}",
        used if on_gpu else f"{step.model_tflops_per_gpu or 0.0:.2g}",
        "" if step.peak_memory_bytes is None else f"{step.peak_memory_bytes / GIB:.1f}",
    ]


def remarks(comparison: Comparison) -> list[str]:
    """How steady the times were, whether all trained alike, and why points are missing."""
    out = []
    measured = [step for step in comparison.steps if step.tokens_per_second is not None]
    if measured:
        widest = max(measured, key=lambda step: step.spread)
        out.append(
            f"Medians. Widest spread: {widest.spread:.1%} of the median ({widest.label}, {shown(widest.length)})."
        )
    for length in comparison.lengths:
        last = [step.losses[1] for step in measured if step.losses and step.length == length]
        if len(last) > 1:
            out.append(f"Last losses at {shown(length)}: {min(last):.4f} to {max(last):.4f}.")
    for step in measured:
        if not step.losses_finite:
            out.append(f"Not finite: losses of {step.label}, {shown(step.length)}. Its numbers do not count.")
    for step in comparison.steps:
        if step.skipped:
            out.append(f"– {step.label}, {shown(step.length)}: {step.skipped}")
    return out


# ---- the figure -----------------------------------------------------------------------------------------------------


def draw(comparisons: Sequence[Comparison], output: Path, form: str = "png") -> list[Path]:
    return draw_each("step", comparisons, figure, STYLE, output, form)


def figure(comparison: Comparison) -> Figure:
    """Bars by length, for tokens per second and, where it is known, for memory beside it."""
    panels: list[tuple[str, str, Value]] = [
        ("Whole training steps", "tokens per second, all GPUs", lambda s: s.tokens_per_second)
    ]
    if any(step.peak_memory_bytes for step in comparison.steps):
        panels.append(("Peak memory", "GiB per GPU", memory))
    bars = len(comparison.labels) * len(comparison.lengths)
    out = Figure(figsize=(max(5.5, 2.0 + 0.5 * bars) * len(panels), 5.2), layout="constrained")
    for axes, (title, unit, value) in zip(out.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set_title(title, loc="left")
        axes.set(ylabel=unit, xlabel="tokens in the sequence")
        draw_bars(axes, comparison, value, with_spread=value is not memory)
    handles, labels = out.axes[0].get_legend_handles_labels()
    out.legend(handles, labels, loc="outside lower left", ncols=min(len(labels), 4))
    subtitle(out, comparison.setting.title)
    return out


def memory(step: Step) -> float | None:
    return step.peak_memory_bytes / GIB if step.peak_memory_bytes else None


def draw_bars(axes: Axes, comparison: Comparison, value: Value, with_spread: bool) -> None:
    labels, lengths = comparison.labels, comparison.lengths
    width = GROUP_WIDTH / len(labels)
    logarithmic = scale(axes, [v for step in comparison.steps if (v := value(step))])
    for i, (label, color) in enumerate(zip(labels, colors(comparison), strict=True)):
        for place, length in enumerate(lengths):
            x = place + (i - (len(labels) - 1) / 2) * width
            step = comparison.at(length, label)
            height = value(step) if step else None
            axes.bar(x, height or 0.0, 0.94 * width, color=color, label=label if place == 0 else None)
            if step and height:
                label_bar(axes, x, height, step.bounds if with_spread else (height, height))
            elif step and step.skipped:
                why = step.skipped if len(step.skipped) < 20 else "skipped"
                foot = axes.get_ylim()[0]
                axes.text(x, foot, f"  {why}", rotation=90, ha="center", va="bottom", fontsize=8.5, color=GREY)
    axes.set_xticks(range(len(lengths)), [shown(length) for length in lengths])
    axes.grid(axis="x", visible=False)
    if not logarithmic and axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def scale(axes: Axes, known: Sequence[float]) -> bool:
    """From zero, unless the shortest bars would vanish; says whether the axis is logarithmic."""
    if not known:
        return False
    logarithmic = max(known) > WIDE_RANGE * min(known)
    if logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(min(known) / 3, 2 * max(known))
    else:
        axes.set_ylim(0, 1.15 * max(known))
    return logarithmic


def label_bar(axes: Axes, x: float, height: float, bounds: tuple[float, float]) -> None:
    """The value above the bar, and the slowest to the fastest step as a line over its end."""
    low, high = bounds
    if high > low:
        spread = [[height - low], [high - height]]
        axes.errorbar(x, height, spread, fmt="none", ecolor="black", elinewidth=1.0, capsize=2)
    axes.annotate(number(height), (x, high), (0, 4), textcoords="offset points", ha="center", fontsize=8.5)


def number(value: float) -> str:
    """Three digits, short enough to stand on a bar: 50.8k."""
    thousands = value >= 1000
    return f"{value / 1000 if thousands else value:#.3g}".removesuffix(".") + ("k" if thousands else "")


def colors(comparison: Comparison) -> list[tuple[float, float, float]]:
    """Every label's own: its implementation's, paler for each more row of it."""
    implementations = {step.label: step.implementation for step in comparison.steps}
    counts: dict[str, int] = {}
    out = []
    for label in comparison.labels:
        implementation = implementations[label]
        i = counts[implementation] = counts.get(implementation, -1) + 1
        out.append(paler(COLORS.get(implementation, OTHER_COLOR), 1 - 0.7**i))
    return out


def paler(color: str, share: float) -> tuple[float, float, float]:
    red, green, blue = (x + (1 - x) * share for x in to_rgb(color))
    return red, green, blue
