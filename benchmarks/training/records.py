"""The records of a benchmark of whole steps: one object a trial, and the table of them at the end."""

import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.report import libraries, packages
from benchmarks.training.outcome import FACTS, Outcome
from benchmarks.training.trials import Trial
from lightseq.config.lengths import shown
from lightseq.models.flops import mfu, model_flops, peak_flops_per_second
from lightseq.training.metrics import hardware, versions

MEASURED = (
    *("tokens_per_second", "tokens_per_second_lowest", "tokens_per_second_highest", "step_seconds"),
    *("model_tflops_per_gpu", "mfu", "peak_memory_allocated_bytes", "peak_memory_reserved_bytes"),
    *("first_loss", "last_loss", "losses_finite", "first_grad_norm"),
)
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What a benchmark runs on."""

    on_gpu: bool
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]


def look_at_machine() -> Machine:
    """Asked in a process of its own: to name its GPU, a process takes memory there for as long as it lives."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_look).result()


def _look() -> Machine:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    about = {key: value for key, value in hardware(device).items() if key != "host"}
    return Machine(on_gpu, about, {**versions(), **libraries(), **packages()})


@dataclass(frozen=True)
class Provenance:
    """What every record of one benchmark says alike."""

    command: str
    commit: str
    date: str
    machine: Machine


def record(trial: Trial, outcome: Outcome | None, skipped: str | None, provenance: Provenance) -> dict[str, Any]:
    """Everything known of a trial; what was not measured is null."""
    s = trial.setting
    return {
        "benchmark": "step",
        "implementation": trial.implementation,
        "label": trial.label,
        "model": s.name,
        "layers": s.config.num_hidden_layers,
        "length": trial.length,
        "world": s.world,
        "dtype": "bfloat16" if s.on_gpu else "float32",
        **dict.fromkeys(MEASURED),
        **({name: outcome.facts.get(name) for name in FACTS} if outcome else dict.fromkeys(FACTS)),
        **(numbers(trial, outcome, provenance.machine) if outcome else {}),
        "warmup": s.warmup,
        "steps": s.steps,
        "skipped": skipped,
        "trial_command": trial.shown_command,
        "command": provenance.command,
        "commit": provenance.commit,
        "date": provenance.date,
        "hardware": dict(provenance.machine.hardware),
        "versions": dict(provenance.machine.versions),
    }


def numbers(trial: Trial, outcome: Outcome, machine: Machine) -> dict[str, Any]:
    """Medians past the warm-up. One formula for everybody's operations: lightseq/models/flops.py."""
    s = trial.setting
    seconds = outcome.step_seconds[s.warmup :]
    median = statistics.median(seconds)
    tokens, flops = outcome.sequences * trial.length, model_flops(s.config, trial.length, outcome.sequences)
    return {
        "tokens_per_second": tokens / median,
        "tokens_per_second_lowest": tokens / max(seconds),
        "tokens_per_second_highest": tokens / min(seconds),
        "step_seconds": median,
        "model_tflops_per_gpu": flops / median / s.world / 1e12,
        "mfu": mfu(flops, median, s.world, peak_flops_per_second(machine.hardware["device"])),
        "peak_memory_allocated_bytes": outcome.peak_memory_allocated_bytes,
        "peak_memory_reserved_bytes": outcome.peak_memory_reserved_bytes,
        "first_loss": json_number(outcome.losses[0]),
        "last_loss": json_number(outcome.losses[-1]),
        "losses_finite": all(map(math.isfinite, outcome.losses)),
        "first_grad_norm": json_number(outcome.grad_norms[0]),
    }


def json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- the terminal ---------------------------------------------------------------------------------------------------


def line(point: Mapping[str, Any]) -> str:
    """One trial as it ends."""
    head = f"{shown(point['length']):>6}  {point['label']}: "
    if point["skipped"]:
        return f"{head}skipped: {point['skipped']}"
    pace = f"{point['tokens_per_second']:,.0f} tokens/s, {point['step_seconds']:.3g} s a step"
    if not point["losses_finite"]:
        return f"{head}{pace}, losses not finite"
    return f"{head}{pace}, loss {point['first_loss']:.4f} → {point['last_loss']:.4f}"


def table(points: Sequence[Mapping[str, Any]]) -> Table:
    out = Table(box=box.SIMPLE_HEAD)
    for name in ("tokens", "", "tokens/s", "from–to", "MFU", "GiB", "last loss"):
        out.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    for point in points:
        out.add_row(shown(point["length"]), point["label"], *cells(point))
    return out


def cells(point: Mapping[str, Any]) -> list[str]:
    if point["skipped"]:
        return ["skipped"]
    peak, share = point["peak_memory_allocated_bytes"], point["mfu"]
    return [
        f"{point['tokens_per_second']:,.0f}",
        f"{point['tokens_per_second_lowest']:,.0f}–{point['tokens_per_second_highest']:,.0f}",
        f"{share:.1%}" if share is not None else "-",
        f"{peak / GIB:.1f}" if peak is not None else "-",
        f"{point['last_loss']:.4f}" if point["losses_finite"] else "not finite",
    ]
