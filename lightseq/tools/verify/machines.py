"""Hardware, software and flags of every rank, and the check that they agree."""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightseq.distributed.host_memory import host_memory
from lightseq.memory.planner.breakdown import GIB
from lightseq.tools.verify.report import Row, all_gather_object, result_row, span
from lightseq.training.metrics import hardware, versions
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


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describes entries that differ from those of rank 0, with the ranks."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for name in sorted({*theirs, *everyone[0]}):
            a, b = theirs.get(name, "none"), everyone[0].get(name, "none")
            if a != b:
                found.setdefault((name, str(a), str(b)), []).append(rank)
    return [
        f"{name} is {a} on rank {', '.join(map(str, ranks))} and {b} on rank 0" for (name, a, b), ranks in found.items()
    ]
