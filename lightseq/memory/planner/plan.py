"""Whether a training run fits, how long a step takes, and where each layer's tensors wait.

Nothing is built and nothing runs: sizes come from the model's config and the flags, rates from rates.py.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from lightseq.distributed.mesh import host_bytes_for_layers
from lightseq.memory.planner.breakdown import Breakdown
from lightseq.memory.planner.estimate import (
    at_backward_begin,
    host_by_layer,
    host_bytes,
    in_flight,
    kept_by_layer,
    peak,
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
from lightseq.memory.planner.run import PlannedRun
from lightseq.memory.planner.step_time import WAITING, attention_seconds, copy_seconds, layer_seconds, step_seconds
from lightseq.models.flops import mfu, model_flops

STAYING_SHARES = 8  # of layers whose state may stay on the GPU where that of others waits on the host
AS_FAST = 1e-3  # of a step: no plan tells closer ones apart


@dataclass(frozen=True)
class Plan:
    """One run, predicted. Memory is a rank's, `host_bytes` that of the ranks of one host."""

    run: PlannedRun
    placement: Placement
    when: str  # the peak is reached
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
        run = self.run
        flops = model_flops(run.model, run.config.model_max_length, run.sequences_per_step, run.adapters)
        share = mfu(flops, self.step_seconds, run.hardware.gpus, run.hardware.chip.peak_flops)
        assert share is not None
        return share

    @property
    def usable_gpu_bytes(self) -> float:
        return usable(self.run)

    @property
    def fits(self) -> bool:
        return not self.lacks

    @property
    def lacks_of(self) -> tuple[bool, bool]:
        """Whether there is too little of the GPU's memory, and of the host's."""
        return self.parts.total > self.usable_gpu_bytes, self.host_bytes > self.run.hardware.host_memory

    @property
    def lacks(self) -> tuple[str, ...]:
        """What there is too little of, in words."""
        found = []
        if self.parts.total > self.usable_gpu_bytes:
            more = (self.parts.total - self.usable_gpu_bytes) / 2**30
            found.append(f"GPU memory, by {more:.1f} GiB a GPU")
        if self.host_bytes > self.run.hardware.host_memory:
            more = (self.host_bytes - self.run.hardware.host_memory) / 2**30
            found.append(f"host memory, by {more:.1f} GiB a host")
        return tuple(found)


def placement_words(plan: Plan) -> str:
    """Of every layer, and what else its run does with what is kept."""
    grouped = f"; {plan.run.group} layers a checkpoint" if plan.run.group > 1 else ""
    state = f"; weights and state{of_what_waits(plan.run)} wait on the host" if plan.run.state_leaves else ""
    return f"{plan.placement.words} (remat {plan.run.config.remat_policy}{grouped}){state}"


def of_what_waits(run: PlannedRun) -> str:
    """Whose weights and state are in host memory, where those of some layers are not."""
    if not run.state_stays:
        return ""
    layers = f"layers {run.state_stays}-{run.layers - 1}, " if run.state_stays < run.layers else ""
    return f" of {layers}embeddings and head"


def make_plan(run: PlannedRun) -> Plan:
    """With `--offload auto` the fastest that fits: where layers have to give way, weights and their state may instead.

    Of those that are as fast (the host may hold all of them up), one where all of that stays, or what has least to do.
    Where nothing fits, what takes least of the GPU.
    """
    found = list(_plans(run))
    if fit := [plan for plan in found if plan.fits]:
        longest = min(plan.step_seconds for plan in fit) * (1 + AS_FAST)
        near = [plan for plan in fit if plan.step_seconds <= longest]
        return min(near, key=lambda plan: (plan.run.state_leaves, plan.step_seconds - plan.seconds[WAITING]))
    possible = [plan for plan in found if plan.host_bytes <= run.hardware.host_memory]
    return min(possible or found[:1], key=lambda plan: plan.parts.total)


def can_fit(run: PlannedRun) -> bool:
    return any(plan.fits for plan in _plans(run))


