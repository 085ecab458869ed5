"""Fit of a machine's rates to attention layers measured by `benchmarks/attention.py`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightseq.schedule.algorithms import SCHEDULES
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.timing import Rates, estimate
from lightseq.schedule.traffic import Traffic, count_traffic

OURS, ONE_GPU = "lightseq", "single-gpu"  # implementations whose records are read
ROUNDS = 40
TYPICAL_ERROR = 0.02  # points further off count less
PULL = 1e-2  # regularisation towards the starting rates, for rates that no point determines
LARGEST_STEP = 1.0  # of a logarithm in one round


@dataclass(frozen=True)
class Point:
    """One measured layer, forward and backward."""

    traffic: Traffic
    shape: AttentionShape
    transport: str
    kernel: str
    seconds: float
    keep_gathered: bool = False

    def predicted(self, rates: Rates) -> float:
        return estimate(self.traffic, self.shape, rates, self.keep_gathered).seconds


def read_points(path: Path) -> list[Point]:
    """Reads the measured layers of a JSONL file, without its header and skipped points."""
    points = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line) if line.strip() else {}
            if record.get("seconds_median") and record.get("implementation") in (OURS, ONE_GPU):
                points.append(make_point(record))
        except KeyError as error:
            raise ValueError(f"{path} line {number} has no {error}; give records of benchmarks/attention.py") from None
        except (json.JSONDecodeError, TypeError, AttributeError):
            raise ValueError(f"{path} line {number} is no record of benchmarks/attention.py") from None
    if not points:
        raise ValueError(f"{path} holds no times of lightseq's attention; give records of benchmarks/attention.py")
    return points


def make_point(record: Mapping[str, Any]) -> Point:
    """Makes the point of a record. All its ranks are on one host, as the symmetric transport requires."""
    alone = record["implementation"] == ONE_GPU
    world = 1 if alone else record["world"]
    size = None if alone or SCHEDULES[record["schedule"]].ulysses_group == "all" else record["ulysses_size"]
    groups = 1 if alone else record["head_groups"] or 1
    shape = AttentionShape(
        record["length"], record["heads"], record["kv_heads"], record["head_dim"], record.get("batch", 1)
    )
    counted = count_traffic("ulysses" if alone else record["schedule"], world, world, groups, size)
    seconds, keeps_gathered = float(record["seconds_median"]), bool(record.get("keep_gathered"))
    return Point(counted, shape, record["transport"] or "", record["kernel"], seconds, keeps_gathered)


def fit_rates(points: Sequence[Point], start: Rates) -> Rates:
    """Fits the rates of least relative error over all points; outliers count less (Cauchy weights).

    Damped Gauss-Newton on the logarithms, which keeps rates positive.
    """
    origin = np.log(astuple(start))
    x, damping = origin.copy(), 1e-3
    wrong = _errors(points, x)
    for _ in range(ROUNDS):
        weight = 1 / (1 + (wrong / TYPICAL_ERROR) ** 2)
        slope = np.stack([(_errors(points, x + step) - wrong) / 1e-4 for step in 1e-4 * np.eye(len(x))], axis=1)
        square = slope.T @ (weight[:, None] * slope) + PULL**2 * np.eye(len(x))
        down = slope.T @ (weight * wrong) + PULL**2 * (x - origin)
        step = -np.linalg.solve(square + damping * np.diag(np.diag(square)), down)
        step = np.clip(step, -LARGEST_STEP, LARGEST_STEP)
        tried = _errors(points, x + step)
        if _loss(tried, x + step - origin) < _loss(wrong, x - origin):
            x, wrong, damping = x + step, tried, damping / 3
        else:
            damping *= 4
    return Rates(*(float(value) for value in np.exp(x)))


def fit_transports(points: Iterable[Point], starts: Mapping[str, Rates], kernel: str | None) -> dict[str, Rates]:
    """Fits the rates of every transport of `starts` that was measured. Points of one GPU count for all of them."""
    points = list(points)
    kernels = sorted({point.kernel for point in points})
    if kernel is None and len(kernels) > 1:
        raise ValueError(f"layers of kernels {', '.join(kernels)} were measured; choose one with --kernel")
    if kernel not in (None, *kernels):
        raise ValueError(f"no layer of kernel {kernel} was measured, only of {', '.join(kernels)}")
    mine = [point for point in points if kernel in (None, point.kernel)]
    found = {name for point in mine if (name := point.transport) in starts}
    if not found:
        raise ValueError(f"no layer over {' or '.join(starts)} was measured; give records taken on several GPUs")
    return {
        name: fit_rates([p for p in mine if p.transport in (name, "")], starts[name])
        for name in starts
        if name in found
    }


def _errors(points: Sequence[Point], x: np.ndarray) -> np.ndarray:
    """Returns the logarithms of predicted over measured seconds."""
    rates = Rates(*np.exp(x))
    return np.array([np.log(p.predicted(rates) / p.seconds) for p in points])


def _loss(errors: np.ndarray, moved: np.ndarray) -> float:
    robust = TYPICAL_ERROR**2 * np.log1p((errors / TYPICAL_ERROR) ** 2)
    return float(robust.sum() + PULL**2 * (moved**2).sum())
