"""What would make a run fit, or a step faster: flags, GPUs, memory of the host, a shorter sequence.

Each is a plan of its own, of the run with that one thing changed.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lightseq.config.remat_policies import STORE_LINEARS, STORE_MLP
from lightseq.config.train_config import TrainConfig
from lightseq.memory.planner.plan import Plan, can_fit, make_plan, usable
from lightseq.memory.planner.rates import OUTSIDE_BYTES, SLACK
from lightseq.memory.planner.run import Hardware, PlannedRun
from lightseq.modules.tiled import KNOWN

K = 2**10
MOST_LENGTH, MOST_GPUS = 2**30, 512  # tables of more ranks take minutes to make
LEAST_GAIN = 0.02  # of a step's time, for flags to be worth naming


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


def faster(run: PlannedRun, quick: bool = False) -> list[Remedy]:
    """Flags with which it fits as well and a step is at least 2% shorter: the fewest, and what is shorter still.

    `quick` looks at compiled layers and at what they keep and where alone, not at where weights are.
    """
    asked, found = make_plan(run).step_seconds, []
    others = ((changes, changed) for changes, changed in _changes(run, quick) if "optim" not in changes)
    options = [(len(changes), make_plan(changed)) for changes, changed in others]
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


def _choices(run: PlannedRun, quick: bool = False) -> dict[str, list[object]]:
    """Settings of the flags that trade time for memory."""
    asked, device = run.config, ["none", "activations"]  # where the weights stay there
    choices: dict[str, list[object]] = {
        "torch_compile": list({asked.torch_compile, True}),
        "remat": ["none", *_keeping(run), "attention", "full"],
        "offload": [*device, "optimizer", "both", "auto"],
        "layers_per_checkpoint": [1, 4],
        "tile_layers": [False, True] if run.made_of.layer_class in KNOWN else [False],
        "optim": [asked.optim, "adamw_8bit"],
    }
    if quick:
        choices |= {name: [getattr(asked, name)] for name in ("layers_per_checkpoint", "tile_layers", "optim")}
        choices["offload"] = [*device] if asked.offload in device else [asked.offload]
    return choices


def _changes(run: PlannedRun, quick: bool = False) -> Iterator[tuple[dict[str, object], PlannedRun]]:
    """Every other setting of these flags, with what changes."""
    asked, choices = run.config, _choices(run, quick)
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
    if not run.made_of.can_store_mlp:
        return []
    return [*([STORE_LINEARS] if run.made_of.plain_projections else []), STORE_MLP]


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
