"""Knows what a figure may show of runs: each metric's key, the unit of its axis, and what a whole run comes to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightseq.profiling.trace import ON_HOST

from .runs import Run
from .summary import GIB, smoothed

STEP = "step"


@dataclass(frozen=True)
class Metric:
    """A key of the metrics in the unit of its axis."""

    key: str
    title: str
    unit: str
    scale: float = 1.0
    from_zero: bool = True
    logarithmic: bool = False  # over a setting, where the values spread that far
    of_profile: Callable[[Mapping[str, Any]], float] | None = None  # of a trace's summary, in the place of `key`


def phase_ms(phase: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda profile: sum(each["ms"] for each in profile.get("spent", ()) if each["phase"] == phase)


def exposed_ms(profile: Mapping[str, Any]) -> float:
    """With the waits for other ranks. NaN for a CPU, whose trace does not tell."""
    spent = profile.get("spent", ())
    if any(each["kind"] == ON_HOST for each in spent):
        return np.nan
    return sum(each["ms"] for each in spent if each["kind"] in ("attention's exchange", "collectives"))


def bandwidth(profile: Mapping[str, Any]) -> float:
    """NaN where nothing moved between GPUs."""
    moved = [each for each in profile.get("moved", ()) if "ranks" in each["kind"] or "another GPU" in each["kind"]]
    seconds = sum(each["seconds"] for each in moved)
    return sum(each["bytes"] for each in moved) / seconds / 1e9 if seconds else np.nan


METRICS: Mapping[str, Metric] = {
    "speed": Metric("tokens_per_second", "Throughput", "tokens per second, all ranks", logarithmic=True),
    "memory": Metric("peak_memory_allocated_bytes", "Peak memory", "GiB of the worst GPU", 1 / GIB),
    "mfu": Metric("mfu", "Model FLOPs utilization", "% of the chip's dense peak", 100.0),
    "latency": Metric("step_seconds", "Time of a step", "seconds", from_zero=False, logarithmic=True),
    "sent": Metric("comm_bytes", "Sent by attention", "GB a step, all ranks together", 1e-9),
    "time": Metric("step_seconds", "Training time", "seconds, all steps"),
    "loss": Metric("loss", "Training loss", "nats per token", from_zero=False),
    **{
        phase: Metric(phase, f"Time of a step's {phase} pass", "ms", from_zero=False, logarithmic=True, of_profile=of)
        for phase, of in (("forward", phase_ms("forward")), ("backward", phase_ms("backward")))
    },
    "update": Metric("update", "Time of a step's update", "ms", of_profile=phase_ms("update")),
    "communication": Metric("communication", "Communication that nothing hides", "ms a step", of_profile=exposed_ms),
    "bandwidth": Metric("bandwidth", "Between GPUs while anything moves", "GB/s", of_profile=bandwidth),
}

# Keys of metrics.jsonl end in their unit: what it is called on an axis, and the factor into it.
UNITS: Mapping[str, tuple[str, float]] = {"bytes": ("GB", 1e-9), "seconds": ("seconds", 1.0), "percent": ("%", 1.0)}


def metric_of(word: str) -> Metric:
    """One of the above, or a key of metrics.jsonl."""
    if word in METRICS:
        return METRICS[word]
    name, _, ending = word.rpartition("_")
    unit, scale = UNITS.get(ending, ("", 1.0))
    return Metric(word, (name if unit else word).replace("_", " "), unit or word.replace("_", " "), scale)


HOST_MEMORY = Metric("host_rss_bytes", "Peak memory", "GiB resident in one process", 1 / GIB)

# What a run comes to as a whole; of other metrics the median past the warm-up counts, and the range is drawn.
WHOLE: Mapping[str, Callable[[Run, np.ndarray], float]] = {
    "memory": lambda run, values: np.nanmax(values),
    # A record has the mean of the steps since the last one.
    "time": lambda run, values: np.nansum(values * np.diff(run.column(STEP), prepend=run.steps_before)),
    "loss": lambda run, values: smoothed(values)[-1],
}