def _plans(run: PlannedRun) -> Iterator[Plan]:
    """As it is; and with `--offload auto`, where that leaves something to gain, with weights and state on the host: of
    ever fewer layers, in steps, and between two of which one memory has room for one alone."""
    plan = _plan_as_it_is(run)
    yield plan
    if run.config.offload != "auto" or run.state_leaves or (plan.fits and set(plan.placement.layers) == {KEEP}):
        return
    step = max(1, run.groups // STAYING_SHARES)

    def staying(groups: int) -> Plan:
        layers = min(groups * run.group, run.layers)
        return _plan_as_it_is(dataclasses.replace(run, state_leaves=True, state_stays=layers))

    before: Plan | None = None
    for groups in range(0, run.groups + 1, step):
        yield (plan := staying(groups))
        low, high = groups - step, groups
        while before is not None and before.lacks_of != plan.lacks_of and high - low > 1:
            middle = (low + high) // 2
            yield (between := staying(middle))
            low, high = (middle, high) if between.lacks_of == before.lacks_of else (low, middle)
        before = plan


def _plan_as_it_is(run: PlannedRun) -> Plan:
    placement = placement_of(run)
    moment = peak(run, placement)
    host = host_bytes(run, placement) * run.hardware.ranks_per_host
    return Plan(run, placement, moment.when, moment.parts, host, step_seconds(run, placement))


def usable(run: PlannedRun) -> float:
    """Of a GPU's memory, what tensors can have: less what drivers and libraries take, and what lies in gaps."""
    there = max(0.0, run.hardware.gpu_memory - OUTSIDE_BYTES) * (1 - SLACK)
    asked = run.config.device_memory_budget
    return there if asked is None else min(there, asked * 2**30)


def placement_of(run: PlannedRun) -> Placement:
    """What the flags ask for, or with `--offload auto` the fastest that fits (or, where nothing does, nearly)."""
    here, away = (RECOMPUTE, RECOMPUTE_OFFLOAD) if run.config.remat_policy == "full" else (KEEP, OFFLOAD)
    if run.config.offload == "auto":
        return _fastest(run)
    if run.config.offload not in ("activations", "both"):
        return Placement((here,) * run.layers)
    return _within_budget(run, here, away)


def _within_budget(run: PlannedRun, here: str, away: str) -> Placement:
    """As many groups of layers away, from the first on, as the host has room for; all but the last one."""
    size = host_by_layer(run, RECOMPUTE_OFFLOAD if run.group > 1 else away)
    inside = (run.group - 1) * host_by_layer(run, away) if run.group > 1 else 0.0
    room = (host_budget(run) - inside) / size
    leave = min(run.groups - 1, int(room) if 0 < room < run.groups else run.groups * (room > 0))
    return Placement(tuple(away if i // run.group < leave else here for i in range(run.layers)))


def host_budget(run: PlannedRun) -> float:
    """Bytes that a rank's layers may hand over."""
    free = run.hardware.host_memory / run.hardware.ranks_per_host - PROCESS_BYTES
    asked = run.config.host_memory_budget
    if asked is None:
        return host_bytes_for_layers(free, state_bytes_on_host(run))
    if run.config.offload == "auto":  # which chooses what fits
        return min(asked * 2**30, max(0.0, free - state_bytes_on_host(run)))
    return asked * 2**30


def states_of(run: PlannedRun) -> dict[str, State]:
    """What a layer costs in each state."""
    forward, _ = attention_seconds(run)
    busy = layer_seconds(run, Placement((KEEP,) * run.layers))
    kept, layer_input = kept_by_layer(run, KEEP), kept_by_layer(run, RECOMPUTE)
    return {
        KEEP: State(kept, 0.0, 0.0),
        OFFLOAD: State(0.0, host_by_layer(run, OFFLOAD), copy_seconds(run, OFFLOAD, busy)),
        RECOMPUTE: State(layer_input, 0.0, forward),
        RECOMPUTE_OFFLOAD: State(
            0.0, host_by_layer(run, RECOMPUTE_OFFLOAD), forward + copy_seconds(run, RECOMPUTE_OFFLOAD, busy)
        ),
    }


def _fastest(run: PlannedRun) -> Placement:
    states, room = states_of(run), usable(run) - at_backward_begin(run)
    while (found := place(run.layers, states, room, host_budget(run), in_flight(run))) is not None:
        over = peak(run, found).parts.total - usable(run)
        if over <= 0:
            return found
        room -= max(over, states[KEEP].device_bytes / 4)  # the peak is later, when gradients are there
    return _within_budget(run, RECOMPUTE, RECOMPUTE_OFFLOAD)
