"""GPUs and hosts of a planned run."""

import math
import os
from dataclasses import dataclass

import torch

from lightseq.distributed.host_memory import host_memory
from lightseq.plan.rates import CHIPS, DEFAULT_CORES, Chip, chip_of_device


@dataclass(frozen=True)
class Hardware:
    """GPUs and hosts of a run: usable bytes of one GPU, bytes and cores of one host."""

    chip: Chip
    gpus: int
    gpus_per_host: int
    gpu_memory: float
    host_memory: float
    host_cores: int | None = None  # None: DEFAULT_CORES per rank

    def __post_init__(self) -> None:
        if self.gpus > self.gpus_per_host and self.gpus % self.gpus_per_host:
            below = self.gpus // self.gpus_per_host * self.gpus_per_host
            raise ValueError(
                f"--gpus {self.gpus} is not a multiple of --gpus_per_host {self.gpus_per_host}; give {below} or "
                f"{below + self.gpus_per_host} GPUs, or another --gpus_per_host"
            )

    @property
    def ranks_per_host(self) -> int:
        return min(self.gpus, self.gpus_per_host)

    @property
    def cores_per_rank(self) -> int:
        return DEFAULT_CORES if self.host_cores is None else max(1, self.host_cores // self.ranks_per_host)


def hardware_here(gpus: int, gpus_per_host: int, device: torch.device) -> Hardware:
    """Returns `gpus` GPUs like this machine's. Without a GPU of known rates, it plans with H200s."""
    chip, memory = CHIPS["h200"], math.inf
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        chip, memory = chip_of_device(properties.name) or chip, float(properties.total_memory)
    return Hardware(
        chip, gpus, gpus_per_host, memory, float(host_memory().total), host_cores=len(os.sched_getaffinity(0))
    )
