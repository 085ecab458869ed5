"""Rank and device of this process, and what it does alone."""

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch


@dataclass(frozen=True)
class World:
    """Rank and device of this process. `local_size` processes share its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    restarts: int = 0  # restarts of this run by the launcher, or by itself after it ran out of memory
    launch: str = ""  # id of the launch, equal on every rank and after a restart

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def make_deterministic() -> None:
    """Makes torch compute the same bits from the same inputs, on GPUs too."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def use_host_cores(world: World) -> None:
    """Gives CPU work of GPU runs, such as AdamW, this rank's share of the host's cores.

    torch's launcher allows one thread if OMP_NUM_THREADS is unset; a larger number set by the user stays. CPU runs are
    left alone, because the number of threads changes the last bits of sums.
    """
    share = len(os.sched_getaffinity(0)) // world.local_size
    if world.device.type == "cuda" and torch.get_num_threads() == 1 < share:
        torch.set_num_threads(share)


def set_device(world: World) -> None:
    """Makes the world's GPU the current device of this thread; new threads start with GPU 0."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)


def report_error(line: str, prints: bool = True, seconds_ago: float = 0.0) -> None:
    """Prints the error that ends a run, and writes it to the file in which torch's launcher looks for the root cause.

    The launcher picks the earliest failure, with a resolution of one second. `seconds_ago` is the age of this failure,
    and the rank that prints makes its own a second older. The first error written to the file stays. Ranks that do not
    print call this too, for the launcher of their own host.
    """
    if prints:
        print(f"error: {line}", file=sys.stderr, flush=True)
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if path.exists():
        return
    extra = {"timestamp": str(int(time.time() - seconds_ago - prints))}
    with suppress(OSError):
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps({"message": {"message": f"error: {line}", "extraInfo": extra}}))
        partial.replace(path)


def exit_process(status: int) -> NoReturn:
    """Exits at once. The usual shutdown would wait for ranks that may be waiting for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def check_devices(world: World) -> None:
    """Raises ValueError if two processes would share a GPU."""
    if world.device.type == "cuda" and world.local_size > torch.cuda.device_count():
        raise ValueError(
            f"{world.local_size} processes on a host with {torch.cuda.device_count()} GPUs; start one process per GPU "
            "(--nproc_per_node), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on CPU"
        )
