"""Whether a training run fits, how long a step takes, where each layer's tensors wait, and how far a length can go.

Nothing is built and nothing runs: sizes come from the model's config and the flags, rates from rates.py.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lightseq.config.train_config import TrainConfig
from lightseq.layers.tiled import KNOWN
from lightseq.memory.policies import KEEP_LINEARS, KEEP_MLP
from lightseq.models.flops import mfu, model_flops
from lightseq.plan.breakdown import Breakdown
from lightseq.plan.layers import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    Placement,
    State,
    place,
)
from lightseq.plan.memory import (
    at_backward_begin,
    host_by_layer,
    host_bytes,
    in_flight,
    kept_by_layer,
    peak,
    state_bytes_on_host,
)
from lightseq.plan.rates import OUTSIDE_BYTES, PROCESS_BYTES, SLACK
from lightseq.plan.run import Hardware, PlannedRun
from lightseq.plan.step_time import attention_seconds, copy_seconds, layer_seconds, step_seconds
from lightseq.ranks.mesh import for_layers

K = 2**10
MOST_LENGTH, MOST_GPUS = 2**30, 512  # tables of more ranks take minutes to make
LEAST_GAIN = 0.02  # of a step's time, for flags to be worth naming
STAYING_SHARES = 8  # of layers whose state may stay on the GPU where that of others waits on the host


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

    Where nothing fits, what takes least of the GPU.
    """
    found = list(_plans(run))
    if fit := [plan for plan in found if plan.fits]:
        return min(fit, key=lambda plan: plan.step_seconds)
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
        return for_layers(free, state_bytes_on_host(run))
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


def longest(run: PlannedRun) -> int | None:
    """The longest sequence that fits, in multiples of 1024 tokens (below that, of one); None if not even one token."""
    step = K if can_fit(run.at(K)) else 1
    if not can_fit(run.at(step)):
        return None
    low = step
    while low < MOST_LENGTH and can_fit(run.at(2 * low)):
        low *= 2
    high = 2 * low
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if can_fit(run.at(middle)) else (low, middle)
    return low


@dataclass(frozen=True)
class Remedy:
    """A change that makes a run fit, or one that fits faster."""

    words: str
    plan: Plan


def remedies(run: PlannedRun) -> list[Remedy]:
    """The fewest flags that make it fit (of as many, the fastest), the fewest GPUs, the longest length."""
    asked, run = run.config, _bound_by_hardware(run)
    found = []
    options = [(len(changes), make_plan(changed)) for changes, changed in _changes(run)]
    fit = [(count, plan) for count, plan in options if plan.fits]
    if fit:
        _, plan = min(fit, key=lambda option: (option[0], option[1].step_seconds))
        found.append(Remedy(_words(asked, plan.run.config), plan))
    elif enough := _with_more_on_the_host(run):
        memory = f"{enough.run.hardware.host_memory / 2**30:.0f} GiB of memory a host"
        found.append(Remedy(f"{memory}, {_words(asked, enough.run.config)}", enough))
    gpus = 2 * run.hardware.gpus
    while gpus <= MOST_GPUS and run.config.sequence_parallel_size is None:
        more = dataclasses.replace(run, hardware=_with_gpus(run.hardware, gpus))
        if can_fit(_without_a_table(more)) and (plan := make_plan(more)).fits:
            found.append(Remedy(f"{plan.run.hardware.gpus} GPUs", plan))
            break
        gpus *= 2
    length = longest(run)
    if length is not None:
        found.append(Remedy(f"--model_max_length {length}", make_plan(run.at(length))))
    return found


