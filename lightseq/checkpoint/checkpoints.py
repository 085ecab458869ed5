"""Checkpoint directories of a run: naming, discovery, retention and disk space.

checkpoint-N/ opens with `from_pretrained`. checkpoint-N/state/ holds float32 master weights, optimizer state and random
states, sharded over ranks (torch.distributed.checkpoint, or DeepSpeed's own files); trainer_state.json holds the step,
the flags and the position in the data; manifest.json holds the SHA-256 of every file. A directory gets this name only
when it is complete.

Only directories that a run wrote are ever removed. The manifest or trainer_state.json identifies them, not the name.
"""

import itertools
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightseq.checkpoint import manifest
from lightseq.config.optimizers import OPTIMIZERS
from lightseq.config.train_config import TrainConfig
from lightseq.plan.breakdown import GIB
from lightseq.schedule.timing import FLOAT32_BYTES
from lightseq.utils.files import read_json

STATE, TRAINER_STATE = manifest.STATE, manifest.TRAINER_STATE
EVAL_LOSS, DATA_POSITION = "eval_loss", "data"  # keys of trainer_state.json
# Suffixes of directories that are not valid checkpoints. OTHER: not written by a run.
PARTIAL, DELETED, BROKEN, OTHER = ".partial", ".deleted", ".broken", ".other"
NAME = re.compile(r"checkpoint-\d+")
WAIT_SECONDS = 0.5  # interval between listings of a directory
VISIBLE_SECONDS = 60.0  # delay until a network file system shows another host's files
# Matches a number at the end, too, which set_aside adds if the name is taken.
LEFTOVER = re.compile(rf"({NAME.pattern})(\.(?:partial|deleted|broken|other))(-\d+)?")


