"""GPUs of this host, as its driver lists them: importing torch would take seconds."""

import itertools
import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class HostGPUs:
    """GPUs that this program may use."""

    name: str | None = None  # model of the first one
    devices: tuple[str, ...] = ()  # as written in CUDA_VISIBLE_DEVICES


def gpus_here() -> HostGPUs:
    """Returns the GPUs that this program may use; none without a driver that answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return HostGPUs()
    try:
        command = [program, "--query-gpu=index,name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return HostGPUs()
    rows = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    if done.returncode or not rows:
        return HostGPUs()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [word.strip() for word in visible.split(",")] if visible is not None else [index for index, _ in rows]
    # CUDA ignores everything from the first invalid entry on, such as -1.
    known = {index for index, _ in rows}
    present = itertools.takewhile(lambda word: word in known or word.startswith(("GPU-", "MIG-")), devices)
    return HostGPUs(rows[0][1].strip(), tuple(present))
