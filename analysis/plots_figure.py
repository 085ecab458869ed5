"""Metrics, and figures of many runs: curves by step, lines and bars by setting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lightseq.config.lengths import format_tokens
from lightseq.profiling.trace import ON_HOST

from .drawing import (
    LOG_FROM,
    SMALL_TITLE,
    Point,
    bars_figure,
    draw_bars,
    draw_curve,
    draw_line,
    new_figure,
    plain_ticks,
    span_of,
    step_axis,
    value_axis,
)
from .output import GIB
from .plots_file import STEP, Plot
from .records import Record
from .runs import Run, past_warmup, phrase, smooth
from .style import looks

# ---- metrics --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A key of metrics.jsonl with its title and unit.

    `whole` reduces a run to one number, NaN if it has none; the default is the median after warm-up, drawn with its
    range. A metric without a key is of the traced steps as a whole.
    """

    key: str
    title: str
    unit: str
    scale: float = 1.0
    from_zero: bool = True
    logarithmic: bool = False  # by setting, if the values are far apart
    whole: Callable[[Run, np.ndarray], float] | None = None
    remedy: str = "choose another metric"  # where no run has it

    def column(self, run: Run) -> np.ndarray:
        return self.scale * run.column(self.key)

    def point(self, run: Run, x: str) -> Point:
        """Returns a run's value at a setting."""
        if self.whole is not None:
            value = self.whole(run, self.column(run)) if not self.key or run.has(self.key) else np.nan
            return Point(x, value, value, value)
        known = past_warmup(self.scale * run.unprofiled(self.key))
        if not known.size:
            return Point(x, np.nan, np.nan, np.nan)
        return Point(x, float(np.median(known)), float(known.min()), float(known.max()))


def traced(title: str, unit: str, value: Callable[[Record], float], **options: bool) -> Metric:
    """Returns a metric that `value` reads from the summary of a trace."""

    def whole(run: Run, column: np.ndarray) -> float:
        return value(run.profile) if run.profile else np.nan

    return Metric("", title, unit, whole=whole, remedy="train on GPUs with --profile_steps", **options)


def phase_metric(phase: str, title: str, **options: bool) -> Metric:
    def milliseconds(profile: Record) -> float:
        return float(sum(part["ms"] for part in profile.get("spent", ()) if part["phase"] == phase))

    return traced(title, "ms per step", milliseconds, **options)


def exposed_ms(profile: Record) -> float:
    """Returns milliseconds of communication and waiting that no kernel hides; NaN for traces of a CPU."""
    spent = profile.get("spent", ())
    if any(part["kind"] == ON_HOST for part in spent):
        return np.nan
    return float(sum(part["ms"] for part in spent if part["kind"] in ("attention's exchange", "collectives")))


def bandwidth(profile: Record) -> float:
    """Returns GB/s between GPUs; NaN if GPUs exchanged nothing."""
    moved = [each for each in profile.get("moved", ()) if "ranks" in each["kind"] or "another GPU" in each["kind"]]
    seconds = sum(each["seconds"] for each in moved)
    return sum(each["bytes"] for each in moved) / seconds / 1e9 if seconds else np.nan


def total_seconds(run: Run, step_seconds: np.ndarray) -> float:
    """Returns the time of all steps, NaN if the run is not finished.

    A record has the mean over the steps since the previous record.
    """
    steps = np.diff(run.column("step"), prepend=run.steps_before)
    return float(np.nansum(step_seconds * steps)) if run.is_finished else np.nan


def peak(run: Run, values: np.ndarray) -> float:
    return float(np.nanmax(values))


def last_smoothed(run: Run, values: np.ndarray) -> float:
    return float(smooth(values)[-1])


