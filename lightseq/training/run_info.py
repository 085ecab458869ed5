"""Description of a run for run.json and the first lines on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightseq.architecture.flops import describe_experts, describe_recurrences, total_parameters
from lightseq.architecture.inspection import inspect_architecture
from lightseq.architecture.recurrent_schedule import chosen_recurrent_schedule
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.rank_launcher import started_with
from lightseq.kernels.recurrent.scan_kernel_choice import why_slow
from lightseq.plan.plan import layer_flags
from lightseq.training.engine import Engine
from lightseq.training.machine import hardware
from lightseq.training.trainer import Trainer
from lightseq.utils.formatting import plural
from lightseq.utils.source import commit


def run_facts(trainer: Trainer, command: str, notes: Sequence[str]) -> dict[str, Any]:
    """Returns the content of run.json: everything needed to repeat the run and to judge its numbers."""
    engine = trainer.engine
    return {
        "command": command,
        "commit": commit(),
        "schedule": trainer.context.schedule.name,
        "recurrent_schedule": _recurrent_schedule(trainer),
        "kernel": trainer.context.selection.kernel.name,
        "kernels_passed_over": dict(trainer.context.selection.skipped),
        "transport": trainer.context.transport.name,
        "transport_passed_over": trainer.context.transport.fallback_reason,
        "head_groups": trainer.context.schedule.head_groups_per_rank,
        "ulysses_size": trainer.context.schedule.ulysses_size,
        "remat": engine.config.remat_policy,
        "layers_per_checkpoint": engine.config.group_size,
        "memory_plan": engine.plan.to_json() if engine.plan else None,
        "placement": engine.memory.placement.layers if engine.memory.placement else None,
        "host_memory_bytes": engine.offload.memory.limit_bytes if engine.offload else None,
        "fp8": trainer.config.fp8,
        "fp8_emulated": trainer.config.fp8_emulate,
        "parameters": engine.sharding_description,
        "deepspeed": trainer.inputs.deepspeed.settings if trainer.inputs.deepspeed else None,
        "world_size": trainer.world.size,
        "data_ranks": engine.dims.data_ranks,
        "sequence_ranks": trainer.inputs.dims.sequence,
        "batch_lengths": trainer.batch_lengths,
        "total_steps": trainer.inputs.total_steps,
        "first_step": trainer.first_step + 1,  # counted from 1, as in metrics.jsonl
        "resumed_from": str(trainer.inputs.resume_from) if trainer.inputs.resume_from else None,
        "notes": list(notes),
        "hardware": hardware(trainer.world.device),
        "host_threads": torch.get_num_threads(),
        "config": {**trainer.config.to_json(), **started_with(trainer.world.local_size)},  # --config reads it
        "model_config": trainer.inputs.model_config.to_dict(),
    }


def describe_run(trainer: Trainer) -> dict[str, Any]:
    """Returns the lines for the terminal by name: model, data, parallelism, kernels and memory."""
    c, m, world = trainer.config, trainer.inputs.model_config, trainer.world
    fallback_reason, is_split = trainer.context.transport.fallback_reason, trainer.inputs.dims.sequence > 1
    start = trainer.inputs.resume_from or trainer.inputs.weights
    pretrained = "pretrained weights" if str(start) == c.model_name else f"weights from {start}"
    experts = describe_experts(m, trainer.engine.dims.expert)
    recurrent = describe_recurrences(m, _recurrent_schedule(trainer), _slow_reason(trainer))
    weights = f"random, seed {c.seed}" if start is None else pretrained
    return {
        "model": f"{c.model_name}, {total_parameters(m):,} parameters, {weights}",
        **({"experts": experts} if experts else {}),
        **({"recurrent": recurrent} if recurrent else {}),
        "data": f"{c.data_path}, {plural(len(trainer.inputs.stream.examples), 'example')}",
        "ranks": f"{world.size} ({trainer.engine.dims.data_ranks} data x {trainer.inputs.dims.sequence} sequence) on "
        f"{hardware(world.device)['device']}",
        **({"objective": objective} if (objective := str(trainer.objective)) else {}),
        "sequence": f"{c.model_max_length:,} tokens, {trainer.inputs.stream.sequences_per_step} a step",
        "precision": f"{c.compute_dtype} compute, {_fp8(c)}{_packed_base(trainer)}float32 master weights",
        "schedule": str(trainer.context.schedule) if is_split else "none: each rank has its own sequences",
        "kernel": str(trainer.context.kernels),
        "transport": trainer.context.transport.name + (f" ({fallback_reason})" if fallback_reason else ""),
        "memory plan": describe_memory(trainer.engine),
        "parameters": trainer.engine.sharding_description + _adapters(trainer),
    }  # fmt: skip


def _recurrent_schedule(trainer: Trainer) -> str | None:
    context, length = trainer.context, trainer.config.model_max_length
    tokens = context.layout.padded_length(length) // context.layout.world
    return chosen_recurrent_schedule(trainer.inputs.model_config, context.recurrent_schedule, context.layout, tokens)


def _slow_reason(trainer: Trainer) -> str | None:
    """Returns why recurrences of a model on a GPU have no fast kernel; None if no reason is known."""
    is_recurrent = inspect_architecture(trainer.inputs.model_config).has_recurrences
    if trainer.world.device.type != "cuda" or not is_recurrent:
        return None
    return why_slow(getattr(torch, trainer.config.compute_dtype))


def describe_memory(engine: Engine) -> str:
    """Returns how layers store, recompute and offload activations, with the planned memory if the planner decided."""
    if engine.plan is not None:
        return str(engine.plan)
    config = engine.config
    moved = [f"{config.offload} in host memory"] if config.offload != "none" else []
    return ", ".join([*layer_flags(config), *moved])


def _fp8(config: TrainConfig) -> str:
    emulated = ", emulated" if config.fp8_emulate else ""
    return f"linear layers in FP8 ({config.fp8}{emulated}), " if config.fp8 else ""


def _packed_base(trainer: Trainer) -> str:
    found = trainer.inputs.packed_base
    if found is None:
        return ""
    what = "experts" if found.is_exact else "linear layers"
    return f"frozen {what} in {found.words}{' as stored' if found.in_files else ''}, "


def _adapters(trainer: Trainer) -> str:
    lora, count = trainer.inputs.lora, trainer.adapter_parameters
    if lora is None:
        return ""
    share = 100 * count / total_parameters(trainer.inputs.model_config)
    percent = f"{share:.2g}" if share < 100 else f"{share:,.0f}"
    targets = ", ".join((*lora.targets, *lora.parameters))
    return f"; LoRA rank {lora.rank} on {targets}, {count:,} trainable parameters ({percent}%)"
