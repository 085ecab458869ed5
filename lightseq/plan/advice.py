"""Suggestions that make a run fit or a step faster, and texts that explain a plan.

Each suggestion is a plan of its own: the same run with other flags, more GPUs or another length.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from lightseq.config.train_config import TrainConfig
from lightseq.plan.breakdown import GIB
from lightseq.plan.make_plan import can_fit, make_plan
from lightseq.plan.plan import PLANNED_FLAGS, Plan, on_smaller_gpus, owners_of_offloaded_state, usable_gpu_bytes
from lightseq.plan.run import PlannedRun

K = 2**10
MAX_LENGTH, MAX_GPUS = 2**30, 512  # building schedules for more ranks takes minutes
MIN_SUGGESTION_GAIN = 0.02  # smallest share of a step's time that is worth a suggestion
RETRY_SHARE = 0.9  # share of memory in the next plan, if a run did not fit although its plan did


def longest(run: PlannedRun) -> int | None:
    """Returns the longest length that fits, a multiple of 1024 tokens from there on; None if no length fits."""

    def is_too_long(length: int) -> bool:
        return not can_fit(run.with_length(length))

    lengths = range(1, K) if is_too_long(K) else range(K, MAX_LENGTH + 1, K)
    fitting = bisect_left(lengths, True, key=is_too_long)
    return lengths[fitting - 1] if fitting else None


@dataclass(frozen=True)
class Change:
    """A change to a run and the plan with that change."""

    text: str  # such as `--optim adamw_8bit` or `8 GPUs`
    plan: Plan


def changes_to_fit(run: PlannedRun, length: int | None) -> list[Change]:
    """Returns changes that make a run fit: other memory flags or optimizer, the fewest GPUs, the longest `length`."""
    found = []
    for option in (_left_to_the_planner(run), _with_8_bit_states(run), _with_8_bit_states(_left_to_the_planner(run))):
        if (words := _changed_flags(run.config, option.config)) and (plan := make_plan(option)).fits:
            found.append(Change(words, plan))
            break
    if enough := _with_more_gpus(run):
        found.append(Change(f"{enough.run.hardware.gpus} GPUs", enough))
    if length and length < run.config.model_max_length:
        found.append(Change(f"--model_max_length {length}", make_plan(run.with_length(length))))
    return found


def faster_change(run: PlannedRun) -> Change | None:
    """Returns the given memory flags to leave out, if the planner's own choice saves 2% of a step's time."""
    option = _left_to_the_planner(run)
    if not (words := _changed_flags(run.config, option.config)):
        return None
    plan = make_plan(option)
    faster = plan.fits and plan.step_seconds <= (1 - MIN_SUGGESTION_GAIN) * make_plan(run).step_seconds
    return Change(words, plan) if faster else None


def _left_to_the_planner(run: PlannedRun) -> PlannedRun:
    """Returns the run without the memory flags that the planner could choose. Budgets stay: the user set them."""
    values: dict[str, Any] = {**dict.fromkeys(PLANNED_FLAGS), "offload": "auto", "gradient_checkpointing": None}
    return run.changed(config=replace(run.config, **values), state_offloaded=False, layers_with_state_on_gpu=0)


def _with_8_bit_states(run: PlannedRun) -> PlannedRun:
    is_adamw = run.config.optim.startswith("adamw_torch")
    return run.changed(config=replace(run.config, optim="adamw_8bit" if is_adamw else run.config.optim))


def _changed_flags(before: TrainConfig, after: TrainConfig) -> str:
    """Returns the flags to add and to leave out, such as `--optim adamw_8bit, leave out --remat`."""
    found = [] if after.optim == before.optim else [f"--optim {after.optim}"]
    names = (*PLANNED_FLAGS, "gradient_checkpointing")
    removed = [f"--{name}" for name in names if getattr(after, name) != getattr(before, name)]
    return ", ".join([*found, *([f"leave out {' '.join(removed)}"] if removed else [])])


def _with_more_gpus(run: PlannedRun) -> Plan | None:
    """Doubles the number of GPUs until the run fits; returns None beyond MAX_GPUS."""
    hardware, gpus = run.hardware, 2 * run.hardware.gpus
    while gpus <= MAX_GPUS and run.config.sequence_parallel_size is None:
        hosts = -(-gpus // hardware.gpus_per_host)
        whole_hosts = gpus if hosts == 1 else hosts * hardware.gpus_per_host
        more = run.changed(hardware=replace(hardware, gpus=whole_hosts))
        if can_fit(one_sequence_per_gpu(more)) and (plan := make_plan(more)).fits:
            return plan
        gpus *= 2
    return None


def one_sequence_per_gpu(run: PlannedRun) -> PlannedRun:
    """Returns a run with equally many tokens per GPU but one GPU per sequence: less memory, and no large schedule."""
    length = -(-run.config.model_max_length // run.sequence_ranks)
    config = replace(run.config, sequence_parallel_size=1, schedule="auto", ulysses_size=None, model_max_length=length)
    return run.changed(config=config)


# ---- notes of a run -------------------------------------------------------------------------------------------------


def plan_notes(plan: Plan) -> list[str]:
    """Returns a note on state that the planner moved to the host, and warnings about missing memory."""
    warnings = [f"warning: no memory plan fits: too little {missing}" for missing in plan.shortages]
    if not plan.run.state_offloaded:
        return warnings
    owners = owners_of_offloaded_state(plan.run)
    reason = "; nothing faster fits" if plan.fits else ""
    return [f"weights, gradients and optimizer state{owners} are in host memory{reason}", *warnings]


def out_of_memory(run: PlannedRun) -> list[str]:
    """Returns lines with the planned memory by purpose, and changes that would make the run fit.

    If the plan fits although the run did not, it counts too little; the changes then save a tenth of its total.
    """
    if (config := run.config).deepspeed:  # the planner does not know its state
        gpus = "more GPUs per sequence (--sequence_parallel_size), or a lower --model_max_length"
        return [f"to fit: offload_optimizer and offload_param in {config.deepspeed}, {gpus}"]
    plan, usable = make_plan(run), usable_gpu_bytes(run)
    room = f", {usable / GIB:.1f} GiB usable" if math.isfinite(usable) else ""
    lines = [f"planned peak memory per GPU ({plan.when}{room}):", *plan.parts.lines()]
    smaller = on_smaller_gpus(run, RETRY_SHARE * plan.parts.total) if plan.fits else run
    words = [
        f"{change.text} ({change.plan.parts.total / GIB:.1f} GiB per GPU)"
        for change in changes_to_fit(smaller, longest(smaller))
    ]
    if plan.fits and config.offload == "auto" and make_plan(smaller).fits:
        words.insert(0, f"--device_memory_budget {RETRY_SHARE * plan.parts.total / GIB:.1f}")
    return [*lines, f"to fit: {', or '.join(words) or 'more GPUs, or a smaller model'}"]
