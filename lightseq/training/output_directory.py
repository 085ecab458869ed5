"""The directory that a run writes into: who holds it, whether it may be used, and what a restart goes on with."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO, TypeGuard

import torch.distributed as dist

from lightseq.checkpoint import checkpoints, resume
from lightseq.checkpoint.resume import ResumePoint
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.mesh import World
from lightseq.training.metrics import EVENTS, METRICS, RUN, damaged_lines

if TYPE_CHECKING:
    from lightseq.training.setup import Inputs

LOCK = "lock"  # of the run that writes there
EARLIER = ".earlier"  # after the name of a file that is not of this run
# The files that a run writes into folders of its output directory, where other programs may have theirs.
WRITTEN: Final = {
    "profile": re.compile(r"rank\d+\.json\.gz|summary-rank\d+\.json|memory-rank\d+\.pickle"),
    "runs": re.compile(rf"events\.out\.tfevents\..*{re.escape(EVENTS)}"),
    "hang": re.compile(r"rank\d+\.txt"),
}


def check_output_dir(output_dir: Path, config: TrainConfig, found: ResumePoint, world: World) -> None:
    """Raises ValueError where the directory cannot be one, or holds what this run was not asked to go on with."""
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"--output_dir {output_dir} is a file; name a directory")
    parent = next(p for p in (output_dir, *output_dir.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise ValueError(f"--output_dir {output_dir} lies below the file {parent}; name another")
    resume_from = found.path
    if continues(resume_from, output_dir):
        newest = checkpoints.list_checkpoints(output_dir)[-1]
        if newest.name != resume_from.name and not found.damaged:
            raise ValueError(
                f"--resume_from_checkpoint {resume_from}: {output_dir} holds the later {newest.name}; continue that "
                "one with --resume_from_checkpoint True, or give another --output_dir"
            )
        return
    holds_run = (output_dir / RUN).exists() or (output_dir / METRICS).exists() or any(output_dir.glob("checkpoint-*"))
    begins_anew = config.overwrite_output_dir or config.resume_from_checkpoint == "auto" or _goes_on(output_dir, world)
    if holds_run and not begins_anew:
        raise ValueError(
            f"--output_dir {output_dir} already holds a run; name another, continue it with "
            "--resume_from_checkpoint True, or replace it with --overwrite_output_dir"
        )


def continues(resume_from: Path | None, output_dir: Path) -> TypeGuard[Path]:
    """Returns whether a run goes on in the directory of the one that it resumes."""
    return resume_from is not None and resume_from.resolve().parent == output_dir.resolve()


def another_run_wrote(held: TextIO | None, config: TrainConfig, inputs: Inputs, world: World) -> bool:
    """Returns whether another run wrote here before rank 0 `held` the lock; the same on all ranks."""
    found = ResumePoint(inputs.resume_from, tuple((path, "") for path in inputs.passed_over))
    wrote = [held is not None and not _is_as_found(Path(config.output_dir), config, found, world)]
    dist.broadcast_object_list(wrote)
    return bool(wrote[0])


def _is_as_found(output_dir: Path, config: TrainConfig, found: ResumePoint, world: World) -> bool:
    """Returns whether no other run has written there since this one looked. To be asked under the lock."""
    newest = checkpoints.list_checkpoints(output_dir)[-1:]
    try:
        check_output_dir(output_dir, config, found, world)
    except ValueError:
        return False
    if config.resume_from_checkpoint not in resume.NEWEST:
        return True
    return set(newest) <= {found.path, *(path for path, _ in found.damaged)}


def after_restart(config: TrainConfig, world: World) -> TrainConfig:
    """Resumes from the newest checkpoint, if any, where the launcher started the run again (--max_restarts).

    A directory in which this very launch has not begun yet is what it was before: whatever was refused still is.
    """
    output_dir = Path(config.output_dir)
    if _goes_on(output_dir, world) and checkpoints.list_checkpoints(output_dir):
        return replace(config, resume_from_checkpoint="True")
    return config


def _goes_on(output_dir: Path, world: World) -> bool:
    """Returns whether this launch has begun there before its launcher started it again."""
    return world.restarts > 0 and _begun_by(output_dir, world)


def lock(output_dir: Path, world: World) -> TextIO:
    """Makes the directory and holds it until the file that is returned is closed, or the process ends.

    Whether its launch has begun there stays as it was. Raises ValueError where it cannot be made, or another run
    writes into it.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        held = (output_dir / LOCK).open("a+")
    except OSError as error:
        raise ValueError(f"--output_dir {output_dir} cannot be made ({error.strerror}); name another") from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.seek(0)
        raise ValueError(
            f"--output_dir {output_dir} is being written to by {held.readline().strip() or 'another run'}; name another"
        ) from error
    except OSError as error:
        raise ValueError(
            f"--output_dir {output_dir} cannot be locked ({error.strerror}), and two runs could write into it; name "
            "one on another file system"
        ) from error
    _check_lock(held, output_dir)
    begun = _begun_by(output_dir, world)
    held.truncate(0)
    held.write(f"process {os.getpid()} on {socket.gethostname()}\n{_launch(world) if begun else ''}")
    held.flush()
    return held


def _check_lock(held: TextIO, output_dir: Path) -> None:
    """Raises ValueError where the file of that name is not one that a run wrote, which would empty it."""
    held.seek(0)
    first = held.readline()
    if first and not first.startswith("process "):
        held.close()
        raise ValueError(f"--output_dir {output_dir} holds a file {LOCK} that no run wrote; move it, or name another")


def begin(held: TextIO, output_dir: Path, world: World) -> None:
    """Marks the directory as this launch's: where it is started again, it goes on with what lies there."""
    if not _begun_by(output_dir, world):
        held.write(_launch(world))
        held.flush()


def _begun_by(output_dir: Path, world: World) -> bool:
    held = output_dir / LOCK
    return held.is_file() and held.read_text().endswith(_launch(world))


def _launch(world: World) -> str:
    return f"launch {world.launch}\n"


def clear(output_dir: Path) -> tuple[str, ...]:
    """Removes what earlier runs wrote in their directory, file by file, and nothing else.

    A run.json or metrics.jsonl that another program wrote gets another name; the lines say so.
    """
    with suppress(OSError):
        if _is_of_run(output_dir / RUN):
            (output_dir / RUN).unlink()
    if not damaged_lines(output_dir / METRICS):
        (output_dir / METRICS).unlink(missing_ok=True)
    for folder, written in WRITTEN.items():
        for path in (output_dir / folder).glob("*"):
            if written.fullmatch(path.name):
                path.unlink()
        with suppress(OSError):  # it is not there, or holds other files
            (output_dir / folder).rmdir()
    checkpoints.remove_checkpoints(output_dir)
    return set_earlier_aside(output_dir)


def set_earlier_aside(output_dir: Path) -> tuple[str, ...]:
    """Gives run.json and metrics.jsonl other names, where a run begins that did not write them, and says so."""
    there = [path for path in (output_dir / METRICS, output_dir / RUN) if path.exists()]
    moved = [(path.name, checkpoints.set_aside(path, EARLIER).name) for path in there]
    return tuple(f"{name} was there already, and is kept as {kept}" for name, kept in moved)


def _is_of_run(path: Path) -> bool:
    """Returns whether it is a run.json as a run writes it."""
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(about, dict) and {"command", "config", "total_steps"} <= about.keys()
