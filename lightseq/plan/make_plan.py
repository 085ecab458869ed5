"""Choice of a plan: the fastest combination of the memory flags left to the planner that fits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.config.remat_policies import POLICIES, STORE_LINEARS, STORE_MLP
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import from_rank_0, on_all_ranks
from lightseq.distributed.host_memory import free_host_memory
from lightseq.distributed.world import World
from lightseq.memory.placement import ACTIONS, KEEP, RECOMPUTED, Placement
from lightseq.parts.tiled import TILEABLE_LAYER_CLASSES
from lightseq.plan.hardware import Hardware, hardware_here
from lightseq.plan.plan import (
    PLANNED_FLAGS,
    Plan,
    on_smaller_gpus,
    plan_as_given,
    usable_gpu_bytes,
    without_device_budget,
)
from lightseq.plan.rates import PROCESS_BYTES
from lightseq.plan.run import PlannedRun
from lightseq.plan.step_time import WAITING
from lightseq.plan.weights import holds_packed
from lightseq.utils.formatting import check_names

STATE_STEPS = 8  # steps in the number of layers with state on the GPU that `--offload auto` tries first
FRUGAL_GROUP = 4  # layers per checkpoint where memory is short
MIN_RESHARD_GAIN = 1e-3  # share of the GPU's time that keeping gathered weights has to save
SAME_SPEED = 1e-2  # relative difference of step times that the planner cannot resolve
SAME_WORK = 1e-3  # relative difference of GPU times that counts as equal


def make_plan(run: PlannedRun) -> Plan:
    """Plans a run: the fastest choice of the open flags that fits, or else the choice with the least memory.

    Among equally fast plans it prefers optimizer state on the GPU, then less host memory, then less GPU time, then less
    recomputation. Gathered weights are kept from the forward to the backward pass if they fit as well and that saves
    time.
    """
    found: list[Plan] = []
    for options in (fast_options(run), frugal_options(run)):
        found += [plan for option in options for plan in _placements(option)]
        if any(plan.fits and not plan.run.state_on_host for plan in found):
            break
    if fitting := [_without_reshard(plan) for plan in found if plan.fits]:
        limit = min(plan.step_seconds for plan in fitting) * (1 + SAME_SPEED)
        fast = [plan for plan in fitting if plan.step_seconds <= limit]
        preferred = min(map(_preference, fast))
        alike = [plan for plan in fast if _preference(plan) == preferred]
        busy = min(map(_busy_seconds, alike)) * (1 + SAME_WORK)
        return min((plan for plan in alike if _busy_seconds(plan) <= busy), key=_recomputation)
    within_host = [plan for plan in found if "host" not in plan.missing]
    return min(within_host or found[:1], key=lambda plan: plan.parts.total)


def _preference(plan: Plan) -> tuple[bool, float, int]:
    """Returns the sort key of equally fast plans, the best first."""
    return plan.run.state_on_host, plan.host_bytes, plan.run.config.expert_ranks


def _recomputation(plan: Plan) -> tuple[int, float]:
    """Returns the sort key of plans with equal work on the GPU, the best first."""
    return POLICIES.index(plan.run.config.remat_policy), _busy_seconds(plan)


def _without_reshard(plan: Plan) -> Plan:
    """Returns the plan that gathers weights once per step, or the given one if that does not fit or gains little."""
    if plan.run.state_on_host:
        return plan
    without = plan_as_given(plan.run.changed(reshard_after_forward=False), plan.placement)
    gains = _busy_seconds(without) <= (1 - MIN_RESHARD_GAIN) * _busy_seconds(plan)
    return without if without.fits and gains else plan


def _busy_seconds(plan: Plan) -> float:
    """Returns the seconds of a step in which the GPU does not wait for the host."""
    return plan.step_seconds - plan.seconds[WAITING]


def can_fit(run: PlannedRun) -> bool:
    """Returns whether any choice of the flags left to the planner fits into memory."""
    options = (*frugal_options(run), *fast_options(run))  # in order of memory, least first
    return any(plan.fits for option in options for plan in _placements(option))


def fast_options(run: PlannedRun) -> list[PlannedRun]:
    """Returns the run with every choice of the flags left to the planner that runs no layer twice."""
    stores_mlp = all(layer.can_store_mlp for layer in run.layers)
    stores_linears = stores_mlp and all(layer.plain_projections for layer in run.layers)
    remat = ["none", *[STORE_LINEARS] * stores_linears, *[STORE_MLP] * stores_mlp, "attention", "full"]
    return _options(run, remat, offload=["none", "auto", "activations"], groups=[1], tiles=[False])


def frugal_options(run: PlannedRun) -> list[PlannedRun]:
    """Returns the run with the choices that take less memory and more time than `fast_options`."""
    tiles = [False, True] if all(layer.kind in TILEABLE_LAYER_CLASSES for layer in run.layers) else [False]
    offload = ["both", "optimizer", "activations", "none"]
    shares = run.architecture.layers_share_inputs and not any(layer.experts for layer in run.architecture.kinds)
    groups = [FRUGAL_GROUP, 1] if shares else [1]
    found = _options(run, remat=["full", "attention"], offload=offload, groups=groups, tiles=tiles)
    fast = [option.config for option in fast_options(run)]
    return [option for option in found if option.config not in fast]


def _options(
    run: PlannedRun, remat: Sequence[str], offload: Sequence[str], groups: Sequence[int], tiles: Sequence[bool]
) -> list[PlannedRun]:
    """Returns the run with each combination of these values for the flags that are not given."""
    run = without_device_budget(run)
    config, found = run.config, list[PlannedRun]()
    remat = remat if config.remat is None and config.gradient_checkpointing is None else [config.remat_policy]
    groups = groups if config.layers_per_checkpoint is None else [config.layers_per_checkpoint]
    tiles = tiles if config.tile_layers is None else [config.tile_layers]
    for policy, group, tiled, experts in product(remat, groups, tiles, _expert_sizes(run)):
        for moved in _offloads(config, policy, group, offload):
            with suppress(ValueError):  # the values exclude each other
                chosen = replace(
                    config,
                    torch_compile=config.torch_compile is not False,
                    remat=policy,
                    layers_per_checkpoint=group,
                    tile_layers=tiled,
                    expert_parallel_size=experts,
                    offload=moved,
                    host_memory_budget=_activation_budget(config, moved),
                )
                found.append(run.changed(config=chosen))
    return found


def _expert_sizes(run: PlannedRun) -> list[int]:
    """Returns the values of --expert_parallel_size to plan with, unless one is given: divisors of a host's ranks."""
    config, hardware = run.config, run.hardware
    if config.expert_parallel_size is not None:
        return [config.expert_parallel_size]
    counts = {layer.experts.count for layer in run.architecture.kinds if layer.experts}
    splits = config.deepspeed is None and config.fsdp_mode == "full_shard" and not holds_packed(run.model, config)
    if not counts or not splits or any(count % hardware.gpus for count in counts):
        return [1]
    ranks = hardware.ranks_per_host
    return [size for size in range(1, ranks + 1) if ranks % size == 0]


