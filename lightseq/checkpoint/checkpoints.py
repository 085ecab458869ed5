"""Checkpoint directories of a run: naming, discovery, retention and restoring.

checkpoint-N/ opens with `from_pretrained`. checkpoint-N/state/ holds float32 master weights, optimizer state and random
states, split as the ranks are (torch.distributed.checkpoint, or DeepSpeed's own files); trainer_state.json holds what
fits in a line; manifest.json holds the SHA-256 of every file. A directory gets this name only when it is complete.

Only directories that a run wrote are ever removed. The manifest or trainer_state.json identifies them, not the name.
"""

import itertools
import json
import math
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from lightseq.checkpoint import manifest, randomness, state_files
from lightseq.distributed.mesh import World, on_all_ranks
from lightseq.utils.formatting import first_line

STATE, TRAINER_STATE, LOSS, DATA = "state", "trainer_state.json", "eval_loss", "data"
# After the name of what is not a checkpoint, or no more; OTHER: a directory that no run wrote.
PARTIAL, DELETED, BROKEN, OTHER = ".partial", ".deleted", ".broken", ".other"
NAME = re.compile(r"checkpoint-\d+")
LEFTOVER = re.compile(rf"({NAME.pattern})(\.\w+)(-\d+)?")  # such a name, with a number where it was taken already
NEWEST = ("True", "auto")  # what asks for the newest one


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from, and later ones that are damaged, with the damage."""

    path: Path | None
    damaged: tuple[tuple[Path, str], ...] = ()


FRESH_START = ResumePoint(None)


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Returns the checkpoints of a run, oldest first, without checking that they are complete."""
    found = [path for path in output_dir.glob("checkpoint-*") if NAME.fullmatch(path.name) and _is_checkpoint(path)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def find_checkpoint(output_dir: Path, asked: str | None, world: World) -> ResumePoint:
    """Returns the checkpoint that --resume_from_checkpoint names, after reading every file of it. Every rank calls it.

    Ends the run with one line if no checkpoint is complete; with `auto`, only if there are any at all.
    """
    if asked is None:
        return FRESH_START
    if asked not in NEWEST:
        on_all_ranks(
            world, lambda: _require(_is_checkpoint(Path(asked)), f"{asked} is no checkpoint-N directory; name one")
        )
        broken = _damage(Path(asked), world)
        on_all_ranks(world, lambda: _require(broken is None, f"{asked} is damaged: {broken}; name another"))
        return ResumePoint(Path(asked))
    damaged: tuple[tuple[Path, str], ...] = ()
    candidates = on_all_ranks(world, lambda: list_checkpoints(output_dir))
    for path in reversed(candidates):
        broken = _damage(path, world)
        if broken is None:
            return ResumePoint(path, damaged)
        damaged += ((path, broken),)
    line = f"{asked}: {output_dir} holds no checkpoint; leave it out, or give auto"
    if damaged:
        why = "; ".join(f"{path.name}: {broken}" for path, broken in damaged)
        line = f"{asked}: {output_dir} holds no whole checkpoint ({why}); begin anew in another directory"
    on_all_ranks(world, lambda: _require(asked == "auto" and not damaged, line))
    return FRESH_START


def _is_checkpoint(path: Path) -> bool:
    """Returns whether a directory is a checkpoint, maybe a damaged one. Other programs and people use the name too."""
    return any((path / name).is_file() for name in (TRAINER_STATE, manifest.MANIFEST)) or (path / STATE).is_dir()


def is_written_by_run(path: Path) -> bool:
    """Returns whether a run wrote the directory, as its manifest or trainer state shows."""
    for read in (manifest.read, read_trainer_state):
        with suppress(ValueError, OSError):
            read(path)
            return True
    return False


def _is_unfinished(path: Path) -> bool:
    """Returns whether a save began to write the directory: it starts empty, and then STATE is made."""
    return not path.is_symlink() and ((path / STATE).is_dir() or not _holds_files(path))


def _require(holds: bool, line: str) -> None:
    if not holds:
        raise ValueError(f"--resume_from_checkpoint {line}")


def _damage(path: Path, world: World) -> str | None:
    """Returns the damage of a checkpoint, equal on all ranks, each of which reads a share of its files."""
    found: list[str | None] = [None] * world.size
    dist.all_gather_object(found, manifest.find_damage(path, world.rank, world.size))
    return next((line for line in found if line is not None), None)


def check_engine(directory: Path, engine: str | None, ranks: int) -> None:
    """Raises ValueError if another engine wrote the state, or DeepSpeed did on another number of ranks."""
    facts = read_trainer_state(directory)
    saved, saved_ranks = facts.get("engine"), facts.get("ranks")
    if saved == engine and (engine is None or saved_ranks == ranks):
        return
    was = f"{saved} on {saved_ranks} ranks" if saved else "FSDP2"
    raise ValueError(
        f"--resume_from_checkpoint {directory} was saved by {was}, this run is "
        f"{f'{engine} on {ranks}' if engine else 'FSDP2'}; resume as it was saved, or begin anew from its weights "
        f"with --model_name_or_path {directory}"
    )


def best_checkpoint(output_dir: Path) -> Path | None:
    """Returns the checkpoint with the lowest evaluation loss, the first of equals. A NaN loss does not count."""
    losses = {path: _eval_loss(path) for path in list_checkpoints(output_dir)}
    known = {path: loss for path, loss in losses.items() if not math.isnan(loss)}
    return min(known, key=lambda path: known[path]) if known else None


def _eval_loss(path: Path) -> float:
    try:
        loss = read_trainer_state(path).get(LOSS)
    except (ValueError, OSError):  # a damaged one is the best of nothing
        return math.nan
    return float(loss) if isinstance(loss, int | float) else math.nan


def prune(output_dir: Path, retain: int | None, retain_best: bool) -> None:
    """Removes all but the newest `retain` checkpoints and, with `retain_best`, the one of the lowest eval loss."""
    kept = best_checkpoint(output_dir) if retain_best else None
    own = [path for path in list_checkpoints(output_dir) if is_written_by_run(path)]
    for old in own[: -retain if retain else 0]:
        if old != kept:
            set_aside(old, DELETED)  # at once; what is half deleted should not look like a checkpoint
    remove_leftovers(output_dir)


def set_aside(path: Path, why: str) -> Path:
    """Renames a file or directory to an unused name, which it returns."""
    aside = path.with_name(path.name + why)
    taken = (path.with_name(f"{path.name}{why}-{number}") for number in itertools.count(2))
    while aside.exists():
        aside = next(taken)
    return path.rename(aside)


def clear_path(path: Path) -> None:
    """Frees the name of a checkpoint, or of an unfinished one, for the save that is about to use it."""
    if not path.exists():
        return
    if path.name.endswith(PARTIAL) and _is_unfinished(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        set_aside(path, DELETED if is_written_by_run(path) else OTHER)


def remove_leftovers(output_dir: Path, also: str = DELETED) -> None:
    """Removes directories marked as deleted and, with PARTIAL, unfinished saves of an earlier run.

    A directory that cannot be removed, for example because another host reads it, is left for the next time.
    """
    for left in output_dir.glob("checkpoint-*"):
        name = LEFTOVER.fullmatch(left.name)
        if name is not None and name[2] in (DELETED, also):
            _remove_own(left)


def remove_checkpoints(output_dir: Path) -> None:
    """Removes every checkpoint that a run wrote, including unfinished and damaged ones."""
    for path in output_dir.glob("checkpoint-*"):
        if NAME.fullmatch(path.name) and is_written_by_run(path):
            _remove_own(set_aside(path, DELETED))
        elif LEFTOVER.fullmatch(path.name):
            _remove_own(path)


def _remove_own(path: Path) -> None:
    """Removes the files of a directory that its manifest names, or all of them if it has none.

    Other files stay, under the checkpoint's name. Of a link only the link is removed.
    """
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
        return
    try:
        names = [*manifest.read(path), manifest.MANIFEST]  # it last: it tells the next sweep what is left to remove
    except ValueError:
        unfinished = PARTIAL in path.name and _is_unfinished(path)
        if is_written_by_run(path) or unfinished or not _holds_files(path):
            shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        for name in names:
            (path / name).unlink(missing_ok=True)
        for folder in sorted((found for found in path.rglob("*") if found.is_dir()), reverse=True):
            with suppress(OSError):  # it holds what no run wrote
                folder.rmdir()
        if _holds_files(path):
            path.rename(path.with_name(path.name.partition(".")[0]))
        else:
            path.rmdir()


def _holds_files(path: Path) -> bool:
    return not path.is_dir() or any(not found.is_dir() for found in path.rglob("*"))


def read_trainer_state(directory: Path) -> dict[str, Any]:
    """Returns the contents of trainer_state.json. Raises ValueError if it is damaged."""
    try:
        facts = json.loads((directory / TRAINER_STATE).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{directory / TRAINER_STATE} is damaged; name another checkpoint") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("step"), int) or facts["step"] < 0:
        raise ValueError(f"{directory / TRAINER_STATE} does not say after which step it was; name another checkpoint")
    return facts


def restore(directory: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Restores this rank's part of weights and optimizer state. Raises ValueError if they are another model's."""
    reader = state_files.TensorReader(directory / STATE)
    saved = state_files.tensor_shapes(reader)
    if _before_the_first_update(directory, saved):
        optimizer.state.clear()
    tensors = state_tensors(model, optimizer)
    _check_fit(directory, saved, tensors)
    try:
        dcp.load(tensors, storage_reader=reader)
    except CheckpointException as error:  # on all ranks alike
        if not any("block boundary" in str(failure[0]) for failure in error.failures.values()):
            rank, (failure, _) = next(iter(error.failures.items()))
            raise ValueError(
                f"--resume_from_checkpoint {directory} cannot be read (rank {rank}: {first_line(failure)}); "
                "name another checkpoint"
            ) from error
        raise ValueError(
            f"--resume_from_checkpoint {directory} holds 8-bit states whose blocks {dist.get_world_size()} ranks would "
            "cut apart; resume on as many ranks as it was saved on"
        ) from error


def _before_the_first_update(directory: Path, saved: dict[str, list[int]]) -> bool:
    """Returns whether the optimizer had no state yet: float16 skips the first steps, and a run may end after them."""
    optim = (read_trainer_state(directory).get("config") or {}).get("optim", "sgd")
    return optim != "sgd" and not any(name.startswith("optimizer.") for name in saved)


def restore_randomness(directory: Path, world: World) -> None:
    """Restores this rank's random states, if the number of ranks has not changed."""
    if read_trainer_state(directory).get("ranks") == world.size:
        randomness.restore(directory / STATE / randomness.file_of(world.rank), world.device)


def _check_fit(directory: Path, saved: dict[str, list[int]], tensors: dict[str, Tensor]) -> None:
    remedy = "resume with the model and the optimizer that it was saved with"
    for name, tensor in tensors.items():
        if saved.get(name) != list(tensor.shape):
            found = f"{name} of shape {saved[name]}" if name in saved else f"no {name}"
            raise ValueError(
                f"--resume_from_checkpoint {directory} holds {found}, this run has {list(tensor.shape)}; {remedy}"
            )
    without_place = [name for name in saved if name not in tensors]
    if without_place:
        raise ValueError(
            f"--resume_from_checkpoint {directory} holds {without_place[0]}, which this run has no place for; {remedy}"
        )


def state_tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns every tensor that training changes, by name; tied parameters appear once."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[str, Tensor] = {f"model.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"optimizer.{names[id(parameter)]}.{key}"] = value
    return found
