"""Metrics of runs with their titles and units: columns of metrics.jsonl, and numbers of traced steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lightseq.profiling.trace import ON_HOST

from .drawing import Point
from .output import GIB
from .records import Record
from .runs import Run, past_warmup, smooth


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


def peak(_run: Run, values: np.ndarray) -> float:
    return float(np.nanmax(values))


METRICS: Mapping[str, Metric] = {
    "speed": Metric("tokens_per_second", "Throughput", "tokens per second, all ranks", logarithmic=True),
    "memory": Metric("peak_memory_allocated_bytes", "GPU memory", "GiB, peak of the fullest GPU", 1 / GIB, whole=peak),
    "host_memory": Metric("host_rss_bytes", "Host memory", "GiB resident per process", 1 / GIB, whole=peak),
    "mfu": Metric(
        "mfu", "Model FLOPs utilization (MFU)", "% of the chip's dense peak (FP8 with --fp8, else bf16)", 100.0
    ),
    "model_tflops_per_gpu": Metric("model_tflops_per_gpu", "Model FLOP/s", "model TFLOP/s per GPU (or CPU process)"),
    "latency": Metric("step_seconds", "Step time", "seconds per step", from_zero=False, logarithmic=True),
    "sent": Metric("comm_bytes", "Sent by attention", "GB per step, all ranks", 1e-9),
    "time": Metric("step_seconds", "Training time", "seconds, all steps", whole=total_seconds, remedy="finish a run"),
    "grad_norm": Metric("grad_norm", "Gradient norm", "before clipping"),
    "learning_rate": Metric("learning_rate", "Learning rate", "per step of the optimizer"),
    "loss": Metric(
        "loss", "Training loss", "nats per token", from_zero=False, whole=lambda _, values: float(smooth(values)[-1])
    ),
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