def _activation_budget(config: TrainConfig, offload: str) -> float | None:
    """Returns --host_memory_budget, or None if this value of --offload moves no activations."""
    return config.host_memory_budget if offload in ("activations", "both", "auto") else None


def _offloads(config: TrainConfig, policy: str, group: int, values: Sequence[str]) -> list[str]:
    """Returns the values of --offload to plan with: the flag if it is given, else those of `values` that can run.

    `auto` places layers one by one, so every layer needs its own checkpoint.
    """
    if config.offload != "auto":
        return [config.offload]
    if policy == "attention" and group == 1:
        return ["auto"]  # its placements include those of all other values
    one_by_one = policy != "full" and group == 1
    return [value for value in values if value != "auto" or one_by_one]


def _placements(run: PlannedRun) -> Iterator[Plan]:
    """Yields the plan as given and, if `--offload auto` could gain, plans with the state of some layers on the host.

    The number of layers with state on the GPU grows in steps. Where one step lacks other memory than the one before it,
    all numbers between them are planned as well.
    """
    plan = plan_as_given(run)
    placed, auto = set(plan.placement.layers), run.config.offload == "auto"
    if auto and run.config.remat_policy != "attention":
        if placed.isdisjoint(RECOMPUTED):  # the time of recomputing more is not known
            yield plan
        return
    yield plan
    experts_stay, keeps_all = run.config.expert_ranks > 1, plan.fits and placed == {KEEP}
    if not auto or run.state_offloaded or experts_stay or keeps_all:
        return

    def with_state_on_gpu(groups: int) -> Plan:
        layers = min(groups * run.group_size, len(run.layers))
        return plan_as_given(run.changed(state_offloaded=True, layers_with_state_on_gpu=layers))

    step, previous = max(1, run.groups // STATE_STEPS), plan
    for groups in range(0, run.groups + 1, step):
        plan = with_state_on_gpu(groups)
        if groups and previous.missing.keys() != plan.missing.keys():
            yield from map(with_state_on_gpu, range(groups - step + 1, groups))
        yield (previous := plan)


# ---- the current run ------------------------------------------------------------------------------------------------


def plan_from_earlier(run: PlannedRun, earlier: Mapping[str, Any]) -> Plan | None:
    """Returns the plan with the choices of an earlier one, as `Plan.to_json` stored them.

    Returns None if they are damaged, do not fit into memory, or contradict the flags given now.
    """
    run = without_device_budget(run)
    try:
        flags = {name: earlier[name] for name in PLANNED_FLAGS}
        chosen = replace(run.config, **flags, host_memory_budget=_activation_budget(run.config, flags["offload"]))
        placement = Placement(tuple(earlier["placement"]))
        known = set(placement.layers) <= set(ACTIONS) and len(placement.layers) == len(run.layers)
        moved = {
            "state_offloaded": bool(earlier["state_offloaded"]),
            "layers_with_state_on_gpu": int(earlier["layers_with_state_on_gpu"]),
            "reshard_after_forward": bool(earlier.get("reshard_after_forward", True)),
        }
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    options = [option.config for option in (*fast_options(run), *frugal_options(run))]
    if chosen not in options or not known:
        return None
    plan = plan_as_given(run.changed(config=chosen, **moved), placement)
    return plan if plan.fits else None


def plan_on_all_ranks(
    run: PlannedRun, world: World, earlier: Mapping[str, Any] | None = None, gpu_bytes_limit: float = math.inf
) -> Plan:
    """Returns the same plan on all ranks, for the one with the least memory.

    It fills at most `gpu_bytes_limit` of a GPU. `earlier` holds the choices of the run that this one resumes, if any.
    """
    least = torch.tensor([run.hardware.gpu_memory, free_host_memory(world, share=1.0)], dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    gpu, free = least.tolist()
    host = (free + PROCESS_BYTES) * run.hardware.ranks_per_host  # this process's memory is not free any more
    run = run.changed(hardware=replace(run.hardware, gpu_memory=gpu, host_memory=host))
    if gpu_bytes_limit < usable_gpu_bytes(run):
        run = on_smaller_gpus(run, gpu_bytes_limit)
    # Ranks that recompute different layers would wait for each other.
    return from_rank_0(on_all_ranks(world, lambda: plan_from_earlier(run, earlier or {}) or make_plan(run)))


def plan_memory(
    model: PreTrainedModel | PreTrainedConfig, length: int, hardware: Hardware | None = None, **flags: Any
) -> Plan:
    """Returns the fastest memory plan that fits for sequences of `length` tokens, as training would choose it.

    Users call it as `hf.plan_memory`. `hardware` is by default this process group's. `flags` are training flags, such
    as `bf16=True`, `remat="attention"` or `lora_rank=16`; the planner chooses only those that are not given. The plan
    says in `run.config` what to compile, recompute and offload, in `parts` the bytes of a GPU, in `step_seconds` the
    time, and in `fits` whether it fits; print it for one line. Raises ValueError without a GPU or `hardware`, and for
    flags that exclude each other.
    """
    if hardware is None:
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU here; pass hardware=Hardware(...) of lightseq.plan.hardware")
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        per_host = min(ranks, torch.cuda.device_count())
        hardware = hardware_here(ranks, per_host, torch.device("cuda", torch.cuda.current_device()))
    check_names("hf.plan_memory", flags, [field.name for field in fields(TrainConfig)])
    config = TrainConfig(model_max_length=length, **flags)
    if config.teacher is not None:
        raise ValueError("hf.plan_memory does not count a teacher; run `lightseq plan --objective distill`")
    return make_plan(PlannedRun(model if isinstance(model, PreTrainedConfig) else model.config, config, hardware))
