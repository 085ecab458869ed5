"""Evaluation on all ranks: finds inputs, builds the model, runs the task and writes the records."""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from lightseq.config.flags import DataConfig, ModelConfig, ParallelismConfig
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import on_all_ranks
from lightseq.distributed.environment import secrets
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World
from lightseq.models.presets import ModelFamily
from lightseq.models.weights import refuse_nan
from lightseq.tools.evaluate.options import PROGRAM, Options, flags
from lightseq.tools.evaluate.retrieval import needle_task
from lightseq.tools.evaluate.tasks import Task, loss_task
from lightseq.training.build import build_engine
from lightseq.training.errors import exit_on_out_of_memory
from lightseq.training.find_model import find_model
from lightseq.training.machine import hardware, versions
from lightseq.training.output_directory import create_output_dir
from lightseq.training.run_info import describe_run
from lightseq.training.trainer import Trainer
from lightseq.utils.masking import mask_secrets

RECORD: Final = "evaluation.jsonl"
TASKS: Final = {"loss": loss_task, "needle": needle_task}
# Flags of training that an evaluation uses; a note names others that were given.
USED: Final = (
    *(field.name for group in (ModelConfig, DataConfig, ParallelismConfig) for field in fields(group)
      if field.name not in ("eval_data_path", "eval_fraction", "deepspeed")),
    "output_dir", "overwrite_output_dir", "per_device_eval_batch_size", "bf16", "fp16", "tf32", "fp8", "fp8_emulate",
    "seed", "deterministic",
)  # fmt: skip


def evaluate(family: ModelFamily, words: Sequence[str]) -> None:
    """Runs the task of a command line, writes the records and prints them."""
    with init_distributed(_timeout(words)) as world:
        options, given = on_all_ranks(world, lambda: flags(words))
        config = _without_training(given)
        task = on_all_ranks(world, lambda: _prepare(options, config, family, world))
        trainer = Trainer(config, task.inputs, world, build_engine(config, task.inputs, world))
        on_all_ranks(world, lambda: refuse_nan(trainer.model, config.model_name_or_path))
        if world.is_main:
            trainer.terminal.header(_header(trainer, task), [*task.inputs.notes, *_notes(given, config)])
        begin = time.perf_counter()
        with exit_on_out_of_memory(world, trainer.terminal, lambda: [_to_fit(config)]):
            result = task.run(trainer)
        seconds = time.perf_counter() - begin
        if world.is_main:
            about = _about(config, trainer, f"{PROGRAM} {shlex.join(words)}", seconds)
            path = _write(Path(config.output_dir), {"evaluation": options.task, **result.summary, **about}, result.rows)
            print("\n".join([*result.lines, f"records  {path}"]), flush=True)


# ---- inputs -------------------------------------------------------------------------------------------------------


def _timeout(words: Sequence[str]) -> float:
    """Returns the timeout of the process group. Ignores invalid flags, which are reported once the group exists."""
    try:
        return flags(words)[1].step_timeout
    except ValueError:
        return TrainConfig.step_timeout


def _without_training(config: TrainConfig) -> TrainConfig:
    """Resets flags that only affect the backward pass and the update."""
    used = {name: getattr(config, name) for name in USED}
    if config.max_eval_samples is not None:
        used["max_train_samples"] = None  # without the other limit, this one limits the rows
    return TrainConfig(
        **used, torch_compile=config.compiles, remat="attention", layers_per_checkpoint=1,
        tile_layers=config.tiles_layers, offload="optimizer" if config.state_on_host else "none",
    )  # fmt: skip


def _to_fit(config: TrainConfig) -> str:
    shorter = "a lower --model_max_length" if config.data_path else "shorter --lengths"
    half = "" if config.bf16 or config.fp16 else ", or --bf16"
    ranks = "more ranks on a sequence (--sequence_parallel_size)"
    return f"to fit: {ranks}, {shorter}{half}" if half else f"to fit: {ranks}, or {shorter}"


def _notes(given: TrainConfig, config: TrainConfig) -> list[str]:
    unused = [
        f"--{field.name}" for field in fields(TrainConfig)
        if getattr(given, field.name) not in (field.default, getattr(config, field.name)) and field.name != "offload"
    ]  # fmt: skip
    unused += ["--offload activations"] if given.offload in ("activations", "both") else []
    return [f"flags that only affect training are ignored: {', '.join(unused)}"] if unused else []


def _prepare(options: Options, config: TrainConfig, family: ModelFamily, world: World) -> Task:
    """Finds and checks all inputs before any rank waits for another and before anything is written."""
    record = Path(config.output_dir) / RECORD
    if record.exists() and not config.overwrite_output_dir:
        raise ValueError(f"{record} exists; give an empty --output_dir, or replace it with --overwrite_output_dir")
    model = find_model(config, family, world)
    task = TASKS[options.task](options, config, model, world)
    create_output_dir(Path(config.output_dir))
    return task


# ---- output --------------------------------------------------------------------------------------------


def _header(trainer: Trainer, task: Task) -> dict[str, Any]:
    known = describe_run(trainer)
    chosen = {name: known[name] for name in ("model", "ranks", "schedule", "kernel", "transport", "parameters")}
    return {
        "model": chosen.pop("model"),
        **task.header,
        **chosen,
        "precision": f"{trainer.config.compute_dtype} compute",
    }


def _about(config: TrainConfig, trainer: Trainer, command: str, seconds: float) -> dict[str, Any]:
    """Returns the facts needed to repeat the evaluation."""
    about = {
        "model": config.model_name_or_path, "data": config.data_path or None, "length": config.model_max_length,
        "ranks": trainer.world.size, "sequence_ranks": trainer.inputs.dims.sequence,
        "schedule": trainer.context.schedule.name, "kernel": trainer.context.selection.kernel.name,
        "transport": trainer.context.transport.name, "seconds": seconds, "command": command,
        "hardware": hardware(trainer.world.device), "versions": versions(), "config": config.to_json(),
    }  # fmt: skip
    return mask_secrets(about, secrets())  # type: ignore[no-any-return]


def _write(directory: Path, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    path = directory / RECORD
    path.write_text("".join(json.dumps(record) + "\n" for record in (summary, *rows)))
    return path
