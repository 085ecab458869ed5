"""Metrics, and figures of many runs: curves by step, lines and bars by setting."""

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

from lightseq.config.lengths import format_tokens
from lightseq.profiling.trace import ON_HOST

from .drawing import (
    GIB,
    GREY,
    colors,
    marker,
    plain_ticks,
    round_log_ticks,
    span_of,
)
from .plots_file import STEP, Plot, short_name
from .records import Record
from .run_settings import setting_text
from .runs import Run, past_warmup, smooth

LOG_FROM = 8.0  # highest over lowest value from which an axis is logarithmic


# ---- metrics --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A key of metrics.jsonl with its title and unit.

    `whole` reduces a run to one number; the default is the median after warm-up, drawn with its range.
    `of_profile` reads the summary of a trace instead of `key`.
    """

    key: str
    title: str
    unit: str
    scale: float = 1.0
    from_zero: bool = True
    logarithmic: bool = False  # by setting, if the values differ by LOG_FROM
    whole: Callable[[Run, np.ndarray], float] | None = None
    of_profile: Callable[[Record], float] | None = None


def phase_ms(phase: str) -> Callable[[Record], float]:
    return lambda profile: sum(part["ms"] for part in profile.get("spent", ()) if part["phase"] == phase)


def exposed_ms(profile: Record) -> float:
    """Returns milliseconds of communication and waiting that no kernel hides; NaN for traces of a CPU."""
    spent = profile.get("spent", ())
    if any(part["kind"] == ON_HOST for part in spent):
        return np.nan
    return sum(part["ms"] for part in spent if part["kind"] in ("attention's exchange", "collectives"))


def bandwidth(profile: Record) -> float:
    """Returns GB/s between GPUs; NaN if GPUs exchanged nothing."""
    moved = [each for each in profile.get("moved", ()) if "ranks" in each["kind"] or "another GPU" in each["kind"]]
    seconds = sum(each["seconds"] for each in moved)
    return sum(each["bytes"] for each in moved) / seconds / 1e9 if seconds else np.nan


def total_seconds(run: Run, step_seconds: np.ndarray) -> float:
    """Returns the time of all steps. A record has the mean over the steps since the previous record."""
    return float(np.nansum(step_seconds * np.diff(run.column("step"), prepend=run.steps_before)))


def phase_metric(phase: str) -> Metric:
    title = f"{phase.capitalize()} pass"
    return Metric(phase, title, "ms per step", from_zero=False, logarithmic=True, of_profile=phase_ms(phase))


def peak(run: Run, values: np.ndarray) -> float:
    return float(np.nanmax(values))


HOST_MEMORY = Metric("host_rss_bytes", "Peak memory", "GiB resident per process", 1 / GIB, whole=peak)
METRICS: Mapping[str, Metric] = {
    "speed": Metric("tokens_per_second", "Throughput", "tokens per second, all ranks", logarithmic=True),
    "memory": Metric("peak_memory_allocated_bytes", "Peak memory", "GiB of the fullest GPU", 1 / GIB, whole=peak),
    "mfu": Metric("mfu", "Model FLOPs utilization", "% of the chip's dense peak", 100.0),
    "model_tflops_per_gpu": Metric("model_tflops_per_gpu", "Model FLOP/s", "model TFLOP/s per GPU (or CPU process)"),
    "latency": Metric("step_seconds", "Step time", "seconds", from_zero=False, logarithmic=True),
    "sent": Metric("comm_bytes", "Sent by attention", "GB per step, all ranks", 1e-9),
    "time": Metric("step_seconds", "Training time", "seconds, all steps", whole=total_seconds),
    "loss": Metric(
        "loss", "Training loss", "nats per token", from_zero=False, whole=lambda run, values: float(smooth(values)[-1])
    ),
    "forward": phase_metric("forward"),
    "backward": phase_metric("backward"),
    "update": Metric("update", "Optimizer update", "ms per step", of_profile=phase_ms("update")),
    "communication": Metric("communication", "Exposed communication", "ms per step", of_profile=exposed_ms),
    "bandwidth": Metric("bandwidth", "Bandwidth between GPUs during transfers", "GB/s", of_profile=bandwidth),
}
# Last word of a metrics.jsonl key, with its axis label and factor.
UNITS: Mapping[str, tuple[str, float]] = {"bytes": ("GB", 1e-9), "seconds": ("seconds", 1.0), "percent": ("%", 1.0)}


def metric_of(word: str) -> Metric:
    """Returns a metric by name or by key of metrics.jsonl."""
    if word in METRICS:
        return METRICS[word]
    name, _, ending = word.rpartition("_")
    unit, scale = UNITS.get(ending, ("", 1.0))
    return Metric(word, (name if unit else word).replace("_", " "), unit or word.replace("_", " "), scale)


# ---- points ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One run in a figure: setting, value, and range over steps."""

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
    """Plots a curve per run. Earlier groups have wider lines, so they stay visible where runs coincide."""
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for i, ((name, runs), color) in enumerate(zip(groups.items(), colors(len(groups)), strict=True)):
        width = 1.6 + min(5.0, 0.9 * (len(groups) - 1 - i))
        for run in runs:
            values = metric.scale * run.column(metric.key)
            look = {"color": color, "linewidth": width, "marker": marker(values), "markersize": 4}
            axes.plot(run.column("step"), values, label=name if run is runs[0] else None, **look)


def draw_over_setting(axes: Axes, key: str, groups: Mapping[str, Sequence[Point]]) -> None:
    """Plots lines over a numeric setting, and bars otherwise."""
    places = sorted({point.x for points in groups.values() for point in points}, key=number_first)
    axes.set_xlabel({"model_max_length": "tokens in the sequence", "world_size": "ranks"}.get(key, short_name(key)))
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
    axes.margins(y=0.1)  # room for the label of the highest bar
    axes.set_xticks(
        range(len(places)), [tick(place) if is_number(place) else setting_text(key, place) for place in places]
    )
    axes.grid(axis="x", visible=False)


def set_vertical_scale(axes: Axes, plot: Plot, metric: Metric, values: np.ndarray) -> None:
    """Sets limits, scale and ticks of the y axis.

    It is logarithmic if values by setting are far apart. Curves by step stay linear: a first step that compiles would
    always make them logarithmic.
    """
    positive = values[values > 0]
    wide = positive.size == values.size > 0 and values.max() >= LOG_FROM * values.min()
    if metric.logarithmic and wide and plot.x != STEP:
        axes.set_yscale("log")
        if axes.patches:  # bars start at zero, which a logarithmic axis cannot show
            axes.set_ylim(positive.min() / 3, 2 * positive.max())
        round_log_ticks(axes.yaxis, number)
        return
    if metric.from_zero or metric.logarithmic:
        highest = float(values.max()) if values.size else 0.0
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.05 * highest))  # close points are not at the edge
    elif values.size and not axes.patches:
        axes.set_ylim(*span_of([axes.dataLim.intervaly]))
    plain_ticks(axes.yaxis)
    if axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def tick(place: str) -> str:
    value = float(place)
    return format_tokens(int(value)) if value.is_integer() and value >= 1024 else f"{value:g}"


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def number_first(word: str) -> tuple[float, str]:
    """Sorts numbers by size, then words."""
    return (float(word), "") if is_number(word) else (np.inf, word)
