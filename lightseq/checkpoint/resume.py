"""Resuming: choosing a checkpoint, checking its state and flags, and restoring it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from lightseq.checkpoint import manifest, state_files
from lightseq.checkpoint.checkpoints import (
    STATE,
    VISIBLE_SECONDS,
    is_checkpoint,
    list_checkpoints,
    read_trainer_state,
    wait_until,
)
from lightseq.config.choices import ADAM_FLAGS
from lightseq.config.optimizers import NO_STATE, OPTIMIZERS
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import from_rank_0, on_all_ranks
from lightseq.distributed.world import World
from lightseq.objectives.registry import objective_of
from lightseq.parts import adapter_files
from lightseq.utils.formatting import first_line, plural

NEWEST = ("True", "auto")  # values of the flag that ask for the newest checkpoint
# Flags of the optimization, as opposed to the model and the data. Changing them on resume is allowed and noted.
LEARNING_FLAGS: Final = (
    *("optim", *ADAM_FLAGS, "learning_rate", "loraplus_lr_ratio", "weight_decay", "max_grad_norm"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps"),
    *("bf16", "fp16", "tf32", "fp8", "gradient_accumulation_steps", "per_device_train_batch_size", "beta"),
    *("distill_kind", "distill_temperature", "distill_beta"),
)
ENDLESS_LR_SCHEDULES: Final = ("constant", "constant_with_warmup", "inverse_sqrt")  # do not depend on the last step


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from, and the later ones that are damaged, each with a description of its damage."""

    path: Path | None
    damaged: tuple[tuple[Path, str], ...] = ()


FRESH_START = ResumePoint(None)


def find_checkpoint(
    output_dir: Path, requested: str | None, world: World, visible_seconds: float = VISIBLE_SECONDS
) -> ResumePoint:
    """Returns the checkpoint for --resume_from_checkpoint after verifying every file. All ranks must call it.

    Exits with one line if no checkpoint is complete, or if a rank does not see the newest one after `visible_seconds`.
    With `auto`, a directory without any checkpoint is a fresh start.
    """
    if requested is None:
        return FRESH_START
    if requested not in NEWEST:
        on_all_ranks(
            world,
            lambda: _require(is_checkpoint(Path(requested)), f"{requested} is not a checkpoint directory; give one"),
        )
        damage = _damage(Path(requested), world)
        on_all_ranks(world, lambda: _require(damage is None, f"{requested} is damaged: {damage}; give another"))
        return ResumePoint(Path(requested))
    damaged: tuple[tuple[Path, str], ...] = ()
    candidates = from_rank_0(on_all_ranks(world, lambda: list_checkpoints(output_dir)))
    if candidates:
        on_all_ranks(world, lambda: _check_visible(candidates[-1], visible_seconds))
    for path in reversed(candidates):
        damage = _damage(path, world)
        if damage is None:
            return ResumePoint(path, damaged)
        damaged += ((path, damage),)
    line = f"{requested}: {output_dir} has no checkpoint; leave it out, or give auto"
    if damaged:
        why = "; ".join(f"{path.name}: {damage}" for path, damage in damaged)
        line = f"{requested}: {output_dir} has no complete checkpoint ({why}); start over in another directory"
    on_all_ranks(world, lambda: _require(requested == "auto" and not damaged, line))
    return FRESH_START


def _check_visible(checkpoint: Path, seconds: float) -> None:
    if not wait_until(checkpoint.is_dir, checkpoint.parent, seconds):
        raise ValueError(
            f"--output_dir {checkpoint.parent} has no {checkpoint.name}, which rank 0 sees; give a directory on a file "
            "system that all hosts share"
        )


def _require(holds: bool, line: str) -> None:
    if not holds:
        raise ValueError(f"--resume_from_checkpoint {line}")


def _damage(path: Path, world: World) -> str | None:
    """Returns the damage of a checkpoint, the same on all ranks. Each rank reads a share of the files."""
    found: list[str | None] = [None] * world.size
    dist.all_gather_object(found, manifest.find_damage(path, world.rank, world.size))
    return next((line for line in found if line is not None), None)


def check_engine(directory: Path, engine: str | None, ranks: int) -> None:
    """Raises ValueError if another engine saved the state, or DeepSpeed saved it on another number of ranks."""
    facts = read_trainer_state(directory)
    saved, saved_ranks = facts.get("engine"), facts.get("ranks")
    if saved == engine and (engine is None or saved_ranks == ranks):
        return
    was = f"{saved} on {saved_ranks} ranks" if saved else "FSDP2"
    raise ValueError(
        f"--resume_from_checkpoint {directory} was saved by {was}, but this run uses "
        f"{f'{engine} on {ranks} ranks' if engine else 'FSDP2'}; resume as it was saved, or start over from its "
        f"weights with {adapter_files.flag_for_weights(directory)}"
    )


