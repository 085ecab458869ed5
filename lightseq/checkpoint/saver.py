"""Checkpoint writing while training continues: tensors are copied, then written, verified and renamed.

A thread on every rank writes the copies. After each part the threads exchange their results over their own process
group, so that a failure on one rank fails the save on all. The directory gets its final name once every file has been
read back and verified. Only then are older checkpoints deleted.
"""

import functools
import json
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightseq.checkpoint import checkpoints, manifest, state_files
from lightseq.checkpoint.checkpoints import PARTIAL, STATE, TRAINER_STATE
from lightseq.checkpoint.manifest import File
from lightseq.distributed.host_memory import free_host_memory
from lightseq.distributed.watchdog import RankNotResponding
from lightseq.distributed.world import World, set_device
from lightseq.memory.staging import Staging, local_bytes
from lightseq.utils.formatting import first_line

T = TypeVar("T")
Hashes = Mapping[str, str]  # SHA-256 by file name


class SaveError(Exception):
    """Failure to write a checkpoint, with the same message on all ranks."""


class CheckpointSaver:
    """Saver of a run's checkpoints. All ranks make the same calls."""

    def __init__(
        self,
        output_dir: Path,
        world: World,
        records: Path,
        retain: int | None,
        retain_best: bool,
        in_background: bool,
        timeout_seconds: float,
    ) -> None:
        """Prepares the saver.

        `records`: file that is flushed to the disk before a checkpoint gets its name. `retain` and `retain_best` are
        those of `checkpoints.prune`. `in_background`: training continues while the files are written.
        `timeout_seconds`: how long a rank waits for others to write their parts.
        """
        self._output_dir, self._world, self._retain, self._retain_best = output_dir, world, retain, retain_best
        self._records = records
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._staging = Staging(world.device) if in_background else None
        self._thread: threading.Thread | None = None
        self._error: SaveError | RankNotResponding | None = None

    def prepare(self, tensors: dict[str, Tensor]) -> str | None:
        """Allocates host memory for copies.

        If a host has too little, training waits during each save. Returns a note in that case.
        """
        self.wait()  # a save may precede the first update
        if self._staging is None:
            return None
        needed, free = local_bytes(tensors), free_host_memory(self._world)
        fits: list[bool] = [True] * self._world.size
        dist.all_gather_object(fits, needed <= free, group=self._group)
        if all(fits):
            self._staging.prepare(tensors)
            return None
        self._staging = None
        return (
            f"training waits while checkpoints are written: copies take {needed / 2**30:.1f} GiB of host memory per "
            f"rank, and {free / 2**30:.1f} GiB are free"
        )

    def wait_before_update(self) -> None:
        """Waits until the copies to the host are complete, so that weights may change."""
        if self._staging is not None:
            self._staging.wait_before_update()

    def queue_copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Waits for the previous save, then starts copying. If training waits for saves, returns the tensors."""
        self.wait()
        return self._staging.begin(tensors) if self._staging is not None else tensors

    def save(
        self,
        step: int,
        facts: dict[str, Any],
        copies: dict[str, Tensor],
        write_model: Callable[[Path, Path], None],
    ) -> Path:
        """Starts a save of the result of `queue_copies`.

        Only rank 0 calls `write_model`, with the checkpoint directory and its state directory.
        """
        staging = self._staging

        def write_state(directory: Path) -> Hashes:
            return state_files.write(directory, copies, self._group)

        def write(partial: Path) -> Hashes:
            if staging is not None:
                self._on_all_ranks(staging.finish)  # first, because the next weight update waits for it
            self._on_main(lambda: _empty(partial / STATE))
            hashes = self._on_all_ranks(lambda: write_state(partial / STATE))
            self._on_main(lambda: write_model(partial, partial / STATE))
            return {f"{STATE}/{name}": digest for found in hashes for name, digest in found.items()}

        return self._start(step, facts, write, in_background=staging is not None)

    def save_now(self, step: int, facts: dict[str, Any], *parts: Callable[[Path], None]) -> Path:
        """Saves while training waits: calls each of `parts` on every rank with the checkpoint directory."""

        def write(partial: Path) -> Hashes:
            self._on_main(lambda: _empty(partial / STATE))
            for write_part in parts:
                self._on_all_ranks(functools.partial(write_part, partial))
            return {}

        self.wait()
        return self._start(step, facts, write, in_background=False)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait(self) -> None:
        """Waits for the running save. Raises SaveError, the same on all ranks, if it failed.

        Raises RankNotResponding if the ranks could not exchange their results.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def wait_at_most(self, seconds: float) -> bool:
        """Waits at most `seconds` for the running save. Returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _start(self, step: int, facts: dict[str, Any], write: Callable[[Path], Hashes], in_background: bool) -> Path:
        final = self._output_dir / f"checkpoint-{step}"
        states = state_files.capture_rng(self._world.device)

        def run() -> None:
            try:
                set_device(self._world)
                self._write(final, {"step": step, **facts, "ranks": self._world.size}, states, write)
            except SaveError as error:
                self._error = SaveError(f"{final} could not be saved: {error}")
            except Exception as error:  # most likely a lost connection to another rank
                self._error = RankNotResponding(f"{final} could not be saved")
                self._error.__cause__ = error

        if in_background:
            self._thread = threading.Thread(target=run, name="saving", daemon=True)
            self._thread.start()
        else:
            run()
            self.wait()
        return final

    def _write(
        self, final: Path, facts: dict[str, Any], states: dict[str, Any], write: Callable[[Path], Hashes]
    ) -> None:
        partial = final.with_name(final.name + PARTIAL)
        try:
            hashes = write(partial)
            states_file = partial / STATE / state_files.rng_file(self._world.rank)
            self._on_all_ranks(lambda: states_file.write_text(json.dumps(states)))
            self._on_main(lambda: (partial / TRAINER_STATE).write_text(json.dumps(facts) + "\n"))
            files = self._read_back(partial, hashes)
            self._on_main(lambda: self._publish(partial, final, files))
        except SaveError:
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # frees disk space
            raise

    def _read_back(self, partial: Path, hashes: Hashes) -> dict[str, File]:
        """Reads back every file, each on one rank. Raises SaveError if a hash differs from the one written."""
        names = self._on_all_ranks(lambda: manifest.files_below(partial) if self._world.is_main else [])[0]
        mine = names[self._world.rank :: self._world.size]

        def check() -> dict[str, File]:
            found = manifest.describe_all(partial, mine)
            if wrong := [name for name, file in found.items() if hashes.get(name, file.sha256) != file.sha256]:
                raise OSError(f"{wrong[0]} reads back differently from what was written")
            return found

        return {name: file for found in self._on_all_ranks(check) for name, file in found.items()}

    def _publish(self, partial: Path, final: Path, files: Mapping[str, File]) -> None:
        if self._records.is_file():
            manifest.sync([self._records, self._output_dir])
        manifest.write(partial, files)
        manifest.sync([*(path for path in partial.rglob("*")), partial])
        checkpoints.clear_path(final)
        partial.rename(final)
        manifest.sync([self._output_dir])
        checkpoints.prune(self._output_dir, self._retain, self._retain_best)

    def _on_main(self, action: Callable[[], object]) -> None:
        self._on_all_ranks(lambda: action() if self._world.is_main else None)

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Returns the results of `action` from every rank. Raises SaveError on all ranks if it failed on any."""
        error, result = None, None
        try:
            result = action()
        except Exception as failure:  # safetensors raises its own class
            where = f"(rank {self._world.rank} on {socket.gethostname()})"
            # min() below prefers the OSError of the failing disk. Other ranks only know that one failed.
            error = (not isinstance(failure, OSError), f"{first_line(failure)} {where}")
        outcomes: list[Any] = [None] * self._world.size
        dist.all_gather_object(outcomes, (error, result), group=self._group)
        if errors := [error for error, _ in outcomes if error is not None]:
            raise SaveError(min(errors)[1])
        return [value for _, value in outcomes]


def _empty(directory: Path) -> None:
    checkpoints.clear_path(directory.parent)
    directory.mkdir(parents=True)
