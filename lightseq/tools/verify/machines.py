"""Check that all ranks have the same flags, software and kind of device."""

from typing import Any

import torch

from lightseq.config.train_config import TrainConfig
from lightseq.distributed.host_memory import host_memory
from lightseq.plan.breakdown import GIB
from lightseq.tools.verify.report import Row, all_gather_object, result_row
from lightseq.training.machine import hardware, versions
from lightseq.utils.formatting import differences, plural
from lightseq.utils.source import source_digest


def machine(device: torch.device) -> dict[str, Any]:
    """Describes this rank's device and its memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        memory = host_memory()
        free, total = memory.free, memory.total
    return hardware(device) | {"memory_bytes": total, "free_bytes": free}


def software(device: torch.device) -> dict[str, str]:
    """Returns the versions of packages that affect results. `source`: hash of this package's files."""
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if device.type == "cuda" else {}
    return {**versions(), **nccl, "source": source_digest()}


def machine_row(config: TrainConfig, device: torch.device) -> Row:
    """Checks that all ranks have the same flags, software and kind of device."""
    here = machine(device)
    on_gpu = f"{here['device']} of {here['memory_bytes'] / GIB:,.0f} GiB"
    kind = on_gpu if device.type == "cuda" else f"CPU ({here['machine']})"  # hosts may differ in memory
    flags = {f"--{name}": value for name, value in config.to_json().items()}
    everyone = all_gather_object((flags | software(device) | {"device": kind}, here))
    facts, machines = zip(*everyone, strict=True)
    free, hosts = min(x["free_bytes"] for x in machines) / GIB, {x["host"] for x in machines}
    found = f"{len(machines)} x {kind}, {free:,.0f} GiB free, {plural(len(hosts), 'host')}, the same flags and software"
    return result_row("ranks", differences(facts), found, {"ranks": machines})
