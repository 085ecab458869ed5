"""Suggestions that make a run fit or a step faster, and texts that explain a plan.

Each suggestion is a plan of its own: the same run with other flags, more GPUs or another length.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedConfig

from lightseq.config.remat_policies import STORE_LINEARS, STORE_MLP
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.mesh import World
from lightseq.memory.planner.breakdown import GIB
from lightseq.memory.planner.plan import Plan, can_fit, make_plan, usable_gpu_bytes
from lightseq.memory.planner.rates import OUTSIDE_BYTES, SLACK, chip_of_device
from lightseq.memory.planner.run import PlannedRun, planned_run
from lightseq.modules.tiled import KNOWN

K = 2**10
MAX_LENGTH, MAX_GPUS = 2**30, 512  # building schedules for more ranks takes minutes
LEAST_GAIN = 0.02  # smallest share of a step's time that is worth a suggestion
SMALLER = 0.9  # of the planned memory, for a run that did not fit although its plan does
LEAST_GAIN_SECONDS = 120.0  # over the rest of the run, about as long as compilation takes


def longest(run: PlannedRun) -> int | None:
    """Returns the longest length that fits, a multiple of 1024 tokens from there on; None if no length fits."""
    step = K if can_fit(run.with_length(K)) else 1
    if not can_fit(run.with_length(step)):
        return None
    low = step
    while low < MAX_LENGTH and can_fit(run.with_length(2 * low)):
        low *= 2
    high = 2 * low
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if can_fit(run.with_length(middle)) else (low, middle)
    return low


@dataclass(frozen=True)
class Change:
    """A change to a run, as text, and the plan with that change."""

    words: str
    plan: Plan


def changes_to_fit(run: PlannedRun) -> list[Change]:
    """Returns changes that make a run fit: the fewest flags (the fastest such), the fewest GPUs, the longest length."""
    asked, run = run.config, _without_device_budget(run)
    found = []
    policies, offloads = _remat_policies(run), ["none", "activations", "optimizer", "both", "auto"]
    tile_layers = [False, True] if run.architecture.layer_class in KNOWN else [False]
    optims = [run.config.optim, "adamw_8bit"]
    variants = _variants(
        run, remat=policies, offload=offloads, layers_per_checkpoint=[1, 4], tile_layers=tile_layers, optim=optims
    )
    fitting = [(count, plan) for count, changed in variants if (plan := make_plan(changed)).fits]
    if fitting:
        _, plan = min(fitting, key=lambda option: (option[0], option[1].step_seconds))
        found.append(Change(_changed_flags(asked, plan.run.config), plan))
    if enough := _with_more_gpus(run):
        found.append(Change(f"{enough.run.hardware.gpus} GPUs", enough))
    if (length := longest(run)) and length < asked.model_max_length:
        found.append(Change(f"--model_max_length {length}", make_plan(run.with_length(length))))
    return found


def faster_changes(run: PlannedRun) -> list[Change]:
    """Returns the fewest flags that fit and shorten a step by 2%, and the fastest flags if they save 2% more.

    The flags never change the optimizer, and move state to the host only with `--offload auto`.
    """
    config, fastest, found = run.config, make_plan(run).step_seconds, []
    variants = _variants(
        run,
        remat=_remat_policies(run),
        offload=["none", "activations", "auto", config.offload],
        layers_per_checkpoint=[1, config.layers_per_checkpoint],
        tile_layers=[False, config.tile_layers],
    )
    fitting = [(count, plan) for count, changed in variants if (plan := make_plan(changed)).fits]
    for fewest_flags in (True, False):
        faster = [(n, plan) for n, plan in fitting if plan.step_seconds <= (1 - LEAST_GAIN) * fastest]
        if faster:
            _, plan = min(faster, key=lambda option: (option[0] if fewest_flags else 0, option[1].step_seconds))
            found.append(Change(_changed_flags(config, plan.run.config), plan))
            fastest = plan.step_seconds
    return found


def _variants(run: PlannedRun, **choices: list[Any]) -> Iterator[tuple[int, PlannedRun]]:
    """Yields the run with every other valid combination of flags, and the number of flags that changed."""
    asked = {**vars(run.config), "remat": run.config.remat_policy}
    choices["torch_compile"] = [run.config.torch_compile, True]
    for values in product(*(dict.fromkeys(values) for values in choices.values())):
        wanted = dict(zip(choices, values, strict=True))
        if count := sum(asked[name] != value for name, value in wanted.items()):
            try:
                config = replace(run.config, **wanted, gradient_checkpointing=None)
            except ValueError:
                continue  # the flags exclude each other
            yield count, replace(run, config=config)


def _remat_policies(run: PlannedRun) -> list[str]:
    can_store_mlp, plain_projections = run.architecture.can_store_mlp, run.architecture.plain_projections
    mlp = [*([STORE_LINEARS] if plain_projections else []), STORE_MLP] if can_store_mlp else []
    return ["none", *mlp, "attention", "full"]


def _with_more_gpus(run: PlannedRun) -> Plan | None:
    """Doubles the number of GPUs until the run fits; returns None beyond MAX_GPUS."""
    hardware, gpus = run.hardware, 2 * run.hardware.gpus
    while gpus <= MAX_GPUS and run.config.sequence_parallel_size is None:
        hosts = -(-gpus // hardware.gpus_per_host)
        whole_hosts = gpus if hosts == 1 else hosts * hardware.gpus_per_host
        more = replace(run, hardware=replace(hardware, gpus=whole_hosts))
        if can_fit(one_sequence_per_gpu(more)) and (plan := make_plan(more)).fits:
            return plan
        gpus *= 2
    return None


def one_sequence_per_gpu(run: PlannedRun) -> PlannedRun:
    """Returns a run with equally many tokens per GPU but one GPU per sequence: less memory, and no large schedule."""
    length = -(-run.config.model_max_length // run.sequence_ranks)
    config = replace(run.config, sequence_parallel_size=1, schedule="auto", ulysses_size=None, model_max_length=length)
    return replace(run, config=config)


def _without_device_budget(run: PlannedRun) -> PlannedRun:
    """Replaces `--device_memory_budget`, which only `--offload auto` accepts, by a smaller GPU."""
    return _on_smaller_gpus(replace(run, config=replace(run.config, device_memory_budget=None)), usable_gpu_bytes(run))


def _on_smaller_gpus(run: PlannedRun, usable: float) -> PlannedRun:
    """Returns the run on GPUs with `usable` bytes for tensors."""
    return replace(run, hardware=replace(run.hardware, gpu_memory=usable / (1 - SLACK) + OUTSIDE_BYTES))


def _changed_flags(before: TrainConfig, after: TrainConfig) -> str:
    """Returns the flags to add and to remove, such as `--offload both without --gradient_checkpointing`."""
    names = ("torch_compile", "offload", "layers_per_checkpoint", "tile_layers", "optim")
    flags = [f"--{name} {getattr(after, name)}" for name in names if getattr(after, name) != getattr(before, name)]
    if after.remat_policy != before.remat_policy:
        flags.append(f"--remat {after.remat_policy}")
        if before.gradient_checkpointing is not None:
            flags.append("without --gradient_checkpointing")
    if before.device_memory_budget is not None and after.offload != "auto":
        flags.append("without --device_memory_budget")
    return " ".join(flags)


# ---- notes of a run -------------------------------------------------------------------------------------------------


def describe_placement(plan: Plan) -> str:
    run = plan.run
    grouped = f"; {run.group_size} layers per checkpoint" if run.group_size > 1 else ""
    state = f"; weights and state{_owners_of_offloaded_state(run)} in host memory" if run.state_offloaded else ""
    return f"{plan.placement.words} (remat {run.config.remat_policy}{grouped}){state}"


def _owners_of_offloaded_state(run: PlannedRun) -> str:
    """Returns ` of` and the parts of the model with state on the host; empty if that is the whole model."""
    resident = run.layers_with_state_on_gpu
    if not resident:
        return ""
    layers = f"layers {resident}-{run.layers - 1}, " if resident < run.layers else ""
    return f" of {layers}embeddings and head"


def auto_notes(plan: Plan) -> list[str]:
    """Returns a note on state that `--offload auto` moved to the host, and warnings about missing memory."""
    warnings = [f"warning: --offload auto found no plan that fits: too little {missing}" for missing in plan.shortages]
    if not plan.run.state_offloaded:
        return warnings
    owners = _owners_of_offloaded_state(plan.run)
    reason = "; nothing faster fits" if plan.fits else ""
    return [f"--offload auto: weights, gradients and optimizer state{owners} are in host memory{reason}", *warnings]


def faster_notes(run: PlannedRun, world: World, steps: int) -> list[str]:
    """Returns a note on flags that would save over two minutes in the remaining `steps`, on GPUs of known rates."""
    if world.device.type != "cuda" or chip_of_device(torch.cuda.get_device_name(world.device)) is None:
        return []
    run = replace(run, state_offloaded=False, layers_with_state_on_gpu=0)  # the run before `--offload auto` changed it
    asked = make_plan(run)
    if not asked.fits or steps * asked.step_seconds <= LEAST_GAIN_SECONDS:
        return []
    worth = [
        f"{change.words} ({change.plan.step_seconds:.3g} s, {change.plan.parts.total / GIB:.1f} GiB per GPU)"
        for change in faster_changes(run)
        if steps * (asked.step_seconds - change.plan.step_seconds) > LEAST_GAIN_SECONDS
    ]
    if not worth:
        return []
    return [f"a step is planned to take {asked.step_seconds:.3g} s; faster: {', or '.join(worth)}"]


def out_of_memory(config: TrainConfig, model: PreTrainedConfig, world: World) -> list[str]:
    """Returns lines with the planned memory by purpose, and changes that would make the run fit.

    If the plan fits although the run did not, it counts too little; the changes then save a tenth of its total.
    """
    if config.deepspeed:  # the planner does not know its state
        gpus = "more GPUs per sequence (--sequence_parallel_size), or a lower --model_max_length"
        return [f"to fit: offload_optimizer and offload_param in {config.deepspeed}, {gpus}"]
    run = planned_run(config, model, world)
    plan, usable = make_plan(run), usable_gpu_bytes(run)
    room = f", {usable / GIB:.1f} GiB usable" if math.isfinite(usable) else ""
    lines = [f"planned peak memory per GPU ({plan.when}{room}):", *plan.parts.lines()]
    changes = changes_to_fit(_on_smaller_gpus(run, SMALLER * plan.parts.total) if plan.fits else run)
    words = [f"{change.words} ({change.plan.parts.total / GIB:.1f} GiB per GPU)" for change in changes]
    if plan.fits and config.offload == "auto":
        words.insert(0, f"--device_memory_budget {SMALLER * plan.parts.total / GIB:.1f}")
    return [*lines, f"to fit: {', or '.join(words) or 'more GPUs, or a smaller model'}"]
