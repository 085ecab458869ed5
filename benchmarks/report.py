"""What a benchmark says of itself: the header of its records, and a line for each point as it is measured."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.errors import RESULTS
from benchmarks.plan import Subject
from lightseq.comm.transport import base_transport_name
from lightseq.config.lengths import shown
from lightseq.distributed.mesh import World
from lightseq.training import git_info
from lightseq.training.metrics import hardware, versions

PEER_PACKAGES = ("triton", "accelerate", "ring-flash-attn", "axolotl-ringmaster", "liger-kernel")
FLOPS = "3.5 * 4 * {} * heads * head_dim / 2 * batch / world: the causal half once, the backward 2.5 forwards"
SQUARES = ("length^2", "(sum of document lengths^2)")
ARROW = " → "
GAP = "  "


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a benchmark's file, one a line. Says which garbled lines it leaves out."""
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []  # the last may be cut off
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as why:
            print(f"{path} line {number} is not JSON ({why.msg}); it is left out", file=sys.stderr)
    return found


def header(
    world: World, words: Sequence[str], commit: str | None, packed: bool = False, benchmark: str = "attention"
) -> dict[str, Any]:
    """The first object of a file: all that the numbers after it depend on."""
    launch = f"-m torch.distributed.run --nproc_per_node={world.local_size} " if world.size > 1 else ""
    machine = {key: value for key, value in hardware(world.device).items() if key != "host"}
    return {
        "benchmark": benchmark,
        "command": f"python3 {launch}benchmarks/{benchmark}.py {shlex.join(words)}".strip(),
        "commit": commit or commit_here(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "world": world.size,
        "hardware": machine,
        "versions": {**versions(), **libraries(), **packages()},
        "flops": FLOPS.format(SQUARES[packed]),
    }


def commit_here() -> str:
    return git_info.commit() or "unknown"


def libraries() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {}
    return {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": str(torch.backends.cudnn.version()),
    }


def packages() -> dict[str, str]:
    found = {}
    for package in PEER_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


# ---- the terminal ---------------------------------------------------------------------------------------------------


def names(subjects: Sequence[Subject]) -> int:
    """How wide the column of names is; `auto` is followed by what it became."""
    return max(len(s.label) + (len(ARROW) + 8 if s.choice and s.choice.schedule == "auto" else 0) for s in subjects)


def left(length: str, name: str, subjects: Sequence[Subject], kernel: str, transport: str) -> str:
    """`auto` may become symmetric."""
    asked = [s.choice.transport for s in subjects if s.choice is not None]
    wide = len("symmetric") + max((len(name) - len(base_transport_name(name)) for name in asked), default=0)
    return GAP.join((length.rjust(6), name.ljust(names(subjects)), kernel.ljust(9), transport.ljust(wide)))


def columns(subjects: Sequence[Subject], check: bool) -> str:
    heads = [f"{name:>8}" for name in (*RESULTS, "/ single")] if check else [
        f"{'TFLOP/s':>9}", f"{'median ms':>10}", f"{'min':>9}", f"{'max':>9}", f"{'runs':>4}", f"{'peak GiB':>8}",
        f"{'exposed ms':>10}",
    ]  # fmt: skip
    return GAP.join((left("tokens", "implementation", subjects, "kernel", "transport"), *heads))


def line(record: Mapping[str, Any], subjects: Sequence[Subject], check: bool) -> str:
    """One point, under `columns`."""
    name = f"{record['implementation']} {record['request']}".strip()
    if record["request"].startswith("auto") and record["schedule"] not in (None, "auto"):
        name += ARROW + record["schedule"]
    where = left(shown(record["length"]), name, subjects, record["kernel"] or "", record["transport"] or "")
    if record["skipped"]:
        return f"{where}{GAP}skipped: {record['skipped']}"
    return GAP.join((where, *(check_cells(record) if check else time_cells(record)))).rstrip()


def check_cells(record: Mapping[str, Any]) -> list[str]:
    errors = [f"{record[f'relative_error_{name}']:8.1e}" for name in RESULTS]
    ratio = record.get("worst_error_over_single_gpu")
    return [*errors, f"{ratio:7.2f}x" if ratio is not None else ""]


def time_cells(record: Mapping[str, Any]) -> list[str]:
    tflops, peak = record["tflops_per_gpu"], record["peak_memory_bytes"]
    exposed = record["exposed_communication_seconds"]
    milliseconds = [1e3 * record[f"seconds_{which}"] for which in ("median", "min", "max")]
    return [
        f"{tflops:9.1f}" if tflops >= 10 else f"{tflops:9.2g}",
        *(f"{x:{width}.2f}" for x, width in zip(milliseconds, (10, 9, 9), strict=True)),
        f"{record['repeats']:4d}",
        f"{peak / 2**30:8.2f}" if peak is not None else f"{'-':>8}",
        f"{1e3 * exposed:10.2f}" if exposed is not None else f"{'-':>10}",
    ]