def check_flags(resume_from: Path, config: TrainConfig) -> tuple[str, ...]:
    """Returns notes on changed flags. Raises ValueError if the optimizer cannot use the saved state."""
    then, now = read_trainer_state(resume_from).get("config"), config.to_json()
    if not isinstance(then, dict):
        return ()  # saved by an older version
    changed = [name for name in LEARNING_FLAGS if name in then and then[name] != now[name]]
    same_state = OPTIMIZERS.get(then.get("optim", "")) == OPTIMIZERS[config.optim]
    if "optim" in changed and not config.deepspeed and not same_state:
        raise ValueError(
            f"--resume_from_checkpoint {resume_from} has the state of --optim {then['optim']}, not of {config.optim}; "
            f"give --optim {then['optim']}, or start over from its weights with "
            f"{adapter_files.flag_for_weights(resume_from)}"
        )
    before = then.get("model_name_or_path")
    names = {adapter_files.base_model_name(name) for name in (before, config.model_name_or_path) if name}
    frozen = objective_of(config).frozen_models
    if any(model.source is None for model in frozen) and len(names) > 1:
        raise ValueError(
            f"--resume_from_checkpoint {resume_from} has a reference with the weights of {before}, not of "
            f"{config.model_name_or_path}; give --model_name_or_path {before}"
        )
    teachers = {adapter_files.base_model_name(name) for name in (then.get("teacher"), config.teacher) if name}
    if len(teachers) > 1:
        raise ValueError(
            f"--resume_from_checkpoint {resume_from} has learned from --teacher {then['teacher']}, not from "
            f"{config.teacher}; give --teacher {then['teacher']}"
        )
    changes = ", ".join(f"--{name} {now[name]} (was {then[name]})" for name in changed)
    return (f"resumed with {changes}",) if changes else ()


def changed_ranks_note(resume_from: Path, world: World) -> tuple[str, ...]:
    """Returns a note if the run goes on with another number of ranks."""
    before = read_trainer_state(resume_from).get("ranks")
    if before in (None, world.size):
        return ()
    hosts = world.size // world.local_size
    per_host = f"--nproc_per_node {before // hosts}" if before % hosts == 0 else "--nproc_per_node"
    return (
        f"resumed on {plural(world.size, 'rank')} (was {before}); for as many as before, give {per_host} to lightseq "
        "or to the launcher",
    )


def changed_length_note(resume_from: Path, lr_scheduler_type: str, total_steps: int) -> tuple[str, ...]:
    """Returns a note if the run has become longer or shorter and its learning rate depends on that."""
    before = read_trainer_state(resume_from).get("total_steps")
    if before in (None, total_steps) or lr_scheduler_type in ENDLESS_LR_SCHEDULES:
        return ()
    return (
        f"resumed for {total_steps} steps in all (was {before}): the learning rate jumps to where a "
        f"{lr_scheduler_type} schedule of the new length would be",
    )


def restore(directory: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Restores this rank's part of weights and optimizer state. Raises ValueError if they do not fit the model."""
    reader = state_files.TensorReader(directory / STATE)
    saved = state_files.tensor_shapes(reader)
    if _lacks_optimizer_state(directory, saved):
        optimizer.state.clear()
    tensors = {
        name: tensor
        for name, tensor in state_files.state_tensors(model, optimizer).items()
        if name in saved or not name.startswith(state_files.BUFFER)  # a missing buffer keeps its value
    }
    _check_fit(directory, saved, tensors)
    try:
        dcp.load(tensors, storage_reader=reader)
    except CheckpointException as error:  # equal on all ranks
        if not any("block boundary" in str(failure[0]) for failure in error.failures.values()):
            rank, (failure, _) = next(iter(error.failures.items()))
            raise ValueError(
                f"--resume_from_checkpoint {directory} cannot be read (rank {rank}: {first_line(failure)}); "
                "give another checkpoint"
            ) from error
        raise ValueError(
            f"--resume_from_checkpoint {directory} has 8-bit optimizer states whose blocks cannot be split over "
            f"{dist.get_world_size()} ranks; resume on as many ranks as it was saved on"
        ) from error


def _lacks_optimizer_state(directory: Path, saved: dict[str, list[int]]) -> bool:
    """Returns whether the optimizer had no state yet: with float16, a run may skip its first steps and stop then."""
    optim = (read_trainer_state(directory).get("config") or {}).get("optim", "sgd")
    return OPTIMIZERS.get(optim) != NO_STATE and not any(name.startswith("optimizer.") for name in saved)


def restore_rng_state(directory: Path, world: World) -> None:
    """Restores this rank's random states if the number of ranks has not changed."""
    if read_trainer_state(directory).get("ranks") == world.size:
        state_files.restore_rng(directory / STATE / state_files.rng_file(world.rank), world.device)


def _check_fit(directory: Path, saved: dict[str, list[int]], tensors: dict[str, Tensor]) -> None:
    remedy = "resume with the model and the optimizer that it was saved with"
    for name, tensor in tensors.items():
        if saved.get(name) != list(tensor.shape):
            found = f"{name} of shape {saved[name]}" if name in saved else f"no {name}"
            raise ValueError(
                f"--resume_from_checkpoint {directory} has {found}, but this run has {list(tensor.shape)}; {remedy}"
            )
    unexpected = [name for name in saved if name not in tensors]
    if unexpected:
        raise ValueError(
            f"--resume_from_checkpoint {directory} has {unexpected[0]}, which this run does not have; {remedy}"
        )