def wait_until(holds: Callable[[], bool], directory: Path, seconds: float) -> bool:
    """Waits up to `seconds` for another host's change of a directory. Returns whether the change is visible.

    Lists the directory each time, which makes a network file system ask its server.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(WAIT_SECONDS)
        with suppress(OSError):
            os.listdir(directory)
    return True


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Returns the checkpoints of a run, oldest first, without checking that they are complete."""
    found = [path for path in output_dir.glob("checkpoint-*") if NAME.fullmatch(path.name) and is_checkpoint(path)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Returns the step after which a checkpoint was written."""
    return int(checkpoint.name.split("-")[1])


def is_checkpoint(path: Path) -> bool:
    """Returns whether a directory is a checkpoint, possibly damaged. Other programs may use the same name."""
    return any((path / name).is_file() for name in (TRAINER_STATE, manifest.MANIFEST)) or (path / STATE).is_dir()


def is_written_by_run(path: Path) -> bool:
    """Returns whether a run wrote the directory, judging by its manifest or trainer state."""
    for read in (manifest.read, read_trainer_state):
        with suppress(ValueError, OSError):
            read(path)
            return True
    return False


def _is_unfinished(path: Path) -> bool:
    """Returns whether a directory is an interrupted save: empty, or with a STATE directory."""
    return not path.is_symlink() and ((path / STATE).is_dir() or not _holds_files(path))


def best_checkpoint(output_dir: Path) -> Path | None:
    """Returns the oldest checkpoint with the lowest evaluation loss. Ignores NaN losses."""
    losses = {path: _eval_loss(path) for path in list_checkpoints(output_dir)}
    known = {path: loss for path, loss in losses.items() if not math.isnan(loss)}
    return min(known, key=lambda path: known[path]) if known else None


def _eval_loss(path: Path) -> float:
    try:
        loss = read_trainer_state(path).get(EVAL_LOSS)
    except (ValueError, OSError):  # damaged
        return math.nan
    return float(loss) if isinstance(loss, int | float) else math.nan


def prune(output_dir: Path, retain: int | None, retain_best: bool) -> None:
    """Removes all but the newest `retain` checkpoints and, with `retain_best`, the one with the lowest eval loss."""
    best = best_checkpoint(output_dir) if retain_best else None
    own = [path for path in list_checkpoints(output_dir) if is_written_by_run(path)]
    for old in own[: -retain if retain else 0]:
        if old != best:
            set_aside(old, DELETED)  # a half-deleted directory must not look like a checkpoint
    remove_leftovers(output_dir)


def set_aside(path: Path, suffix: str) -> Path:
    """Appends a suffix, and a number if needed, to a file or directory. Returns the new path."""
    target = path.with_name(path.name + suffix)
    numbered = (path.with_name(f"{path.name}{suffix}-{number}") for number in itertools.count(2))
    while target.exists():
        target = next(numbered)
    return path.rename(target)


def clear_path(path: Path) -> None:
    """Frees the path of a finished or partial checkpoint for a new save."""
    if not path.exists():
        return
    if path.name.endswith(PARTIAL) and _is_unfinished(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        set_aside(path, DELETED if is_written_by_run(path) else OTHER)


def remove_leftovers(output_dir: Path, also: str = DELETED) -> None:
    """Removes directories marked as deleted, and interrupted saves or others with the suffix `also`.

    A directory that cannot be removed, for example because another host reads it, stays until the next call.
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
    """Removes the files listed in a directory's manifest, or the whole directory if it has no manifest.

    Other files stay in a directory with the checkpoint's name. For a link, only the link is removed.
    """
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
        return
    try:
        # The manifest goes last, so that a later call can finish an interrupted one.
        names = [*manifest.own_files(path), manifest.MANIFEST]
    except ValueError:
        unfinished = PARTIAL in path.name and _is_unfinished(path)
        if is_written_by_run(path) or unfinished or not _holds_files(path):
            shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        for name in names:
            (path / name).unlink(missing_ok=True)
        for folder in sorted((found for found in path.rglob("*") if found.is_dir()), reverse=True):
            with suppress(OSError):  # not empty: it holds other files
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
        facts = read_json(directory / TRAINER_STATE)
    except ValueError as error:
        raise ValueError(f"{directory / TRAINER_STATE} is damaged; give another checkpoint") from error
    if not isinstance(facts, dict) or type(facts.get("step")) is not int or not 0 <= facts["step"] < 1 << 63:
        raise ValueError(f"{directory / TRAINER_STATE} has no valid step; give another checkpoint")
    return facts


def saved_bytes(parameters: int, config: TrainConfig, base_bytes: int = 0) -> int:
    """Returns the bytes of one checkpoint: float32 weights, optimizer state, and weights as in the model's files.

    `base_bytes`: of those files, if they are known. Weights trained in float32 are stored so.
    """
    state = int(parameters * FLOAT32_BYTES * (1 + OPTIMIZERS[config.optim].moments))
    return state + max(parameters * config.itemsize, base_bytes)


def saves_left(config: TrainConfig, done: int, total: int, epochs_left: float) -> int:
    """Returns how many checkpoints a run will still write. The last step is always saved."""
    if config.save_strategy == "no" or done >= total:
        return 0
    if config.save_strategy == "epoch":
        return max(1, math.ceil(epochs_left))
    return total // config.save_steps - done // config.save_steps + bool(total % config.save_steps)


def check_disk(output_dir: Path, checkpoint_bytes: int, saves: int, existing: int, config: TrainConfig) -> str | None:
    """Returns a note on the disk space that checkpoints need, as a warning if there is too little.

    `existing`: checkpoints already in the directory, which may not exist yet. Raises ValueError if not even one
    checkpoint fits.
    """
    if not saves:
        return None
    folder = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    free_space = f"{folder} has {_format_bytes(free)} free"
    if checkpoint_bytes > free:
        raise ValueError(
            f"a checkpoint in --output_dir {output_dir} takes about {_format_bytes(checkpoint_bytes)}, but "
            f"{free_space}; free some space, give another disk, or give --save_strategy no"
        )
    limit = config.save_total_limit
    # An old checkpoint is deleted only after the new one is saved, so one more than the limit exists for a while.
    held = saves if limit is None else min(saves, max(1, limit + 1 + config.retains_best - existing))
    together = f", {held} of them {_format_bytes(held * checkpoint_bytes)}" if held > 1 else ""
    line = f"a checkpoint takes about {_format_bytes(checkpoint_bytes)}{together}; {free_space}"
    if held * checkpoint_bytes <= free:
        return line
    remedy = "give --save_total_limit" if limit is None else "give a lower --save_total_limit"
    return f"warning: {line}; {remedy}, or free some space"


def _format_bytes(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"
