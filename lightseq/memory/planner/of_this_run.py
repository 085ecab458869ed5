"""The plan of the run that is about to begin, or that ran out of memory, on the hardware it found."""

import dataclasses
import math
import os

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from lightseq.config.deepspeed import DeepSpeedSettings
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.host_memory import host_memory
from lightseq.distributed.mesh import World, agree, for_layers, free_host_memory
from lightseq.memory.planner.breakdown import GIB, Breakdown, advice
from lightseq.memory.planner.deepspeed_memory import deepspeed_bytes_on_host
from lightseq.memory.planner.estimate import state_bytes_on_host
from lightseq.memory.planner.plan import Plan, make_plan, of_what_waits
from lightseq.memory.planner.rates import CHIPS, PROCESS_BYTES, chip_of_device
from lightseq.memory.planner.remedies import faster, remedies
from lightseq.memory.planner.run import Hardware, PlannedRun

WORTH_SECONDS = 120.0  # of a run: what compiling takes, and what reading a line is worth


def planned(config: TrainConfig, model: PreTrainedConfig, world: World) -> PlannedRun:
    """Without a GPU, or with one whose rates are not known, times are those of an H200."""
    chip, memory = CHIPS["h200"], math.inf
    if world.device.type == "cuda":
        about = torch.cuda.get_device_properties(world.device)
        chip, memory = chip_of_device(about.name) or chip, float(about.total_memory)
    host = float(host_memory().total)
    per_host = world.size if world.size % world.local_size else world.local_size  # hosts may differ
    cores = len(os.sched_getaffinity(0))
    return PlannedRun(model, config, Hardware(chip, world.size, per_host, memory, host, cores))


def plan_of_layers(config: TrainConfig, model: PreTrainedConfig, world: World) -> Plan | None:
    """With `--offload auto`, which needs the state of every layer: rank 0's plan, for the least memory of any rank."""
    if config.offload != "auto":
        return None
    run = planned(config, model, world)
    least = torch.tensor([run.hardware.gpu_memory, free_host_memory(world, share=1.0)], dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    gpu, free = least.tolist()
    host = (free + PROCESS_BYTES) * run.hardware.ranks_per_host  # this process is there already
    hardware = dataclasses.replace(run.hardware, gpu_memory=gpu, host_memory=host)
    found = [agree(world, lambda: make_plan(PlannedRun(model, config, hardware)))]
    dist.broadcast_object_list(found)  # ranks that differed in what they compute again would wait for each other
    return found[0]


def auto_notes(plan: Plan) -> list[str]:
    """What `--offload auto` has to say for itself."""
    lacks = [f"warning: --offload auto plans with too little {lack}" for lack in plan.lacks]
    if not plan.run.state_leaves:
        return lacks
    what = f"weights, gradients and optimizer state{of_what_waits(plan.run)} wait in host memory"
    return [f"--offload auto: {what}{', for nothing is faster that fits' if plan.fits else ''}", *lacks]


def faster_notes(run: PlannedRun, world: World, steps: int) -> list[str]:
    """Flags that would end the `steps` that are left minutes earlier, by the plan, and fit as well."""
    if world.device.type != "cuda" or chip_of_device(torch.cuda.get_device_name(world.device)) is None:
        return []  # of others there are no rates
    run = dataclasses.replace(run, state_leaves=False, state_stays=0)  # as it was asked for
    asked = make_plan(run)
    if not asked.fits or steps * asked.step_seconds <= WORTH_SECONDS:
        return []
    worth = [c for c in faster(run, quick=True) if steps * (asked.step_seconds - c.plan.step_seconds) > WORTH_SECONDS]
    if not worth:
        return []
    words = [f"{c.words} ({c.plan.step_seconds:.3g} s, {c.plan.parts.total / GIB:.1f} GiB a GPU)" for c in worth]
    return [f"by the plan a step takes {asked.step_seconds:.3g} s, and less with {', or with '.join(words)}"]


def host_memory_for_layers(run: PlannedRun, world: World, deepspeed: DeepSpeedSettings | None = None) -> float:
    """Returns the bytes that layers may hand over on this rank, before anything of the model is on its host."""
    if (asked := run.config.host_memory_budget) is not None:
        return asked * GIB
    state = deepspeed_bytes_on_host(run, deepspeed) if deepspeed else state_bytes_on_host(run)
    return for_layers(free_host_memory(world, share=1.0), state)


def out_of_memory(config: TrainConfig, model: PreTrainedConfig, world: World, measured: Breakdown | None) -> list[str]:
    """What the memory was for by the plan, and what would make the run fit.

    Where the plan does not know the engine, or sees room enough, what was measured so far decides.
    """
    if config.deepspeed:
        return _by_measure(config, measured)
    run = planned(config, model, world)
    plan = make_plan(run)
    room = f", {plan.usable_gpu_bytes / GIB:.1f} GiB usable" if math.isfinite(plan.usable_gpu_bytes) else ""
    head = f"planned memory of a GPU at its peak ({plan.when}{room}):"
    changes = [] if plan.fits else remedies(run)
    if not changes:
        return [head, *plan.parts.lines(), *_by_measure(config, measured or plan.parts)]
    words = [f"{change.words} ({change.plan.parts.total / GIB:.1f} GiB a GPU)" for change in changes]
    return [head, *plan.parts.lines(), f"to fit: {', or '.join(words)}"]


def _by_measure(config: TrainConfig, parts: Breakdown | None) -> list[str]:
    if parts is None:
        return ["to fit: more GPUs, or a smaller model"]
    return [*(parts.lines() if config.deepspeed else []), f"to fit: {advice(parts, config)}"]
