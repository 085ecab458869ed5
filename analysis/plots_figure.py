"""Figures of many runs: the metrics there are, and curves over steps or lines and bars over a setting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    MaxNLocator,
    NullLocator,
    StrMethodFormatter,
)

from lightseq.profiling.trace import ON_HOST

from .drawing import (
    GIB,
    GREY,
    colors,
    marker,
    plain_ticks,
    round_log_ticks,
    short_length,
    span_of,
)
from .plots_file import STEP, Plot, short_name
from .records import Record
from .run_settings import setting_text
from .runs import Run, past_warmup, smooth

LOG_FROM = 8.0  # times the lowest value, from which on an axis is logarithmic


# ---- metrics --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A key of the metrics in the unit of its axis.

    `whole` makes one number of a run; without it the median past the warm-up counts and the range is drawn.
    `of_profile` reads the summary of a trace in the place of `key`.
    """

    key: str
    title: str
    unit: str
    scale: float = 1.0
    from_zero: bool = True
    logarithmic: bool = False  # over a setting, if the values spread that far
    whole: Callable[[Run, np.ndarray], float] | None = None
    of_profile: Callable[[Record], float] | None = None


def phase_ms(phase: str) -> Callable[[Record], float]:
    return lambda profile: sum(part["ms"] for part in profile.get("spent", ()) if part["phase"] == phase)


def exposed_ms(profile: Record) -> float:
    """Returns the time of communication that no kernel hides, with its waits; NaN for a CPU, whose trace has none."""
    spent = profile.get("spent", ())
    if any(part["kind"] == ON_HOST for part in spent):
        return np.nan
    return sum(part["ms"] for part in spent if part["kind"] in ("attention's exchange", "collectives"))


def bandwidth(profile: Record) -> float:
    """Returns GB/s between GPUs; NaN if nothing moved between them."""
    moved = [each for each in profile.get("moved", ()) if "ranks" in each["kind"] or "another GPU" in each["kind"]]
    seconds = sum(each["seconds"] for each in moved)
    return sum(each["bytes"] for each in moved) / seconds / 1e9 if seconds else np.nan


def total_seconds(run: Run, step_seconds: np.ndarray) -> float:
    """Returns the time of all steps; a record has the mean of the steps since the one before."""
    return float(np.nansum(step_seconds * np.diff(run.column("step"), prepend=run.steps_before)))


def phase_metric(phase: str) -> Metric:
    title = f"Time of a step's {phase} pass"
    return Metric(phase, title, "ms", from_zero=False, logarithmic=True, of_profile=phase_ms(phase))


def peak(run: Run, values: np.ndarray) -> float:
    return float(np.nanmax(values))


HOST_MEMORY = Metric("host_rss_bytes", "Peak memory", "GiB resident in one process", 1 / GIB, whole=peak)
METRICS: Mapping[str, Metric] = {
    "speed": Metric("tokens_per_second", "Throughput", "tokens per second, all ranks", logarithmic=True),
    "memory": Metric("peak_memory_allocated_bytes", "Peak memory", "GiB of the worst GPU", 1 / GIB, whole=peak),
    "mfu": Metric("mfu", "Model FLOPs utilization", "% of the chip's dense peak", 100.0),
    "model_tflops_per_gpu": Metric("model_tflops_per_gpu", "Model FLOP/s", "model TFLOP/s per GPU (or CPU process)"),
    "latency": Metric("step_seconds", "Time of a step", "seconds", from_zero=False, logarithmic=True),
    "sent": Metric("comm_bytes", "Sent by attention", "GB a step, all ranks together", 1e-9),
    "time": Metric("step_seconds", "Training time", "seconds, all steps", whole=total_seconds),
    "loss": Metric(
        "loss", "Training loss", "nats per token", from_zero=False, whole=lambda run, values: float(smooth(values)[-1])
    ),
    "forward": phase_metric("forward"),
    "backward": phase_metric("backward"),
    "update": Metric("update", "Time of a step's update", "ms", of_profile=phase_ms("update")),
    "communication": Metric("communication", "Communication that nothing hides", "ms a step", of_profile=exposed_ms),
    "bandwidth": Metric("bandwidth", "Between GPUs while anything moves", "GB/s", of_profile=bandwidth),
}
# Keys of metrics.jsonl end in their unit: its name on an axis, and the factor into it.
UNITS: Mapping[str, tuple[str, float]] = {"bytes": ("GB", 1e-9), "seconds": ("seconds", 1.0), "percent": ("%", 1.0)}


def metric_of(word: str) -> Metric:
    """Returns a metric by its name, or by a key of metrics.jsonl."""
    if word in METRICS:
        return METRICS[word]
    name, _, ending = word.rpartition("_")
    unit, scale = UNITS.get(ending, ("", 1.0))
    return Metric(word, (name if unit else word).replace("_", " "), unit or word.replace("_", " "), scale)


# ---- points ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One run in a figure: its setting, its number, and the range of its steps."""

    x: str
    value: float
    low: float
    high: float


