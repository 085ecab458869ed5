"""Plan of a training run: memory, step time, and the placement of each layer's activations and state.

Nothing is built or run. Sizes follow from the model's config and the flags, rates from rates.py.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from lightseq.config.deepspeed import DeepSpeedSettings
from lightseq.config.remat_policies import STORE_LINEARS, STORE_MLP
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.mesh import World, free_host_memory, host_bytes_for_layers, on_all_ranks
from lightseq.memory.planner.breakdown import GIB, Breakdown
from lightseq.memory.planner.deepspeed_memory import deepspeed_bytes_on_host
from lightseq.memory.planner.memory import (
    host_bytes,
    in_flight,
    peak,
    peak_without_activations,
    saved_by_group,
    saved_by_layer,
    state_bytes_on_host,
)
from lightseq.memory.planner.placement import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    RECOMPUTED,
    Placement,
    State,
    place,
)
from lightseq.memory.planner.rates import MARGIN, PROCESS_BYTES
from lightseq.memory.planner.run import PlannedRun, planned_run
from lightseq.memory.planner.step_time import WAITING, attention_seconds, copy_seconds, layer_seconds, step_seconds
from lightseq.models.flops import mfu, model_flops
from lightseq.modules.tiled import KNOWN

STATE_STEPS = 8  # steps in the number of layers with state on the GPU that `--offload auto` tries first
FRUGAL_GROUP = 4  # layers per checkpoint where memory is short
PLANNED_FLAGS: Final = ("torch_compile", "remat", "layers_per_checkpoint", "tile_layers", "offload")
SAME_SPEED = 1e-2  # relative difference of step times that the planner cannot resolve


@dataclass(frozen=True)
class Plan:
    """Predicted memory and time of a run. `parts` is one GPU at its peak, `host_bytes` one host with all its ranks."""

    run: PlannedRun
    placement: Placement
    when: str  # point of the step where memory peaks
    parts: Breakdown
    host_bytes: float
    seconds: dict[str, float]

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.run.config.model_max_length * self.run.sequences_per_step / self.step_seconds

    @property
    def mfu(self) -> float:
        run, hardware = self.run, self.run.hardware
        flops = model_flops(run.model, run.config.model_max_length, run.sequences_per_step, run.adapter_parameters)
        share = mfu(flops, self.step_seconds, hardware.gpus, hardware.chip.peak_flops)
        assert share is not None
        return share

    @property
    def missing_gpu_bytes(self) -> float:
        return max(0.0, self.parts.total - usable_gpu_bytes(self.run))

    @property
    def missing_host_bytes(self) -> float:
        return max(0.0, self.host_bytes - self.run.hardware.host_memory)

    @property
    def fits(self) -> bool:
        return not (self.missing_gpu_bytes or self.missing_host_bytes)

    @property
    def shortages(self) -> tuple[str, ...]:
        """Returns texts such as `GPU memory, by 1.5 GiB per GPU`."""
        missing = {"GPU": self.missing_gpu_bytes, "host": self.missing_host_bytes}
        return tuple(f"{name} memory, by {size / GIB:.1f} GiB per {name}" for name, size in missing.items() if size)

    def __str__(self) -> str:
        """Returns a text such as `compiled layers, remat none; 28.4 of 73.3 GiB per GPU`."""
        run, config = self.run, self.run.config
        parts = ["compiled layers" if config.compiles else "layers not compiled", f"remat {config.remat_policy}"]
        parts += [f"{run.group_size} layers per checkpoint"] if run.group_size > 1 else []
        parts += ["tiled layers"] if config.tiles_layers else []
        parts += [self.placement.words] if set(self.placement.layers) != {KEEP} else []
        parts += [f"weights and state{owners_of_offloaded_state(run)} in host memory"] if run.state_on_host else []
        usable = f" of {usable_gpu_bytes(run) / GIB:.1f}" if math.isfinite(usable_gpu_bytes(run)) else ""
        sizes = [f"{self.parts.total / GIB:.1f}{usable} GiB per GPU"]
        offloads = self.placement.offloads or run.state_on_host
        sizes += [f"{self.host_bytes / GIB:,.0f} GiB per host"] if offloads else []
        return f"{', '.join(parts)}; {', '.join(sizes)}"


def owners_of_offloaded_state(run: PlannedRun) -> str:
    """Returns ` of` and the parts of the model with state on the host; empty if that is the whole model."""
    resident = run.layers_with_state_on_gpu
    if not resident:
        return ""
    layers = f"layers {resident}-{run.layers - 1}, " if resident < run.layers else ""
    return f" of {layers}embeddings and head"


# ---- choosing -------------------------------------------------------------------------------------------------------


def make_plan(run: PlannedRun) -> Plan:
    """Plans a run: the fastest choice of the flags left to the planner that fits, or else that with the least memory.

    Among equally fast plans it prefers state on the GPU, then less host memory, then less work behind kernel launches.
    """
    run, found = without_device_budget(run), []
    for options in (fast_options(run), frugal_options(run)):
        found += [plan for option in options for plan in _placements(option)]
        if any(plan.fits and not plan.run.state_on_host for plan in found):
            break
    if fitting := [plan for plan in found if plan.fits]:
        limit = min(plan.step_seconds for plan in fitting) * (1 + SAME_SPEED)
        fastest = [plan for plan in fitting if plan.step_seconds <= limit]
        return min(fastest, key=_preference)
    within_host = [plan for plan in found if not plan.missing_host_bytes]
    return min(within_host or found[:1], key=lambda plan: plan.parts.total)


def _preference(plan: Plan) -> tuple[bool, float, float]:
    return plan.run.state_on_host, plan.host_bytes, plan.step_seconds - plan.seconds[WAITING]


def can_fit(run: PlannedRun) -> bool:
    run = without_device_budget(run)
    options = (*frugal_options(run), *fast_options(run))  # those with the least memory first
    return any(plan.fits for option in options for plan in _placements(option))


def fast_options(run: PlannedRun) -> list[PlannedRun]:
    """Returns the run with every choice of the flags left to the planner that runs no layer twice."""
    offload = ["none", "auto", "activations"]
    return _options(run, remat=_policies(run), offload=offload, groups=[1], tiles=[False])


def frugal_options(run: PlannedRun) -> list[PlannedRun]:
    """Returns the run with the other choices, which take less memory and more time."""
    tiles = [False, True] if run.architecture.layer_class in KNOWN else [False]
    offload = ["both", "optimizer", "activations", "none"]
    found = _options(run, remat=["full", "attention"], offload=offload, groups=[FRUGAL_GROUP, 1], tiles=tiles)
    fast = [option.config for option in fast_options(run)]
    return [option for option in found if option.config not in fast]


def _options(
    run: PlannedRun, remat: Sequence[str], offload: Sequence[str], groups: Sequence[int], tiles: Sequence[bool]
) -> list[PlannedRun]:
    """Returns the run with each combination of these values for the flags that are not given."""
    config, found = run.config, []
    remat = remat if config.remat is None and config.gradient_checkpointing is None else [config.remat_policy]
    groups = groups if config.layers_per_checkpoint is None else [config.layers_per_checkpoint]
    tiles = tiles if config.tile_layers is None else [config.tile_layers]
    for policy, group, tiled in product(remat, groups, tiles):
        # Layers can be placed one by one if each has its own checkpoint.
        asked = config.offload if config.offload != "auto" else "auto" if (policy, group) == ("attention", 1) else None
        one_by_one = group == 1 and policy != "full"
        for moved in [name for name in offload if name != "auto" or one_by_one] if asked is None else [asked]:
            budget = config.host_memory_budget if moved in ("activations", "both", "auto") else None
            with suppress(ValueError):  # the values exclude each other
                chosen = replace(
                    config,
                    torch_compile=config.torch_compile is not False,
                    remat=policy,
                    layers_per_checkpoint=group,
                    tile_layers=tiled,
                    offload=moved,
                    host_memory_budget=budget,
                )
                found.append(run.changed(config=chosen))
    return found


def _policies(run: PlannedRun) -> list[str]:
    can_store_mlp, plain_projections = run.architecture.can_store_mlp, run.architecture.plain_projections
    mlp = [*([STORE_LINEARS] if plain_projections else []), STORE_MLP] if can_store_mlp else []
    return ["none", *mlp, "attention", "full"]


def _placements(run: PlannedRun) -> Iterator[Plan]:
    """Yields the plan as given and, if `--offload auto` could gain, plans with the state of some layers on the host.

    The number of layers with state on the GPU grows in steps. If one step lacks host memory and the next GPU memory, a
    bisection looks for a plan between them that lacks neither.
    """
    plan = plan_as_given(run)
    if run.config.offload == "auto" and run.config.remat_policy != "attention":
        if set(plan.placement.layers).isdisjoint(RECOMPUTED):  # the time of recomputing more is not known
            yield plan
        return
    yield plan
    if run.config.offload != "auto" or run.state_offloaded or (plan.fits and set(plan.placement.layers) == {KEEP}):
        return

    def with_state_on_gpu(groups: int) -> Plan:
        layers = min(groups * run.group_size, run.layers)
        return plan_as_given(run.changed(state_offloaded=True, layers_with_state_on_gpu=layers))

    def lacks(plan: Plan) -> tuple[bool, bool]:
        return plan.missing_gpu_bytes > 0, plan.missing_host_bytes > 0

    step = max(1, run.groups // STATE_STEPS)
    previous: Plan | None = None
    for groups in range(0, run.groups + 1, step):
        yield (plan := with_state_on_gpu(groups))
        low, high = groups - step, groups
        while previous is not None and lacks(previous) != lacks(plan) and high - low > 1:
            middle = (low + high) // 2
            yield (between := with_state_on_gpu(middle))
            low, high = (middle, high) if lacks(between) == lacks(previous) else (low, middle)
        previous = plan


def plan_as_given(run: PlannedRun, placement: Placement | None = None) -> Plan:
    """Plans a run without moving its state. The placement of layers is given, or follows from the flags."""
    placement = placement or placement_of(run)
    snapshot = peak(run, placement)
    host = host_bytes(run, placement) * run.hardware.ranks_per_host
    return Plan(run, placement, snapshot.when, snapshot.parts, host, step_seconds(run, placement))


def usable_gpu_bytes(run: PlannedRun) -> float:
    """Returns the GPU memory that a plan may fill; the margin is for drivers, libraries and fragmentation."""
    free = run.hardware.gpu_memory * (1 - MARGIN)
    budget = run.config.device_memory_budget
    return free if budget is None else min(free, budget * GIB)


def without_device_budget(run: PlannedRun) -> PlannedRun:
    """Replaces `--device_memory_budget`, which only `--offload auto` accepts, by a smaller GPU."""
    if run.config.device_memory_budget is None:
        return run
    usable = usable_gpu_bytes(run)
    return on_smaller_gpus(run.changed(config=replace(run.config, device_memory_budget=None)), usable)


def on_smaller_gpus(run: PlannedRun, usable: float) -> PlannedRun:
    """Returns the run on GPUs of which a plan may fill `usable` bytes."""
    return run.changed(hardware=replace(run.hardware, gpu_memory=usable / (1 - MARGIN)))


def placement_of(run: PlannedRun) -> Placement:
    """Returns the placement that the flags ask for; with `--offload auto` the fastest that fits."""
    resident, offloaded = (RECOMPUTE, RECOMPUTE_OFFLOAD) if run.config.remat_policy == "full" else (KEEP, OFFLOAD)
    if run.config.offload == "auto":
        return _fastest(run)
    if run.config.offload not in ("activations", "both"):
        return Placement((resident,) * run.layers)
    return _offload_first_layers(run, resident, offloaded)


def _fastest(run: PlannedRun) -> Placement:
    usable, states = usable_gpu_bytes(run), layer_states(run)
    room = usable - peak_without_activations(run)
    while (found := place(run.layers, states, room, _host_budget(run), in_flight(run))) is not None:
        over = peak(run, found).parts.total - usable
        if over <= 0:
            return found
        room -= max(over, states[KEEP].device_bytes / 4)  # memory peaks later, when gradients have accumulated
    return _offload_first_layers(run, RECOMPUTE, RECOMPUTE_OFFLOAD)


def _offload_first_layers(run: PlannedRun, resident: str, offloaded: str) -> Placement:
    """Offloads as many groups of layers as host memory allows, starting at the first; the last is never offloaded."""
    rerun = (run.group_size - 1) * saved_by_layer(run, offloaded)  # offloaded while a group runs again
    room = (_host_budget(run) - rerun) / saved_by_group(run, offloaded)
    groups = max(0, min(run.groups - 1, int(room) if room < run.groups else run.groups))
    return Placement(tuple(offloaded if i // run.group_size < groups else resident for i in range(run.layers)))


def layer_states(run: PlannedRun) -> dict[str, State]:
    """Returns the cost of one layer by state."""
    forward, _ = attention_seconds(run)
    compute = layer_seconds(run, Placement((KEEP,) * run.layers))
    everything, layer_input = saved_by_layer(run, KEEP), saved_by_layer(run, RECOMPUTE)
    copy, copy_input = (copy_seconds(run, state, compute) for state in (OFFLOAD, RECOMPUTE_OFFLOAD))
    return {
        KEEP: State(device_bytes=everything, host_bytes=0.0, seconds=0.0),
        OFFLOAD: State(device_bytes=0.0, host_bytes=everything, seconds=copy),
        RECOMPUTE: State(device_bytes=layer_input, host_bytes=0.0, seconds=forward),
        RECOMPUTE_OFFLOAD: State(device_bytes=0.0, host_bytes=layer_input, seconds=forward + copy_input),
    }


def _host_budget(run: PlannedRun) -> float:
    """Returns the bytes that the layers of one rank may offload."""
    free = run.hardware.host_memory / run.hardware.ranks_per_host - PROCESS_BYTES
    budget = run.config.host_memory_budget
    if budget is None:
        return host_bytes_for_layers(free, state_bytes_on_host(run))
    if run.config.offload == "auto":  # never plans beyond the host
        return min(budget * GIB, max(0.0, free - state_bytes_on_host(run)))
    return budget * GIB


# ---- the current run ------------------------------------------------------------------------------------------------


def planned_flags(plan: Plan) -> dict[str, Any]:
    """Returns the choices of a plan as they stand in run.json, from which a resumed run takes them again."""
    run, config = plan.run, plan.run.config
    return {
        **{name: getattr(config, name) for name in PLANNED_FLAGS},
        "placement": list(plan.placement.layers),
        "state_offloaded": run.state_offloaded,
        "layers_with_state_on_gpu": run.layers_with_state_on_gpu,
        "gpu_bytes": plan.parts.total,
        "host_bytes_per_rank": int(plan.host_bytes / run.hardware.ranks_per_host),
        "step_seconds": plan.step_seconds,
    }


def plan_again(run: PlannedRun, earlier: Mapping[str, Any]) -> Plan | None:
    """Returns the plan with the choices of an earlier one; None if it does not fit, or other flags are given now."""
    run = without_device_budget(run)
    try:
        chosen = replace(run.config, **{name: earlier[name] for name in PLANNED_FLAGS})
        layers, state = tuple(earlier["placement"]), bool(earlier["state_offloaded"])
        resident = int(earlier["layers_with_state_on_gpu"])
    except (KeyError, TypeError, ValueError):
        return None
    options = [option.config for option in (*fast_options(run), *frugal_options(run))]
    if chosen not in options or len(layers) != run.layers:
        return None
    again = run.changed(config=chosen, state_offloaded=state, layers_with_state_on_gpu=resident)
    plan = plan_as_given(again, Placement(layers))
    return plan if plan.fits else None


def plan_on_all_ranks(
    config: TrainConfig,
    model: PreTrainedConfig,
    world: World,
    earlier: Mapping[str, Any] = MappingProxyType({}),
    most_bytes: float = math.inf,
) -> Plan:
    """Returns the same plan on all ranks, for the one with the least memory.

    It fills at most `most_bytes` of a GPU. `earlier` holds the choices of the run that this one resumes, if any.
    """
    run = planned_run(config, model, world)
    least = torch.tensor([run.hardware.gpu_memory, free_host_memory(world, share=1.0)], dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    gpu, free = least.tolist()
    host = (free + PROCESS_BYTES) * run.hardware.ranks_per_host  # this process's memory is not free any more
    run = run.changed(hardware=replace(run.hardware, gpu_memory=gpu, host_memory=host))
    if most_bytes < usable_gpu_bytes(run):
        run = on_smaller_gpus(run, most_bytes)
    found = [on_all_ranks(world, lambda: plan_again(run, earlier) or make_plan(run))]
    dist.broadcast_object_list(found)  # ranks that recompute different layers would wait for each other
    return found[0]


def host_memory_for_layers(run: PlannedRun, world: World, deepspeed: DeepSpeedSettings | None = None) -> float:
    """Returns the bytes that this rank's layers may offload. Call it before the model allocates host memory."""
    if (budget := run.config.host_memory_budget) is not None:
        return budget * GIB
    state = deepspeed_bytes_on_host(run, deepspeed) if deepspeed else state_bytes_on_host(run)
    return host_bytes_for_layers(free_host_memory(world, share=1.0), state)
