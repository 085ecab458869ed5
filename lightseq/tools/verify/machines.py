"""Hardware, software and flags of every rank, and the check that they agree."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightseq.distributed.host_memory import host_memory
from lightseq.memory.planner.breakdown import GIB
from lightseq.tools.verify.report import Row, all_gather_object, result_row, span
from lightseq.training.machine import hardware, versions
from lightseq.utils.differences import differences
from lightseq.utils.versions import source_digest


def machine(device: torch.device) -> dict[str, Any]:
    """Describes this rank's device."""
    if device.type != "cuda":
        memory = host_memory()
        return hardware(device) | {"memory_bytes": memory.total, "free_bytes": memory.free}
    p = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return hardware(device) | {"memory_bytes": total, "free_bytes": free, "capability": f"{p.major}.{p.minor}"}


def software(device: torch.device) -> dict[str, str]:
    """Returns the versions of packages that affect results. `source`: hash of this package's files."""
    found = versions() | {"source": source_digest()}
    for package in ("lightseq-long", "flash-attn-3"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def machine_row(mine: Mapping[str, Any]) -> Row:
    """Checks that all ranks have the same kind of device."""
    everyone = all_gather_object(dict(mine))
    kinds = [{"device": _kind(x), "memory GiB": round(x["memory_bytes"] / GIB)} for x in everyone]
    if everyone[0]["device"] == "cpu":  # host memory may differ
        kinds = [{"device": _kind(x)} for x in everyone]
    parts = [f"{len(everyone)} x {_kind(everyone[0])}"]
    for name, unit in (("memory_bytes", "GiB"), ("free_bytes", "GiB free")):
        parts.append(f"{span([x[name] / GIB for x in everyone], 0)} {unit}")
    hosts = len({x["host"] for x in everyone})
    parts.append(f"{hosts} host" + ("s" if hosts > 1 else ""))
    return result_row("devices", differences(kinds), ", ".join(parts), {"ranks": everyone})


def _kind(found: Mapping[str, Any]) -> str:
    return str(found["device"]) if found["device"] != "cpu" else f"CPU ({found['machine']})"


def software_row(mine: Mapping[str, str]) -> Row:
    """Checks that all ranks have the same versions."""
    everyone = all_gather_object(dict(mine))
    first = everyone[0]
    named = ("torch", "cuda", "nccl", "transformers", "flash-attn-4", "flash-attn-3", "flash-attn", "lightseq-long")
    shown = ", ".join(f"{name} {first[name]}" for name in named if name in first)
    return result_row("software", differences(everyone), f"{shown}, source {first['source']}", {"ranks": everyone})


def flags_row(flags: Mapping[str, Any]) -> Row:
    """Checks that all ranks have the same flags."""
    everyone = all_gather_object(dict(flags))
    same = f"the same {len(flags)} on {len(everyone)} rank" + ("s" if len(everyone) > 1 else "")
    return result_row("flags", differences(everyone), same)
