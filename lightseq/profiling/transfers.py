"""Transfers in profiled steps: collectives of NCCL, copies between GPUs, to the host and within a GPU."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# Bytes that one of n ranks sends or receives, over (n - 1) / n of the larger of its input and output: NCCL's "bus
# bandwidth" (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Other collectives count the
# larger side once.
BUS_SHARES: Final[Mapping[str, float]] = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}
BYTES: Final[Mapping[str, int]] = {
    "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "BFloat16": 2, "Half": 2, "Short": 2, "Int": 4, "Float": 4,
    "Long": 8, "Double": 8,
}  # fmt: skip
COPIES: Final[Mapping[str, str]] = {
    "PtoP": "copies from another GPU", "DtoD": "copies within the GPU", "HtoD": "copies from the host",
    "DtoH": "copies to the host",
}  # fmt: skip


@dataclass
class Transfers:
    """Transfers of one kind."""

    sizes: list[float] = field(default_factory=list)  # bytes that crossed a link
    seconds: list[float] = field(default_factory=list)  # including the wait for other ranks

    @property
    def rates(self) -> list[float]:
        """Bytes per second of each transfer."""
        return [size / seconds for size, seconds in zip(self.sizes, self.seconds, strict=True) if seconds > 0]


def transfers_by_kind(events: Iterable[Mapping[str, Any]]) -> dict[str, Transfers]:
    """Groups transfers by name, most bytes first. Collectives without a known dtype are left out."""
    found: dict[str, Transfers] = defaultdict(Transfers)
    for event in events:
        named = _copy(event) if event.get("cat") == "gpu_memcpy" else _collective(event)
        if named is not None and event.get("dur", 0) > 0:
            name, size = named
            found[name].sizes.append(size)
            found[name].seconds.append(event["dur"] / 1e6)
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].sizes)))


def _copy(event: Mapping[str, Any]) -> tuple[str, float] | None:
    which = re.search("|".join(COPIES), event.get("name", ""))
    return (COPIES[which[0]], float(event["args"]["bytes"])) if which else None


def _collective(event: Mapping[str, Any]) -> tuple[str, float] | None:
    arguments = event.get("args", {})
    if event.get("cat") != "kernel" or arguments.get("dtype") not in BYTES or "Collective name" not in arguments:
        return None
    name = arguments["Collective name"].strip("_").removesuffix("_base").replace("allgather", "all_gather")
    name, ranks = name.replace("allreduce", "all_reduce"), int(arguments["Group size"])
    elements = max(int(arguments["In msg nelems"]), int(arguments["Out msg nelems"]))
    share = BUS_SHARES[name] * (ranks - 1) / ranks if name in BUS_SHARES else 1.0
    label = f"{name.replace('_', '-')}, {arguments['dtype'].lower()}, {ranks} ranks"
    return label, elements * BYTES[arguments["dtype"]] * share