def point_of(run: Run, x: str, metric: Metric) -> Point:
    if metric.of_profile is not None:
        value = metric.of_profile(run.profile)
        return Point(x, value, value, value)
    if metric.whole is not None:
        value = metric.whole(run, metric.scale * run.column(metric.key)) if run.has(metric.key) else np.nan
        return Point(x, value, value, value)
    known = past_warmup(metric.scale * run.unprofiled(metric.key))
    if not known.size:
        return Point(x, np.nan, np.nan, np.nan)
    return Point(x, float(np.median(known)), float(known.min()), float(known.max()))


def spread(points: Sequence[Point]) -> list[list[float]]:
    return [[p.value - p.low for p in points], [p.high - p.value for p in points]]


# ---- axes -----------------------------------------------------------------------------------------------------------


def draw_steps(axes: Axes, groups: Mapping[str, Sequence[Run]], metric: Metric) -> None:
    """Draws a curve per run. Earlier groups are wider, to show beneath later ones that coincide."""
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for i, ((name, runs), color) in enumerate(zip(groups.items(), colors(len(groups)), strict=True)):
        width = 1.6 + min(5.0, 0.9 * (len(groups) - 1 - i))
        for run in runs:
            values = metric.scale * run.column(metric.key)
            look = {"color": color, "linewidth": width, "marker": marker(values), "markersize": 4}
            axes.plot(run.column("step"), values, label=name if run is runs[0] else None, **look)


def draw_over_setting(axes: Axes, key: str, groups: Mapping[str, Sequence[Point]]) -> None:
    """Draws lines over a setting of several numbers, else bars."""
    places = sorted({point.x for points in groups.values() for point in points}, key=number_first)
    axes.set_xlabel({"model_max_length": "tokens of a sequence", "world_size": "ranks"}.get(key, short_name(key)))
    if len(places) > 1 and all(is_number(place) for place in places):
        draw_lines(axes, places, groups)
    else:
        draw_bars(axes, key, places, groups)


def draw_lines(axes: Axes, places: Sequence[str], groups: Mapping[str, Sequence[Point]]) -> None:
    for (name, points), color in zip(groups.items(), colors(len(groups)), strict=True):
        points = sorted(points, key=lambda p: float(p.x))
        x, y = [float(p.x) for p in points], [p.value for p in points]
        axes.errorbar(x, y, yerr=spread(points), color=color, marker="o", markersize=5, capsize=3, label=name)
    numbers = [float(place) for place in places]
    if min(numbers) > 0 and max(numbers) >= LOG_FROM * min(numbers):
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(numbers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FixedFormatter([tick(place) for place in places]))


def draw_bars(axes: Axes, key: str, places: Sequence[str], groups: Mapping[str, Sequence[Point]]) -> None:
    width = 0.8 / len(groups)
    for i, ((name, points), color) in enumerate(zip(groups.items(), colors(len(groups)), strict=True)):
        at = [places.index(p.x) + (i - (len(groups) - 1) / 2) * width for p in points]
        ranges = spread(points) if np.nanmax(spread(points)) > 0 else None
        values = [p.value for p in points]
        bars = axes.bar(at, values, 0.92 * width, yerr=ranges, color=color, ecolor=GREY, capsize=3, label=name)
        axes.bar_label(bars, [number(p.value) for p in points], padding=2, fontsize=9, color=GREY)
    axes.margins(y=0.1)  # room for the values above the highest
    axes.set_xticks(
        range(len(places)), [tick(place) if is_number(place) else setting_text(key, place) for place in places]
    )
    axes.grid(axis="x", visible=False)


def set_vertical_scale(axes: Axes, plot: Plot, metric: Metric, values: np.ndarray) -> None:
    """Lets the axis begin at zero if the metric has one; makes it logarithmic if values over a setting are far apart.

    Curves over the steps stay linear: a first step that compiles is always far from the others.
    """
    positive = values[values > 0]
    wide = positive.size == values.size > 0 and values.max() >= LOG_FROM * values.min()
    if metric.logarithmic and wide and plot.x != STEP:
        axes.set_yscale("log")
        if axes.patches:  # bars have no foot on a logarithmic axis
            axes.set_ylim(positive.min() / 3, 2 * positive.max())
        round_log_ticks(axes.yaxis, number)
        return
    if metric.from_zero or metric.logarithmic:
        highest = float(values.max()) if values.size else 0.0
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.05 * highest))  # points that are close are not at the edge
    elif values.size and not axes.patches:
        axes.set_ylim(*span_of([axes.dataLim.intervaly]))
    plain_ticks(axes.yaxis)
    if axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def tick(place: str) -> str:
    value = float(place)
    return short_length(int(value)) if value.is_integer() and value >= 1024 else f"{value:g}"


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def number_first(word: str) -> tuple[float, str]:
    """Sorts numbers by size, then words."""
    return (float(word), "") if is_number(word) else (np.inf, word)
