"""What a trial that came to its end has measured, whoever ran it."""

import json
from dataclasses import dataclass, field
from typing import Any

from benchmarks.training.launch import Failed
from benchmarks.training.trials import OURS, Trial
from lightseq.training.metrics import METRICS, RUN, read_records

FACTS = ("schedule", "head_groups", "ulysses_size", "kernel", "transport", "remat", "compile")


@dataclass(frozen=True)
class Outcome:
    """Numbers of every step, warm-up included; memory is the worst rank's, None without a GPU."""

    step_seconds: list[float]
    losses: list[float]
    grad_norms: list[float]  # before clipping
    peak_memory_allocated_bytes: int | None
    peak_memory_reserved_bytes: int | None
    facts: dict[str, Any] = field(default_factory=dict)
    sequences: int = 1  # of a step


def read_outcome(trial: Trial) -> Outcome:
    """Raises Failed where a trial ended well but left too little behind."""
    try:
        outcome = read_run(trial) if trial.implementation == OURS else Outcome(**json.loads(trial.result.read_text()))
    except (OSError, ValueError, LookupError) as error:
        raise Failed(f"ended without its numbers ({type(error).__name__})") from error
    if len(outcome.step_seconds) != trial.setting.all_steps:
        raise Failed(
            f"{len(outcome.step_seconds)} of {trial.setting.all_steps} steps recorded; one is to be logged each"
        )
    return outcome


def read_run(trial: Trial) -> Outcome:
    """lightseq's trainer, from its own files. Its memory counts buffers outside of torch's allocator."""
    steps = read_records(trial.directory / METRICS)
    about = json.loads((trial.directory / RUN).read_text())
    last, compiled = steps[-1], about["config"]["torch_compile"]
    return Outcome(
        [step["step_seconds"] for step in steps],
        [step["loss"] for step in steps],
        [step["grad_norm"] for step in steps],
        last["peak_memory_allocated_bytes"],
        last["peak_memory_reserved_bytes"],
        {name: about.get(name) for name in FACTS} | {"compile": compiled},
        last["tokens"] // trial.length,
    )