HOST_MEMORY = Metric("host_rss_bytes", "Peak memory", "GiB resident per process", 1 / GIB, whole=peak)
METRICS: Mapping[str, Metric] = {
    "speed": Metric("tokens_per_second", "Throughput", "tokens per second, all ranks", logarithmic=True),
    "memory": Metric("peak_memory_allocated_bytes", "Peak memory", "GiB of the fullest GPU", 1 / GIB, whole=peak),
    "mfu": Metric("mfu", "Model FLOPs utilization", "% of the chip's dense peak", 100.0),
    "model_tflops_per_gpu": Metric("model_tflops_per_gpu", "Model FLOP/s", "model TFLOP/s per GPU (or CPU process)"),
    "latency": Metric("step_seconds", "Step time", "seconds", from_zero=False, logarithmic=True),
    "sent": Metric("comm_bytes", "Sent by attention", "GB per step, all ranks", 1e-9),
    "time": Metric("step_seconds", "Training time", "seconds, all steps", whole=total_seconds, remedy="finish a run"),
    "loss": Metric("loss", "Training loss", "nats per token", from_zero=False, whole=last_smoothed),
    "forward": phase_metric("forward", "Forward pass", from_zero=False, logarithmic=True),
    "backward": phase_metric("backward", "Backward pass", from_zero=False, logarithmic=True),
    "update": phase_metric("update", "Optimizer update"),
    "communication": traced("Exposed communication", "ms per step", exposed_ms),
    "bandwidth": traced("Bandwidth between GPUs during transfers", "GB/s", bandwidth),
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


# ---- axes -----------------------------------------------------------------------------------------------------------


# Labels of the horizontal axis; others are the setting's name.
LABELS: Mapping[str, str] = {
    "model_max_length": "tokens in the sequence",
    "tokens_per_rank": "tokens per rank",
    "world_size": "ranks (GPUs, or processes on a CPU)",
    "per_device_train_batch_size": "batch, sequences per rank",
    "scaling_factor": "scaling factor of the model, 1 is the smallest",
}
COINCIDE = 0.01  # of the axis; closer curves are one stroke


def draw_steps(axes: Axes, groups: Mapping[tuple[str, ...], Sequence[Run]], metric: Metric) -> None:
    """Plots a curve per run, with markers on different steps, and says how far curves are apart that coincide."""
    step_axis(axes)
    for place, ((name, runs), look) in enumerate(zip(groups.items(), looks(list(groups)), strict=True)):
        for run in runs:
            label = ", ".join(name) if run is runs[0] else None
            look |= {"place": place, "count": len(groups), "label": label}
            draw_curve(axes, run.column("step"), metric.column(run), **look)
    curves = [dict(line.get_xydata().tolist()) for line in axes.lines]
    common = set.intersection(*map(set, curves))
    values = np.array([[curve[step] for step in common] for curve in curves])
    if len(curves) > 1 and np.isfinite(values).all() and values.size:
        apart = float(np.ptp(values, axis=0).max())
        if apart < COINCIDE * np.ptp(values):
            text = f"at most {apart:.2g} apart" if apart else "equal"
            axes.set_title(f"{len(curves)} curves: {text}", **SMALL_TITLE)


def setting_figure(key: str, groups: Mapping[tuple[str, ...], Sequence[Point]]) -> Figure:
    """Plots lines over a numeric setting, and bars otherwise."""
    places = sorted({point.x for points in groups.values() for point in points}, key=number_first)
    names = {", ".join(name): points for name, points in groups.items()}
    shades = looks(list(groups))
    if len(places) == 1 or not all(map(is_number, places)):
        if len(groups) == 1:
            bars = {
                "": {phrase(key, point.x): point for point in sorted(*names.values(), key=lambda p: places.index(p.x))}
            }
            colors = {name: shades[0]["color"] for name in bars[""]}
        else:
            bars = {
                phrase(key, place): {
                    name: point for name, points in names.items() for point in points if point.x == place
                }
                for place in places
            }
            colors = {name: look["color"] for name, look in zip(names, shades, strict=True)}
        out = bars_figure(bars)
        draw_bars(out.subplots(), bars, colors)
        return out
    out = new_figure(8, 4.8)
    axes = out.subplots()
    for (name, points), look in zip(names.items(), shades, strict=True):
        draw_line(axes, sorted(point._replace(x=float(point.x)) for point in points), name, **look)
    axes.set_xlabel(LABELS.get(key, key.replace("_", " ")))
    if 0 < LOG_FROM * float(places[0]) <= float(places[-1]):
        axes.set_xscale("log", base=2)
    setting_ticks(axes, places)
    return out


def setting_ticks(axes: Axes, places: Sequence[str]) -> None:
    """Puts a tick at each value, and its text where there is room beside the text before it."""
    to_axes = axes.transScale + axes.transLimits
    texts, end = [], -1.0
    for place in places:
        text = tick(place)
        middle, half = to_axes.transform((float(place), 1.0))[0], 0.008 * len(text)
        texts.append(text if middle - half > end else "")
        end = middle + half if texts[-1] else end
    axes.set_xticks([float(place) for place in places], texts)
    axes.xaxis.set_minor_locator(NullLocator())


def set_value_scale(axes: Axes, plot: Plot, metric: Metric, values: np.ndarray) -> None:
    """Sets limits, scale and ticks of the axis of values.

    Curves by step are never logarithmic: a first step that compiles would always make them so.
    """
    by_setting = plot.x != STEP
    if metric.from_zero or metric.logarithmic or axes.patches or not values.size:
        value_axis(axes, values, may_be_logarithmic=metric.logarithmic and by_setting)
    else:
        axes.set_ylim(*span_of([axes.dataLim.intervaly]))
        plain_ticks(axes.yaxis)


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
