"""Output directory of a run: locking, checks, cleanup, and restarts."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TextIO, TypeGuard

from lightseq.checkpoint import checkpoints, resume
from lightseq.checkpoint.resume import ResumePoint
from lightseq.config.train_config import TrainConfig
from lightseq.data.mixture import paths_of
from lightseq.distributed.agreement import from_rank_0
from lightseq.distributed.world import World
from lightseq.training.metrics import METRICS, RUN, SAMPLES, damaged_lines
from lightseq.training.trackers import EVENTS
from lightseq.utils.files import CONFIG_BYTES, open_regular, read_bytes, read_json

LOCK, LINE_CHARACTERS = "lock", 1000
EARLIER = ".earlier"  # suffix of files from an earlier run
# Files that a run writes into subdirectories. Other programs may have files there too.
WRITTEN: Final = {
    "profile": re.compile(r"rank\d+\.json\.gz|summary-rank\d+\.json|memory-rank\d+\.pickle"),
    "runs": re.compile(rf"events\.out\.tfevents\..*{re.escape(EVENTS)}"),
    "hang": re.compile(r"rank\d+\.txt"),
}


def create_output_dir(output_dir: Path) -> None:
    """Creates a directory and its parents. Raises ValueError with the reason if it cannot."""
    with name_unwritable(output_dir, "created"):
        output_dir.mkdir(parents=True, exist_ok=True)


def check_output_dir(output_dir: Path, config: TrainConfig, resume_point: ResumePoint, world: World) -> None:
    """Raises ValueError if the directory cannot be created, or holds a run that this one does not resume or replace."""
    resume_from = resume_point.path
    if resumes_in_place(resume_from, output_dir):
        newest = checkpoints.list_checkpoints(output_dir)[-1]
        if newest.name != resume_from.name and not resume_point.damaged:
            raise ValueError(
                f"--resume_from_checkpoint {resume_from}: {output_dir} has the later {newest.name}; resume from that "
                "one with --resume_from_checkpoint True, or give another --output_dir"
            )
        return
    has_checkpoints = any(output_dir.glob("checkpoint-*"))
    holds_run = (output_dir / RUN).exists() or (output_dir / METRICS).exists() or has_checkpoints
    # An attempt to resume that saved nothing may be repeated. Its records are set aside.
    repeats = config.resume_from_checkpoint is not None and not has_checkpoints
    goes_on = config.resume_from_checkpoint == "auto" or _has_restarted(output_dir, world)
    may_hold_run = config.overwrite_output_dir or repeats or goes_on
    if config.overwrite_output_dir:
        _check_inputs_survive(output_dir, config)
    if holds_run and not may_hold_run:
        raise ValueError(
            f"--output_dir {output_dir} already holds a run; give another, continue it with "
            "--resume_from_checkpoint True, or replace it with --overwrite_output_dir"
        )
    parent = next(p for p in (output_dir, *output_dir.absolute().parents) if p.exists())
    with name_unwritable(output_dir, "written" if parent == output_dir else f"created in {parent}"):
        TemporaryDirectory(prefix=".lightseq-", dir=parent).cleanup()


def _check_inputs_survive(output_dir: Path, config: TrainConfig) -> None:
    """Raises ValueError if the run reads from a checkpoint that it would delete."""
    checkpoints_here = [path.resolve() for path in output_dir.glob("checkpoint-*")]
    given = {flag: [getattr(config, flag)] for flag in ("model_name_or_path", "tokenizer")}
    given |= {flag: paths_of(getattr(config, flag) or "") for flag in ("data_path", "eval_data_path")}
    for flag, value in ((flag, value) for flag, values in given.items() for value in values if value):
        if any(Path(value).resolve().is_relative_to(path) for path in checkpoints_here):
            raise ValueError(
                f"--{flag} {value} is in --output_dir {output_dir}, whose checkpoints --overwrite_output_dir deletes; "
                "give another --output_dir"
            )


def resumes_in_place(resume_from: Path | None, output_dir: Path) -> TypeGuard[Path]:
    """Returns whether a run resumes a checkpoint of its own output directory."""
    return resume_from is not None and resume_from.absolute().parent.resolve() == output_dir.resolve()


def another_run_wrote(lock_file: TextIO | None, config: TrainConfig, resume_point: ResumePoint, world: World) -> bool:
    """Returns whether another run wrote into the directory before rank 0 got the lock. The same on all ranks."""
    return from_rank_0(lock_file is not None and not _is_as_found(Path(config.output_dir), config, resume_point, world))


def _is_as_found(output_dir: Path, config: TrainConfig, resume_point: ResumePoint, world: World) -> bool:
    """Returns whether the directory is unchanged since its checkpoints were listed. Requires the lock."""
    newest = checkpoints.list_checkpoints(output_dir)[-1:]
    try:
        check_output_dir(output_dir, config, resume_point, world)
    except ValueError:
        return False
    if config.resume_from_checkpoint not in resume.NEWEST:
        return True
    return set(newest) <= {resume_point.path, *(path for path, _ in resume_point.damaged)}


def continues_after_restart(output_dir: Path, world: World) -> bool:
    """Returns whether this run has restarted after it saved a checkpoint, from which it then resumes.

    The launcher restarts a run (--max_restarts), or the run itself does after it ran out of memory. False if this
    launch has not yet written into the directory: the usual checks then apply.
    """
    return _has_restarted(output_dir, world) and bool(checkpoints.list_checkpoints(output_dir))


def _has_restarted(output_dir: Path, world: World) -> bool:
    """Returns whether this run has restarted after it had begun writing into the directory."""
    return world.restarts > 0 and _begun_by(output_dir, world)


def lock_directory(output_dir: Path, world: World) -> TextIO:
    """Creates the directory and locks it until the returned file is closed or the process ends.

    The file begins with the process that holds the lock. If this launch has begun writing into the directory
    (`mark_begun`), its line follows and stays. Raises ValueError if the directory cannot be created or locked, or
    another run holds the lock.
    """
    create_output_dir(output_dir)
    with name_unwritable(output_dir):
        lock_file = _open_lock(output_dir / LOCK)
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = lock_owner(output_dir).strip() or "another run"
        lock_file.close()
        raise ValueError(f"--output_dir {output_dir} is being written to by {owner}; give another directory") from error
    except OSError as error:
        raise ValueError(
            f"--output_dir {output_dir} cannot be locked ({error.strerror}), so two runs could write into it; give a "
            "directory on another file system"
        ) from error
    _check_lock(lock_file, output_dir)
    begun = _begun_by(output_dir, world)
    with name_unwritable(output_dir):
        lock_file.truncate(0)
        lock_file.write(f"process {os.getpid()} on {socket.gethostname()}\n{_launch(world) if begun else ''}")
        lock_file.flush()
    return lock_file


@contextmanager
def name_unwritable(output_dir: Path, action: str = "written") -> Iterator[None]:
    """Raises ValueError, with the directory and a remedy, if the block cannot write in it."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space, or give another one" if is_full else "give another directory"
        raise ValueError(f"--output_dir {output_dir} cannot be {action} ({error.strerror}); {remedy}") from error