def _without_a_table(run: PlannedRun) -> PlannedRun:
    """As many tokens of a sequence of its own on every GPU: what takes least memory, and no schedule of many ranks."""
    length = -(-run.config.model_max_length // run.sequence_ranks)
    alone = {"sequence_parallel_size": 1, "schedule": "auto", "ulysses_size": None, "model_max_length": length}
    return dataclasses.replace(run, config=dataclasses.replace(run.config, **alone))  # type: ignore[arg-type]


def _with_more_on_the_host(run: PlannedRun) -> Plan | None:
    """What fits with the least host memory, were there enough of it: planned for that, in whole GiB."""
    fit = [plan for _, changed in _changes(_with_host(run, math.inf)) if (plan := make_plan(changed)).fits]
    if not fit:
        return None
    least = min(fit, key=lambda plan: plan.host_bytes)
    asked = dataclasses.replace(least.run, state_leaves=False, state_stays=0)
    low, high = int(run.hardware.host_memory / 2**30), math.ceil(least.host_bytes / 2**30)
    while not (found := make_plan(_with_host(asked, high * 2**30))).fits:  # layers leave a part of it free
        low, high = high, high + math.ceil(high / 4)
    while high - low > 1:  # `auto` takes more where there is more
        middle = (low + high) // 2
        less = make_plan(_with_host(asked, middle * 2**30))
        found, low, high = (less, low, middle) if less.fits else (found, middle, high)
    return found


def faster(run: PlannedRun) -> list[Remedy]:
    """Flags with which it fits as well and a step is at least 2% shorter: the fewest, and what is shorter still."""
    asked, found = make_plan(run).step_seconds, []
    options = [(len(changes), make_plan(changed)) for changes, changed in _changes(run) if "optim" not in changes]
    fit = [(count, plan) for count, plan in options if plan.fits]
    for order in (
        lambda option: (option[0], option[1].step_seconds),
        lambda option: (option[1].step_seconds, option[0]),
    ):
        fit = [(count, plan) for count, plan in fit if plan.step_seconds <= (1 - LEAST_GAIN) * asked]
        if fit:
            _, plan = min(fit, key=order)
            found.append(Remedy(_words(run.config, plan.run.config), plan))
            asked = plan.step_seconds
    return found


def _bound_by_hardware(run: PlannedRun) -> PlannedRun:
    """The same bounds without `--device_memory_budget`, which goes with `--offload auto` alone."""
    memory = usable(run) / (1 - SLACK) + OUTSIDE_BYTES
    config = dataclasses.replace(run.config, device_memory_budget=None)
    return dataclasses.replace(run, config=config, hardware=dataclasses.replace(run.hardware, gpu_memory=memory))


def _with_host(run: PlannedRun, memory: float) -> PlannedRun:
    return dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, host_memory=memory))


def _with_gpus(hardware: Hardware, gpus: int) -> Hardware:
    per_host = hardware.gpus_per_host
    return dataclasses.replace(hardware, gpus=gpus if gpus <= per_host else -(-gpus // per_host) * per_host)


def _changes(run: PlannedRun) -> Iterator[tuple[dict[str, object], PlannedRun]]:
    """Every other setting of the flags that trade time for memory, with what changes."""
    asked = run.config
    choices: dict[str, list[object]] = {
        "torch_compile": list({asked.torch_compile, True}),
        "remat": ["none", *_keeping(run), "attention", "full"],
        "offload": ["none", "activations", "optimizer", "both", "auto"],
        "layers_per_checkpoint": [1, 4],
        "tile_layers": [False, True] if run.made_of.layer_class in KNOWN else [False],
        "optim": [asked.optim, "adamw_8bit"],
    }
    for values in product(*choices.values()):
        wanted = dict(zip(choices, values, strict=True))
        same = {"remat": asked.remat_policy}
        changes = {name: value for name, value in wanted.items() if value != same.get(name, getattr(asked, name))}
        try:
            config = dataclasses.replace(asked, **{**changes, "gradient_checkpointing": None, "remat": wanted["remat"]})  # type: ignore[arg-type]
        except ValueError:
            continue  # flags that exclude each other
        if changes:
            yield changes, dataclasses.replace(run, config=config)


def _keeping(run: PlannedRun) -> list[str]:
    """Between nothing and attention, what a checkpoint can keep of the model's layers."""
    if not run.made_of.can_keep_mlp:
        return []
    return [*([KEEP_LINEARS] if run.made_of.plain_projections else []), KEEP_MLP]


def _words(before: TrainConfig, after: TrainConfig) -> str:
    names = ("torch_compile", "offload", "layers_per_checkpoint", "tile_layers", "optim")
    found = {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}
    if after.remat_policy != before.remat_policy:
        found["remat"] = after.remat_policy
    words, without = [f"--{name} {value}" for name, value in found.items()], []
    if "remat" in found and before.gradient_checkpointing is not None:
        without.append("--gradient_checkpointing")
    if before.device_memory_budget is not None and after.offload != "auto":
        without.append("--device_memory_budget")
    return " ".join([*words, *(f"without {name}" for name in without)])
