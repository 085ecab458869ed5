"""Knows the records of the benchmark of whole training steps: which there are, and which of them may be compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jsonl import read_lines, readable

FLOOR = "plain"
OURS = "lightseq"


@dataclass(frozen=True, order=True)
class Setting:
    """What must be equal for two points to stand in one table."""

    model: str
    layers: int
    world: int
    dtype: str
    device: str

    @property
    def title(self) -> str:
        return f"{self.model}, {self.layers} layers, {self.world} × {self.device}, {self.dtype}"


@dataclass(frozen=True)
class Step:
    """One implementation at one length; numbers are None where it was skipped, or the machine knew none."""

    setting: Setting
    implementation: str
    label: str
    length: int
    tokens_per_second: float | None
    bounds: tuple[float, float]  # of tokens per second: the slowest and the fastest step
    mfu: float | None
    model_tflops_per_gpu: float | None
    peak_memory_bytes: int | None
    losses: tuple[float, float] | None  # first and last
    losses_finite: bool
    skipped: str | None

    @property
    def spread(self) -> float:
        """Fastest less slowest step, as a share of the median."""
        assert self.tokens_per_second is not None
        return (self.bounds[1] - self.bounds[0]) / self.tokens_per_second


@dataclass(frozen=True)
class Comparison:
    """Points that may be compared, in the order of length and then of speed, what was skipped last."""

    setting: Setting
    steps: tuple[Step, ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({step.length for step in self.steps})

    @property
    def labels(self) -> list[str]:
        """lightseq's rows first, as they were measured, and the floor next."""
        names = {step.label: step.implementation for step in self.steps}
        rank = {OURS: 0, FLOOR: 1}
        return sorted(names, key=lambda label: (rank.get(names[label], 2), names[label], len(label), label))

    def at(self, length: int, label: str) -> Step | None:
        return next((step for step in self.steps if (step.length, step.label) == (length, label)), None)

    def ratio(self, step: Step) -> float | None:
        """How many times as fast as the floor."""
        floor = self.at(step.length, FLOOR)
        if floor is None or not floor.tokens_per_second or not step.tokens_per_second:
            return None
        return step.tokens_per_second / floor.tokens_per_second


def read_comparisons(paths: Sequence[Path], notes: list[str]) -> list[Comparison]:
    """One comparison a setting. A point measured twice counts as it was measured last."""
    found: dict[Setting, dict[tuple[int, str], Step]] = {}
    for file in readable(paths, lambda path: read_lines(path, step_of, notes), notes):
        for step in file:
            found.setdefault(step.setting, {})[step.length, step.label] = step
    if not found:
        raise ValueError(f"no points in {', '.join(map(str, paths))}; the benchmark has measured nothing yet")
    return [Comparison(setting, ordered(found[setting].values())) for setting in sorted(found)]


def ordered(steps: Iterable[Step]) -> tuple[Step, ...]:
    return tuple(sorted(steps, key=lambda s: (s.length, -(s.tokens_per_second or 0.0), s.label)))


def step_of(record: Mapping[str, Any]) -> Step:
    if record.get("benchmark") != "step":
        raise ValueError("is not a record of benchmarks/step.py")
    try:
        facts = {key: record[key] for key in ("model", "layers", "world", "dtype")}
        rate, losses = record["tokens_per_second"], (record["first_loss"], record["last_loss"])
        bounds = record["tokens_per_second_lowest"], record["tokens_per_second_highest"]
        return Step(
            setting=Setting(**facts, device=str(record["hardware"].get("device", "unknown device"))),
            implementation=record["implementation"],
            label=record["label"],
            length=record["length"],
            tokens_per_second=rate,
            bounds=(0.0, 0.0) if rate is None else bounds,
            mfu=record["mfu"],
            model_tflops_per_gpu=record["model_tflops_per_gpu"],
            peak_memory_bytes=record["peak_memory_allocated_bytes"],
            losses=None if None in losses else losses,
            losses_finite=record["losses_finite"] is not False,
            skipped=record["skipped"],
        )
    except KeyError as error:
        raise ValueError(f"has no {error}; it should be a record of benchmarks/step.py") from None