def check_shared(output_dir: Path, owner: str, seconds: float) -> None:
    """Raises ValueError unless this rank sees the lock file of rank 0, in which `owner` is the first line.

    Every rank writes its part of a checkpoint into the directory. A network file system may show the file late, so
    this waits for up to `seconds`.
    """
    if not checkpoints.wait_until(lambda: lock_owner(output_dir) == owner, output_dir, seconds):
        raise ValueError(
            f"--output_dir {output_dir} is not rank 0's directory; give one on a file system that all hosts share, "
            "or --save_strategy no"
        )


def _open_lock(path: Path) -> TextIO:
    """Opens the lock file, or makes it. Raises OSError if it is not a regular file."""
    if path.exists():
        open_regular(path).close()
    return path.open("a+", encoding="utf-8", errors="replace")


def _read_lock(output_dir: Path) -> str:
    """Returns the text of the lock file, also if it is damaged; empty if there is none."""
    try:
        return read_bytes(output_dir / LOCK, CONFIG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def lock_owner(output_dir: Path) -> str:
    """Returns the process that holds the lock, or held it last; empty if there is none."""
    return _read_lock(output_dir).partition("\n")[0]


def _check_lock(lock_file: TextIO, output_dir: Path) -> None:
    """Raises ValueError if another program wrote the lock file, because locking overwrites it."""
    lock_file.seek(0)
    first = lock_file.readline(LINE_CHARACTERS)
    if first and not first.startswith("process "):
        lock_file.close()
        raise ValueError(
            f"--output_dir {output_dir} has a file {LOCK} that no run wrote; move it, or give another directory"
        )


def mark_begun(lock_file: TextIO, output_dir: Path, world: World) -> None:
    """Marks the directory as begun by this launch, so that a restart resumes in it."""
    if not _begun_by(output_dir, world):
        lock_file.write(_launch(world))
        lock_file.flush()


def _begun_by(output_dir: Path, world: World) -> bool:
    return _read_lock(output_dir).endswith(_launch(world))


def _launch(world: World) -> str:
    """Returns the line of the lock file that identifies this launch, the same after a restart."""
    return f"launch {world.launch}\n"


def remove_run(output_dir: Path) -> tuple[str, ...]:
    """Removes the files that earlier runs wrote, and nothing else.

    Renames a run.json, metrics.jsonl or samples.jsonl that another program wrote. Returns notes on renamed files.
    """
    with suppress(OSError):
        if _is_of_run(output_dir / RUN):
            (output_dir / RUN).unlink()
    for name in (METRICS, SAMPLES):
        if not damaged_lines(output_dir / name):
            (output_dir / name).unlink(missing_ok=True)
    for folder, written in WRITTEN.items():
        for path in (output_dir / folder).glob("*"):
            if written.fullmatch(path.name):
                path.unlink()
        with suppress(OSError):  # missing, or not empty
            (output_dir / folder).rmdir()
    checkpoints.remove_checkpoints(output_dir)
    return set_earlier_aside(output_dir)


def set_earlier_aside(output_dir: Path) -> tuple[str, ...]:
    """Renames existing records at the start of a new run. Returns notes."""
    existing = [path for path in (output_dir / name for name in (METRICS, SAMPLES, RUN)) if path.exists()]
    renamed = [(path.name, checkpoints.set_aside(path, EARLIER).name) for path in existing]
    return tuple(f"renamed the existing {old} to {new}" for old, new in renamed)


def _is_of_run(path: Path) -> bool:
    """Returns whether a file is a run.json that a run wrote."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"command", "config", "total_steps"} <= content.keys()
