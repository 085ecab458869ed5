"""One rank of a training run that is measured for the plan: its peak by category and phase, its seconds by phase.

python3 -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/training/plan_point.py RESULT 2 3 \\
    --model_name_or_path llama3.2-1b --bf16 --model_max_length 32768
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)  # and hides no package behind this folder

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightseq.cli import BOTH
from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.mesh import World, agree, start
from lightseq.profiling.trace import gpu_breakdown, read_trace
from lightseq.tools.plan.rehearsal import NOWHERE, TakenByForward, made_up_inputs, shared_folder, without_traces
from lightseq.training.loop import Trainer
from lightseq.training.step_stats import Moment, StepResult


class MeasuredTrainer(Trainer):
    """Notes every loss, when each phase of a step begins, and once asked to, what it takes at its peak."""

    moments: list[tuple[str, Moment]]
    losses: list[Tensor]  # this rank's share
    peaks: dict[str, int] | None = None

    def _step(self, step: int) -> StepResult:
        result = super()._step(step)
        self.losses.append(result.loss)
        return result

    @contextmanager
    def _phase(self, step: int, name: str) -> Iterator[None]:
        self.moments.append((name, Moment(self.world.device)))
        if self.peaks is not None:
            torch.cuda.reset_peak_memory_stats()
        with super()._phase(step, name):
            yield
        if self.peaks is not None:  # the allocator's time is the host's
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated())


def main(words: Sequence[str]) -> None:
    result, warmup, steps, *flags = words
    with start(TrainConfig.step_timeout) as world:
        asked = agree(world, lambda: parse(["--data_path", NOWHERE, "--output_dir", NOWHERE, *flags], "plan_point"))
        folder = shared_folder(world, "lightseq-point-")
        try:
            config = without_traces(asked, folder)
            inputs = agree(world, lambda: made_up_inputs(config, BOTH, world, folder))
            trainer = MeasuredTrainer(config, inputs, world, None)
            trainer.moments, trainer.losses = [], []
            measured = measure(trainer, int(warmup), int(steps))
            if world.is_main:
                Path(result).write_text(json.dumps(measured) + "\n")
            dist.barrier()
        finally:
            if world.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)


def measure(trainer: MeasuredTrainer, warmup: int, steps: int) -> dict[str, Any]:
    """What a step takes in seconds and bytes, the worst rank's; parts are rank 0's."""
    world, on_gpu = trainer.world, trainer.world.device.type == "cuda"
    taken = TakenByForward(trainer.loss_model, on_gpu)
    with trainer.explained_out_of_memory():
        for step in range(warmup):
            trainer._step(step)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seconds, phases = timed(trainer, warmup, steps)
        parts = trainer.memory_parts(taken.bytes if on_gpu else None)
        memory = memory_facts(trainer)
        peaks, spent = profiled(trainer, warmup + steps) if on_gpu else ({}, {})
    offload = trainer.engine.offload
    host = {
        "offloaded_bytes": offload.memory.allocated_bytes if offload else 0,
        "host_rss_bytes": psutil.Process().memory_info().rss,
        "host_budget_bytes": offload.memory.limit_bytes if offload else 0,
        "host_cores": len(os.sched_getaffinity(0)),
    }
    return {
        "step_seconds": statistics.median(seconds),
        "all_step_seconds": seconds,
        "losses": losses(trainer),
        "phase_seconds": phases,
        "parts": asdict(parts),
        **worst({**memory, **host}, world),
        "peak_by_phase_bytes": worst(peaks, world),
        "spent_ms": spent,
        "state_on_host": trainer.state_on_host,
        "layers_with_state_on_gpu": trainer.state_stays
        if trainer.state_on_host
        else trainer.model.config.num_hidden_layers,
        "placement": trainer.placement.layers if trainer.placement else None,
        "tokens": trainer.inputs.stream.sequences_per_step * trainer.config.model_max_length,
        "schedule": trainer.context.schedule.name,
        "head_groups": trainer.context.schedule.turns,
        "kernel": trainer.context.selection.kernel.name,
        "transport": trainer.context.transport.name,
        "config": trainer.config.to_json(),
    }


def timed(trainer: MeasuredTrainer, warmup: int, steps: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of every step on the slowest rank, and medians of its phases; the host runs one step ahead at most."""
    trainer.moments.clear()
    for step in range(steps):
        trainer._step(warmup + step)
        begun = [moment for name, moment in trainer.moments if name == "forward"]
        if step:
            begun[0].seconds_until(begun[-1])
    trainer.moments.append(("end", Moment(trainer.world.device)))
    moments, accumulation = trainer.moments, trainer.config.gradient_accumulation_steps
    by_step: list[dict[str, float]] = [{} for _ in range(steps)]
    for i, ((name, moment), (_, after)) in enumerate(pairwise(moments)):
        phases = by_step[i // (2 * accumulation + 1)]
        phases[name] = phases.get(name, 0.0) + moment.seconds_until(after)
    seconds = torch.tensor([sum(phases.values()) for phases in by_step])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.tolist(), {name: statistics.median(phases[name] for phases in by_step) for name in by_step[0]}


def losses(trainer: MeasuredTrainer) -> list[float]:
    """Of every step so far, warm-up and profile among them, over all ranks."""
    shares = torch.stack(trainer.losses)
    dist.all_reduce(shares)
    found: list[float] = shares.tolist()
    return found


def memory_facts(trainer: MeasuredTrainer) -> dict[str, int]:
    """Peaks, buffers that peers map included, and what the process holds on the device outside of torch's allocator."""
    device = trainer.world.device
    if device.type != "cuda":
        return {}
    free, capacity = torch.cuda.mem_get_info(device)
    buffers, reserved = trainer.context.transport.buffer_bytes, torch.cuda.memory_reserved(device)
    recorded = trainer.context.transport.recorded_bytes
    return {
        "peak_memory_allocated_bytes": torch.cuda.max_memory_allocated(device) + buffers + recorded,
        "peak_memory_reserved_bytes": torch.cuda.max_memory_reserved(device) + buffers,
        "attention_buffer_bytes": buffers,
        "between_steps_bytes": torch.cuda.memory_allocated(device),
        "outside_bytes": capacity - free - reserved - buffers,
        "capacity_bytes": capacity,
    }


def profiled(trainer: MeasuredTrainer, step: int) -> tuple[dict[str, int], dict[str, float]]:
    """Peaks of a step's phases, without the buffers that peers map; what rank 0's device spent it with, in ms."""
    torch.cuda.synchronize()
    peaks = trainer.peaks = {}
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        trainer._step(step)
        torch.cuda.synchronize()
    trainer.peaks = None
    if not trainer.world.is_main:
        return peaks, {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        account = gpu_breakdown(read_trace(trace))
    spent: dict[str, float] = {}
    for (kind, _), ms in account.spent.items():
        spent[kind] = spent.get(kind, 0.0) + ms
    return peaks, {**spent, **{f"{kind}, hidden": ms for kind, ms in account.hidden.items() if ms > 1}}


def worst(facts: Mapping[str, int], world: World) -> dict[str, int]:
    values = torch.tensor(list(facts.values()), dtype=torch.float64)
    if facts:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return {name: int(value) for name, value in zip(facts, values.tolist(), strict=True)}


if __name__ == "__main__":
    main(sys.argv[1:])
