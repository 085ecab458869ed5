"""Everything a run can refuse, looked at before any process waits for another and before anything is written."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from transformers import LlamaConfig

from lightseq import checkpoint, weights
from lightseq.config import TrainConfig
from lightseq.data import BatchStream, Examples, open_examples, require_target
from lightseq.family import Family, apply_rope, context_warning, resolve
from lightseq.kernels import KernelSpec, select
from lightseq.mesh import World, check_devices, check_sequence_size
from lightseq.metrics import METRICS, RUN, check_mirror


@dataclass(frozen=True)
class Inputs:
    """A run's inputs, found and checked."""

    model_config: LlamaConfig
    weights: Path | None  # None: drawn from the seed
    stream: BatchStream
    eval_stream: BatchStream | None
    total_steps: int
    sequence_size: int
    data_rank: int
    resume_from: Path | None
    notes: tuple[str, ...]  # what the user should know, said once


def prepare(config: TrainConfig, family: Family, world: World) -> Inputs:
    """Raises ValueError with one line for whatever cannot be met. Writes nothing, and waits for no other rank."""
    check_mirror(config.report_to)
    resume_from = _check_output_dir(Path(config.output_dir), config)
    model = find_model(config, family, world)
    data_ranks = world.size // model.sequence_size
    stream = BatchStream(
        find_examples(config.data_path, model, config, world),
        config.model_max_length,
        config.per_device_train_batch_size,
        data_ranks,
        config.gradient_accumulation_steps,
        epochs=None if config.max_steps else config.num_train_epochs,
        seed=config.seed,
    )
    eval_stream = None
    if config.eval_data_path and config.eval_strategy != "no":
        eval_examples = find_examples(config.eval_data_path, model, config, world)
        require_target(eval_examples, config.eval_data_path)
        eval_stream = evaluation_stream(eval_examples, config.model_max_length, config, data_ranks)
    total_steps = config.max_steps or stream.steps
    if config.profile_steps is not None and config.profile_steps[0] > total_steps:
        first, last = config.profile_steps
        raise ValueError(f"--profile_steps {first}:{last} begins after the last step, {total_steps}; name earlier ones")
    # Last, for it can take hours: everything else has been looked at.
    directory = fetch(model)
    notes = stream.examples.notes + (eval_stream.examples.notes if eval_stream else ())
    return Inputs(
        model.config,
        directory,
        stream,
        eval_stream,
        total_steps,
        model.sequence_size,
        world.rank // model.sequence_size,
        resume_from,
        notes + model.warnings,
    )


@dataclass(frozen=True)
class FoundModel:
    """A model that can run here, on groups of `sequence_size` ranks; its weights may have to be fetched yet."""

    config: LlamaConfig
    weights: Path | str | None
    tokenizer: str | None
    sequence_size: int
    warnings: tuple[str, ...]


def find_model(config: TrainConfig, family: Family, world: World) -> FoundModel:
    check_devices(world)
    sequence_size = check_sequence_size(world, config.sequence_parallel_size)
    source = resolve(family, config.model_name_or_path, config.random_init)
    model_config = apply_rope(source.config, config.rope_theta, config.rope_scaling)
    _check_kernel(config, model_config, world.device)
    tokenizer = config.tokenizer or (str(source.weights) if source.weights else None)
    warning = context_warning(model_config, config.model_max_length)
    warnings = (f"warning: {warning}",) if warning else ()
    return FoundModel(model_config, source.weights, tokenizer, sequence_size, warnings)


def find_examples(path: str, model: FoundModel, config: TrainConfig, world: World) -> Examples:
    length, words = config.model_max_length, model.config.vocab_size
    return open_examples(path, length, words, model.tokenizer, config.lazy_preprocess, world.is_main)


def evaluation_stream(examples: Examples, length: int, config: TrainConfig, data_ranks: int) -> BatchStream:
    """Every example once, in order."""
    return BatchStream(examples, length, config.per_device_eval_batch_size, data_ranks, epochs=1, shuffle=False)


def fetch(model: FoundModel) -> Path | None:
    """The directory of a model's weights; None if they are drawn from the seed."""
    return weights.download(model.weights) if isinstance(model.weights, str) else model.weights


def continues(resume_from: Path | None, output_dir: Path) -> TypeGuard[Path]:
    """Whether a run goes on in the directory of the one that it resumes."""
    return resume_from is not None and resume_from.resolve().parent == output_dir.resolve()


def clear(output_dir: Path) -> None:
    """Removes what an earlier run left in its directory, and nothing else."""
    for name in (RUN, METRICS):
        (output_dir / name).unlink(missing_ok=True)
    for directory in [*output_dir.glob("checkpoint-*"), output_dir / "profile", output_dir / "runs"]:
        if directory.is_dir():
            shutil.rmtree(directory)


def _check_output_dir(output_dir: Path, config: TrainConfig) -> Path | None:
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"--output_dir {output_dir} is a file; name a directory")
    parent = next(p for p in (output_dir, *output_dir.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise ValueError(f"--output_dir {output_dir} lies below the file {parent}; name another")
    asked = config.resume_from_checkpoint
    resume_from = checkpoint.find(output_dir, asked) if asked else None
    if continues(resume_from, output_dir):
        newest = checkpoint.checkpoints(output_dir)[-1]
        if newest.name != resume_from.name:
            raise ValueError(
                f"--resume_from_checkpoint {asked}: {output_dir} holds the later {newest.name}; continue that one with "
                "--resume_from_checkpoint True, or give another --output_dir"
            )
        return resume_from
    holds_run = (output_dir / RUN).exists() or (output_dir / METRICS).exists() or any(output_dir.glob("checkpoint-*"))
    if holds_run and not config.overwrite_output_dir:
        raise ValueError(
            f"--output_dir {output_dir} already holds a run; name another, continue it with "
            "--resume_from_checkpoint True, or replace it with --overwrite_output_dir"
        )
    return resume_from


def _check_kernel(config: TrainConfig, model_config: LlamaConfig, device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    dtype = getattr(torch, config.compute_dtype)
    head_dim = model_config.head_dim or model_config.hidden_size // model_config.num_attention_heads
    select(config.kernel, KernelSpec(device.type, capability, dtype, head_dim, config.deterministic))
