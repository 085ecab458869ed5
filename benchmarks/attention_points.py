"""Points of benchmarks/attention.py: their measurement and their records."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.attention_flags import CEILING, Choice, bounds, parse
from benchmarks.attention_peers import PACKED_PEERS, PEERS, WINDOWED_PEERS
from benchmarks.layers import lightseq_layer, single_gpu_layer
from benchmarks.measure import FLOPS, Case, Disagreement, Layer, Skipped, time_layer, together
from benchmarks.records import append, provenance
from lightseq.config.lengths import format_tokens
from lightseq.distributed.agreement import on_all_ranks
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World, check_devices

TIMEOUT_SECONDS = 600.0  # until ranks stop waiting for a dead rank
TIMES = ("seconds_median", "seconds_min", "seconds_max", "repeats", "tflops_per_gpu", "peak_memory_bytes")
DOCUMENT_MULTIPLE = 64  # tokens; peers cut each document into equal pieces


@dataclass(frozen=True)
class Point:
    """One implementation with one configuration."""

    implementation: str
    set_up: Callable[[Case], AbstractContextManager[Layer]]
    request: str = ""  # the schedule as typed
    choice: Choice | None = None  # None for peers


def measure_all(words: Sequence[str]) -> None:
    """Measures all points on this rank and appends their records to the output."""
    with init_distributed(TIMEOUT_SECONDS) as world:
        flags = on_all_ranks(world, lambda: parse(words))
        on_all_ranks(world, lambda: check_devices(world))
        on_all_ranks(world, lambda: append(flags.output, header(world, words, flags)) if world.is_main else None)
        for tokens in flags.lengths:
            case = case_of(flags, world, tokens)
            for point in points(flags):
                record, stuck = measure(point, case, flags)
                if world.is_main:
                    append(flags.output, record)
                    print(line(record), flush=True)
                if stuck:
                    sys.stdout.flush()
                    os._exit(1)  # ranks wait for messages that never come; a normal exit would hang
        if world.is_main:
            print(f"records  {flags.output}", flush=True)
        dist.barrier()  # an early exit would close connections that other ranks still read from


# ---- the points -----------------------------------------------------------------------------------------------------


def boundaries(text: str, length: int) -> tuple[int, ...]:
    """Returns the starts of documents that fill a sequence, and its end, which cuts the last document.

    Lengths are log-normal: `least` and `most` are two standard deviations of the logarithm from its mean.
    """
    seed, least, most = bounds(text)
    rng = np.random.default_rng(seed)
    middle, spread = np.log(least * most) / 2, np.log(most / least) / 4
    edges = [0]
    while edges[-1] < length:
        size = float(np.clip(np.exp(rng.normal(middle, spread)), least, most))
        edges.append(min(length, edges[-1] + max(1, round(size / DOCUMENT_MULTIPLE)) * DOCUMENT_MULTIPLE))
    return tuple(edges)


def points(flags: argparse.Namespace) -> list[Point]:
    """Returns the points to measure: the ceiling, the peers, then lightseq."""
    ceiling = [Point(CEILING, partial(single_gpu_layer, kernel=kernel)) for kernel in flags.kernels]
    peers = [Point(name, partial(peer_layer, name=name)) for name in flags.peers if name != CEILING]
    ours = [
        Point("lightseq", partial(lightseq_layer, choice=asked), request, asked)
        for request, schedule in flags.schedules
        for kernel in flags.kernels
        for transport in flags.transports
        for asked in [replace(schedule, kernel=kernel, transport=transport)]
    ]
    return [*(ceiling if CEILING in flags.peers else []), *peers, *ours]


def peer_layer(case: Case, name: str) -> AbstractContextManager[Layer]:
    """Sets up a peer. Raises ValueError if it does not support packed documents, or supports nothing else."""
    if case.window and name not in WINDOWED_PEERS:
        raise ValueError("has no sliding window here")
    if case.boundaries and name in PEERS:
        raise ValueError("would attend across documents")
    if not case.boundaries and name in PACKED_PEERS:
        raise ValueError("needs packed documents; give --documents")
    return {**PEERS, **PACKED_PEERS}[name](case)


def case_of(flags: argparse.Namespace, world: World, length: int) -> Case:
    dtype = getattr(torch, flags.dtype or ("bfloat16" if world.device.type == "cuda" else "float32"))
    assert dist.group.WORLD is not None
    return Case(
        length, flags.heads, flags.kv_heads, flags.head_dim, dtype, world.device, dist.group.WORLD,
        boundaries(flags.documents, length) if flags.documents else (), flags.window, flags.value_dim,
    )  # fmt: skip


def measure(point: Point, case: Case, flags: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Returns the record of a point, and True if ranks are stuck and the run must end."""
    record = {
        "length": case.length,
        "world": 1 if point.implementation == CEILING else case.world,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "dtype": str(case.dtype).removeprefix("torch."),
        "batch": 1,
        "implementation": point.implementation,
        "request": point.request,
        **dict.fromkeys(Choice.__dataclass_fields__),
        **(asdict(point.choice) if point.choice else {}),
        **dict.fromkeys(TIMES),
        "skipped": None,
        **({"documents": flags.documents} if flags.documents else {}),
        **({"window": case.window} if case.window else {}),
        **({"value_dim": case.value_dim} if case.value_dim else {}),
    }
    try:
        with ExitStack() as stack:
            layer = together(case, lambda: stack.enter_context(point.set_up(case)))
            return {**record, **layer.facts, **time_layer(layer, case, flags)}, False
    except Skipped as why:
        return record | {"skipped": str(why)}, False
    except Disagreement as why:
        return record | {"skipped": f"run stopped: {why}"}, True


# ---- the records ----------------------------------------------------------------------------------------------------


def header(world: World, words: Sequence[str], flags: argparse.Namespace) -> dict[str, Any]:
    launch = f"-m torch.distributed.run --nproc_per_node={world.local_size} " if world.size > 1 else ""
    return {
        "benchmark": "attention",
        "command": f"python3 {launch}benchmarks/attention.py {shlex.join(words)}".strip(),
        "world": world.size,
        **provenance(flags.commit, world.device),
        "flops": FLOPS,
    }


def line(record: Mapping[str, Any]) -> str:
    """Describes a measured point in one line."""
    request, schedule = record["request"], record["schedule"] if record["schedule"] != "auto" else None
    name = f"{record['implementation']} {request}".strip()
    name += f" → {schedule}" if request.startswith("auto") and schedule else ""
    where = ", ".join(filter(None, (name, record["kernel"], record["transport"])))
    head = f"{format_tokens(record['length']):>6}  {where}:"
    if record["skipped"]:
        return f"{head} skipped: {record['skipped']}"
    median, least, most = (1e3 * record[f"seconds_{which}"] for which in ("median", "min", "max"))
    peak = record["peak_memory_bytes"]
    memory = f", {peak / 2**30:.2f} GiB" if peak is not None else ""
    return (
        f"{head} {record['tflops_per_gpu']:.3g} TFLOP/s, {median:.2f} ms [{least:.2f}, {most:.2f}] "
        f"in {record['repeats']} runs{memory}"
    )
