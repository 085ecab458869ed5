"""Plan of a training run: memory, step time, and the placement of each layer's activations and state.

Nothing is built or run. Sizes follow from the model's config and the flags, rates from rates.py.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from lightseq.config.deepspeed import DeepSpeedSettings
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
    Placement,
    State,
    place,
)
from lightseq.memory.planner.rates import OUTSIDE_BYTES, PROCESS_BYTES, SLACK
from lightseq.memory.planner.run import PlannedRun, planned_run
from lightseq.memory.planner.step_time import WAITING, attention_seconds, copy_seconds, layer_seconds, step_seconds
from lightseq.models.flops import mfu, model_flops

STATE_STEPS = 8  # steps in the number of layers with state on the GPU that `--offload auto` tries first
SAME_SPEED = 1e-3  # relative difference of step times that the planner cannot resolve


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


# ---- choosing -------------------------------------------------------------------------------------------------------


def make_plan(run: PlannedRun) -> Plan:
    """Plans a run. `--offload auto` chooses the fastest plan that fits, or else the one with the least GPU memory.

    Among equally fast plans (kernel launches may hide a difference) it prefers all state on the GPU, then less work.
    """
    candidates = list(_candidates(run))
    if fitting := [plan for plan in candidates if plan.fits]:
        limit = min(plan.step_seconds for plan in fitting) * (1 + SAME_SPEED)
        fastest = [plan for plan in fitting if plan.step_seconds <= limit]
        return min(fastest, key=lambda plan: (plan.run.state_offloaded, plan.step_seconds - plan.seconds[WAITING]))
    within_host = [plan for plan in candidates if not plan.missing_host_bytes]
    return min(within_host or candidates[:1], key=lambda plan: plan.parts.total)


def can_fit(run: PlannedRun) -> bool:
    return any(plan.fits for plan in _candidates(run))


def _candidates(run: PlannedRun) -> Iterator[Plan]:
    """Yields the plan as given and, if `--offload auto` could gain, plans with the state of some layers on the host.

    The number of layers with state on the GPU grows in steps. If one step lacks host memory and the next GPU memory, a
    bisection looks for a plan between them that lacks neither.
    """
    plan = plan_as_given(run)
    yield plan
    if run.config.offload != "auto" or run.state_offloaded or (plan.fits and set(plan.placement.layers) == {KEEP}):
        return

    def with_state_on_gpu(groups: int) -> Plan:
        layers = min(groups * run.group_size, run.layers)
        return plan_as_given(dataclasses.replace(run, state_offloaded=True, layers_with_state_on_gpu=layers))

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
    """Returns the GPU memory for tensors, without that of drivers, libraries and fragmentation."""
    free = max(0.0, run.hardware.gpu_memory - OUTSIDE_BYTES) * (1 - SLACK)
    budget = run.config.device_memory_budget
    return free if budget is None else min(free, budget * GIB)


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


def plan_of_layers(config: TrainConfig, model: PreTrainedConfig, world: World) -> Plan | None:
    """Returns the plan of `--offload auto` for the rank with the least memory, the same on all ranks; else None."""
    if config.offload != "auto":
        return None
    run = planned_run(config, model, world)
    least = torch.tensor([run.hardware.gpu_memory, free_host_memory(world, share=1.0)], dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    gpu, free = least.tolist()
    host = (free + PROCESS_BYTES) * run.hardware.ranks_per_host  # this process's memory is not free any more
    hardware = dataclasses.replace(run.hardware, gpu_memory=gpu, host_memory=host)
    found = [on_all_ranks(world, lambda: make_plan(PlannedRun(model, config, hardware)))]
    dist.broadcast_object_list(found)  # ranks that recompute different layers would wait for each other
    return found[0]


def host_memory_for_layers(run: PlannedRun, world: World, deepspeed: DeepSpeedSettings | None = None) -> float:
    """Returns the bytes that this rank's layers may offload. Call it before the model allocates host memory."""
    if (budget := run.config.host_memory_budget) is not None:
        return budget * GIB
    state = deepspeed_bytes_on_host(run, deepspeed) if deepspeed else state_bytes_on_host(run)
    return host_bytes_for_layers(free_host_memory(world, share=1.0), state)
