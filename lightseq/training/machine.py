"""Facts about the machine: its device, versions of packages, memory of the process."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import psutil
import torch

from lightseq.utils.source import DISTRIBUTION, is_checkout

PACKAGES: Final = (  # whose versions run.json lists
    *(DISTRIBUTION, "torch", "transformers", "numpy", "einops", "safetensors"),
    *("flash-attn", "flash-attn-4", "deepspeed", "torchao"),
)


def versions() -> dict[str, str]:
    """Returns the versions of Python, CUDA and the installed packages."""
    return dict(_read_versions())


@cache  # parsing the metadata of packages takes 0.1 s, and every checkpoint's card names them
def _read_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package in PACKAGES:
        if package == DISTRIBUTION and is_checkout():
            continue  # it may have changed since it was installed, and run.json has its commit
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    """Returns the name and size of the GPU or CPU, and the host's name."""
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return {"device": p.name, "memory_bytes": p.total_memory, "host": platform.node()}
    return {"device": "cpu", "cores": psutil.cpu_count(), "machine": platform.machine(), "host": platform.node()}


def process_memory(device: torch.device, outside_bytes: int, graph_bytes: int) -> tuple[int, int, int]:
    """Returns peak allocated, peak reserved (0 on CPU) and host resident bytes of this process.

    `outside_bytes`: symmetric-memory buffers, unknown to torch's allocator. `graph_bytes`: memory of CUDA graphs,
    which the allocator counts as reserved but not as allocated.
    """
    rss = psutil.Process().memory_info().rss
    if device.type != "cuda":
        return 0, 0, rss
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return allocated + outside_bytes + graph_bytes, reserved + outside_bytes, rss
