"""The directory that a run writes into: whose it is, whether it may be used, and what a restart goes on with there."""

import fcntl
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import TextIO, TypeGuard

from lightseq.checkpoint import checkpoints
from lightseq.checkpoint.checkpoints import Found
from lightseq.config.train_config import TrainConfig
from lightseq.ranks.mesh import World
from lightseq.training.metrics import METRICS, RUN

LOCK = "lock"  # of the run that writes there


def check_output_dir(output_dir: Path, config: TrainConfig, found: Found) -> None:
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"--output_dir {output_dir} is a file; name a directory")
    parent = next(p for p in (output_dir, *output_dir.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise ValueError(f"--output_dir {output_dir} lies below the file {parent}; name another")
    resume_from = found.path
    if continues(resume_from, output_dir):
        newest = checkpoints.listed(output_dir)[-1]
        if newest.name != resume_from.name and not found.passed_over:
            raise ValueError(
                f"--resume_from_checkpoint {resume_from}: {output_dir} holds the later {newest.name}; continue that "
                "one with --resume_from_checkpoint True, or give another --output_dir"
            )
        return
    holds_run = (output_dir / RUN).exists() or (output_dir / METRICS).exists() or any(output_dir.glob("checkpoint-*"))
    if holds_run and not config.overwrite_output_dir:
        raise ValueError(
            f"--output_dir {output_dir} already holds a run; name another, continue it with "
            "--resume_from_checkpoint True, or replace it with --overwrite_output_dir"
        )


def continues(resume_from: Path | None, output_dir: Path) -> TypeGuard[Path]:
    """Whether a run goes on in the directory of the one that it resumes."""
    return resume_from is not None and resume_from.resolve().parent == output_dir.resolve()


def after_restart(config: TrainConfig, world: World) -> TrainConfig:
    """What a run does that its launcher started again (--max_restarts): goes on from its newest checkpoint, if any.

    A directory in which this very launch has not begun yet is what it was before: whatever was refused still is.
    """
    output_dir, asked = Path(config.output_dir), config.resume_from_checkpoint
    saved = bool(checkpoints.listed(output_dir))
    if world.restarts and _begun_by(output_dir, world):
        return replace(config, resume_from_checkpoint="True" if saved else asked, overwrite_output_dir=True)
    # Where nothing was saved, `auto` begins anew.
    return replace(config, overwrite_output_dir=config.overwrite_output_dir or (asked == "auto" and not saved))


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
    begun = _begun_by(output_dir, world)
    held.truncate(0)
    held.write(f"process {os.getpid()} on {socket.gethostname()}\n{_launch(world) if begun else ''}")
    held.flush()
    return held


def begin(held: TextIO, output_dir: Path, world: World) -> None:
    """What lies in the directory is of this launch from now on: where it is started again, it goes on with that."""
    if not _begun_by(output_dir, world):
        held.write(_launch(world))
        held.flush()


def _begun_by(output_dir: Path, world: World) -> bool:
    held = output_dir / LOCK
    return held.is_file() and held.read_text().endswith(_launch(world))


def _launch(world: World) -> str:
    return f"launch {world.launch}\n"


def clear(output_dir: Path) -> None:
    """Removes what an earlier run left in its directory, and nothing else."""
    for name in (RUN, METRICS):
        (output_dir / name).unlink(missing_ok=True)
    for directory in [*output_dir.glob("checkpoint-*"), *(output_dir / name for name in ("profile", "runs", "hang"))]:
        if directory.is_dir():
            shutil.rmtree(directory)
