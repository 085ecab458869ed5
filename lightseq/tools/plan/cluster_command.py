"""Predicts an attention layer, forward and backward, over clusters of many sizes:

python3 -m lightseq plan --attention --gpus 1,8,64 --gpus_per_host 8 --length 1M --output outputs/plan.jsonl
"""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightseq.config.lengths import tokens
from lightseq.config.parser import Parser, answered
from lightseq.schedule.algorithms import SCHEDULES
from lightseq.schedule.calibration import fit_transports, read_points
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.timing import RATES
from lightseq.tools.plan.cluster import Cluster, record, rows

PROGRAM = "python3 -m lightseq plan"
HEADINGS = ("GPUs", "schedule", "head groups", "ulysses size", "ms", "TFLOP/s per GPU", "efficiency", "exposed ms")


def parser() -> Parser:
    out = Parser(prog=PROGRAM, description="Predicts one attention layer over clusters of many sizes, without a GPU.")
    out.add_argument("--attention", action="store_true", required=True, help="one attention layer, forward + backward")
    out.add_argument("--gpus", default="1,2,4,8,16,32,64", help="numbers of GPUs (default: %(default)s)")
    out.add_argument("--gpus_per_host", type=int, default=8, help="neighbouring ranks of one host (default: 8)")
    out.add_argument("--length", default="128K", help="tokens of the whole sequence: 131072, 128K, 1M (default: 128K)")
    out.add_argument("--heads", type=int, default=32, help="query heads (default: 32)")
    out.add_argument("--kv_heads", type=int, default=8, help="key/value heads (default: 8)")
    out.add_argument("--head_dim", type=int, default=128, help="(default: 128)")
    out.add_argument("--schedules", default="all", help=f"all, or from {', '.join(SCHEDULES)}")
    out.add_argument("--gathered_limit_gib", type=float, help="of other ranks' tensors that a GPU may hold at once")
    out.add_argument("--calibrate", type=Path, metavar="FILE", help="fit rates to records of benchmarks/attention.py")
    out.add_argument("--kernel", help="the kernel whose records count, where FILE has several")
    out.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="JSONL, for python3 -m analysis cluster"
    )
    return out


def main(words: Sequence[str]) -> int:
    return answered(lambda: _predict(parser().parse_args(words), f"{PROGRAM} {shlex.join(words)}"))


def _predict(asked: argparse.Namespace, command: str) -> None:
    shape = AttentionShape(tokens(asked.length, "--length"), asked.heads, asked.kv_heads, asked.head_dim)
    check_shape(shape)
    gpus, names = gpu_counts(asked.gpus), schedule_names(asked.schedules)
    if asked.gpus_per_host < 1:
        raise ValueError(f"--gpus_per_host {asked.gpus_per_host} must be at least 1")
    limit = None if asked.gathered_limit_gib is None else asked.gathered_limit_gib * 2**30
    cluster = cluster_of(asked.gpus_per_host, asked.calibrate, asked.kernel)
    records = [record(row, shape, cluster) for row in rows(shape, cluster, gpus, names, limit)]
    source = str(asked.calibrate) if asked.calibrate else "the defaults for H200"
    write(asked.output, [header(command, shape, cluster, source), *records])
    print("\n".join(table(records)))
    print(f"records  {asked.output}")


def header(command: str, shape: AttentionShape, cluster: Cluster, source: str) -> dict[str, Any]:
    """The first object of the file: all that the predictions depend on."""
    return {
        "plan": "attention",
        "command": command,
        **asdict(shape),
        "gpus_per_host": cluster.gpus_per_host,
        "rates_from": source,
        "rates": {name: asdict(value) for name, value in cluster.rates.items()},
    }


def table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Aligned lines; the fastest row of each number of GPUs starts with a star, what cannot be had says nothing."""
    cells = [["", *HEADINGS], *(line_of(r) for r in records if not r["skipped"])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            x.ljust(w) if i in (0, 2) else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))
        )

    return [line(row).rstrip() for row in cells]


def line_of(r: Mapping[str, Any]) -> list[str]:
    return [
        "*" if r["fastest"] else "",
        str(r["gpus"]),
        r["schedule"],
        str(r["head_groups"]),
        str(r["ulysses_size"]),
        f"{1e3 * r['seconds']:,.2f}",
        f"{r['tflops_per_gpu']:.0f}",
        f"{r['efficiency']:.1%}",
        f"{1e3 * r['exposed_communication_seconds']:.2f}",
    ]


def cluster_of(gpus_per_host: int, calibrate: Path | None, kernel: str | None) -> Cluster:
    """With the rates of a file of measurements, where it has a transport; else with those of H200."""
    fitted = fit_transports(read_points(calibrate), RATES, kernel) if calibrate else {}
    return Cluster(gpus_per_host, {**RATES, **fitted})


def write(path: Path, objects: Sequence[Mapping[str, Any]]) -> None:
    """Replaces an earlier plan. Raises ValueError for a file that is none."""
    if path.is_file() and path.stat().st_size and not path.read_text(errors="replace").startswith('{"plan": '):
        raise ValueError(f"--output {path} is there and is no plan of attention; name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in objects), encoding="utf-8")


def schedule_names(text: str) -> list[str]:
    names = list(SCHEDULES) if text == "all" else text.split(",")
    for name in names:
        if name not in SCHEDULES:
            raise ValueError(f"schedule {name!r} is unknown; choose all or from {', '.join(SCHEDULES)}")
    return list(dict.fromkeys(names))


def gpu_counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"--gpus {text} is no list of numbers of GPUs; write 1,2,4,8")
    return sorted({int(word) for word in words})


def check_shape(shape: AttentionShape) -> None:
    if min(shape.heads, shape.kv_heads, shape.head_dim) < 1 or shape.heads % shape.kv_heads:
        raise ValueError(
            f"{shape.heads} query heads of {shape.head_dim} do not divide among {shape.kv_heads} key/value heads"
        )
