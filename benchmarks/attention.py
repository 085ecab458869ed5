"""Times forward and backward of one causal attention layer over all ranks, for lightseq and its peers."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # instead of this folder, whose modules would hide packages

import argparse
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.attention_peers import PACKED_PEERS, PEERS
from benchmarks.command_line import Parser, check_output, length, listed, one_of, positive, seconds
from benchmarks.errors import RESULTS, check_layer
from benchmarks.layers import Choice, lightseq_layer, single_gpu_layer, without_exchange
from benchmarks.measure import FLOPS, Case, Disagreement, Layer, Skipped, time_layer, together
from benchmarks.records import append, provenance
from lightseq.config.checks import CHOICES
from lightseq.config.lengths import shown
from lightseq.distributed.environment import is_main_process
from lightseq.distributed.mesh import World, check_devices, init_distributed, on_all_ranks
from lightseq.kernels import KERNELS
from lightseq.schedule.algorithms import SCHEDULES

TIMEOUT_SECONDS = 600.0  # until ranks stop waiting for a dead rank
TIMES = ("seconds_median", "seconds_min", "seconds_max", "repeats", "tflops_per_gpu", "peak_memory_bytes")
CEILING = "single-gpu"  # the kernel on one GPU with the whole sequence, an upper bound
TWICE = "gather_twice"
DOCUMENT_MULTIPLE = 64  # tokens; peers cut each document into equal pieces
EXAMPLES = """examples:
  python3 -m torch.distributed.run --nproc_per_node=4 benchmarks/attention.py --peers all --exposed
  ... --schedules prefix,prefix@head_groups=2,usp@ulysses_size=2 --lengths 512K --kernels fa4,cudnn
  ... --documents lognormal:0 --lengths 128K --schedules prefix,ulysses --peers single-gpu
  ... --check --lengths 2K --schedules all --peers none
  python3 -m analysis attention outputs/attention.jsonl"""


@dataclass(frozen=True)
class Point:
    """One implementation with one configuration."""

    implementation: str
    set_up: Callable[[Case], AbstractContextManager[Layer]]
    request: str = ""  # the schedule as typed
    choice: Choice | None = None  # None for peers


def main(words: Sequence[str]) -> None:
    if {"-h", "--help"} & set(words):
        if is_main_process():
            parser().print_help()
        return
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


# ---- the command line -----------------------------------------------------------------------------------------------


def parser() -> Parser:
    out = Parser("benchmarks/attention.py", __doc__, EXAMPLES)
    kernels, transports = ("auto", *KERNELS), (*CHOICES["transport"], "none")
    peers, dtypes = (CEILING, *PEERS, *PACKED_PEERS), ("bfloat16", "float16", "float32", "float64")
    schedules = f"auto, all, none, {', '.join(SCHEDULES)}; options: @head_groups=N, @ulysses_size=N"
    what = out.add_argument_group("layer").add_argument
    what(
        "--lengths", type=listed(length), default="16K,32K,64K,128K", metavar="N,...", help="sequence lengths in tokens"
    )
    what(
        "--schedules",
        type=listed(choice, SCHEDULES),
        default="auto",
        metavar="S,...",
        help=f"{schedules}, @{TWICE} (ulysses gathers q, k and v again in the backward pass)",
    )
    what("--kernels", type=listed(one_of(*kernels)), default="auto", metavar="K,...", help=", ".join(kernels))
    what("--transports", type=listed(one_of(*transports)), default="auto", metavar="T,...", help=", ".join(transports))
    what(
        "--peers",
        type=listed(one_of(*peers), peers),
        default=CEILING,
        metavar="P,...",
        help=f"all, none, {', '.join(peers)}; {CEILING} is the kernel on one GPU with the whole sequence, as a bound",
    )
    what(
        "--documents",
        type=documents,
        metavar="D",
        help="pack documents of 1K to 64K tokens (lognormal:SEED) or other lengths (lognormal:SEED:MIN:MAX)",
    )
    what("--heads", type=positive, default=32, metavar="N", help="query heads")
    what("--kv_heads", type=positive, default=8, metavar="N", help="key/value heads")
    what("--head_dim", type=positive, default=128, metavar="N", help="head dimension")
    what(
        "--dtype",
        type=one_of(*dtypes),
        metavar="D",
        help=f"{', '.join(dtypes)}; if not given, bfloat16 on GPUs and float32 on CPU",
    )
    how = out.add_argument_group("measurement").add_argument
    how("--warmup", type=positive, default=2, metavar="N", help="untimed runs before the measurement")
    how("--repeats", type=positive, default=20, metavar="N", help="maximum number of timed runs")
    how(
        "--seconds",
        type=seconds,
        default=10.0,
        metavar="S",
        help="time limit for the timed runs of a point; at least 3 are made",
    )
    how(
        "--exposed",
        action="store_true",
        help="also time lightseq without communication; the difference is exposed communication",
    )
    how(
        "--check",
        action="store_true",
        help="measure errors against float64 instead of times; memory is quadratic, so use about 2K",
    )
    out.add_output("outputs/attention.jsonl")
    return out


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the flags. Raises ValueError with a one-line reason."""
    flags = parser().parse_args(words)
    if flags.heads % flags.kv_heads:
        raise ValueError(f"--heads {flags.heads} is not a multiple of --kv_heads {flags.kv_heads}")
    if not flags.schedules and not flags.peers:
        raise ValueError("--schedules none and --peers none leave nothing to measure; give one of them")
    check_output(flags)
    return flags


def choice(text: str) -> tuple[str, Choice]:
    """Parses a schedule with settings, such as `usp@ulysses_size=2@head_groups=4`."""
    schedule, *settings = text.split("@")
    if schedule not in ("auto", *SCHEDULES):
        raise argparse.ArgumentTypeError(
            f"{schedule!r} is unknown; choose from auto, all, none, {', '.join(SCHEDULES)}"
        )
    found = Choice(schedule)
    for setting in settings:
        key, _, value = setting.partition("=")
        if setting == TWICE and schedule not in ("auto", "ulysses"):
            raise argparse.ArgumentTypeError(
                f"{text!r}: {TWICE} applies only to ulysses; {schedule} always gathers twice"
            )
        if setting == TWICE:
            found = replace(found, keep_gathered=False)
        elif key in ("head_groups", "ulysses_size") and value.isdecimal() and int(value) > 0:
            found = replace(found, **{key: int(value)})  # type: ignore[arg-type]
        else:
            raise argparse.ArgumentTypeError(f"{text!r}: write head_groups=N, ulysses_size=N or {TWICE} after @")
    return text, found


def documents(text: str) -> str:
    if not re.fullmatch(r"lognormal:\d+(:\d+:\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a distribution; write lognormal:SEED or lognormal:SEED:128:8192"
        )
    _, least, most = bounds(text)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: lengths must start at 1 token or more and increase")
    return text


def bounds(text: str) -> tuple[int, int, int]:
    """Returns the seed, and the minimum and maximum tokens of a document."""
    seed, least, most = [*map(int, text.split(":")[1:]), 2**10, 2**16][:3]
    return seed, least, most


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


# ---- the points -----------------------------------------------------------------------------------------------------


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
        boundaries(flags.documents, length) if flags.documents else (),
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
        **({} if flags.check else dict.fromkeys((*TIMES, "exposed_communication_seconds"))),
        "skipped": None,
        **({"documents": flags.documents, "boundaries": list(case.boundaries)} if flags.documents else {}),
    }
    try:
        return record | (errors if flags.check else times)(point, case, flags), False
    except Skipped as why:
        return record | {"skipped": str(why)}, False
    except Disagreement as why:
        return record | {"skipped": f"run stopped: {why}"}, True


def times(point: Point, case: Case, flags: argparse.Namespace) -> dict[str, Any]:
    with set_up(point.set_up, case) as layer:
        numbers = {**layer.facts, **time_layer(layer, case, flags)}
        silent = without_exchange(layer) if point.choice and case.world > 1 and flags.exposed else None
    if silent is None:
        return numbers
    try:
        with set_up(partial(lightseq_layer, choice=silent), case) as layer:
            seconds_silent = time_layer(layer, case, flags)["seconds_median"]
    except Skipped as why:  # out of memory, for example
        return {**numbers, "exposed_communication_note": f"not measured: {why}"}
    return {**numbers, "exposed_communication_seconds": numbers["seconds_median"] - seconds_silent}


def errors(point: Point, case: Case, flags: argparse.Namespace) -> dict[str, Any]:
    """Returns errors against float64, and the largest ratio to the error of the same kernel on one GPU."""
    with set_up(point.set_up, case) as layer:
        facts, own = dict(layer.facts), check_layer(layer, case)
    if facts["kernel"] not in KERNELS:
        return {**facts, **own}
    with set_up(partial(single_gpu_layer, kernel=facts["kernel"]), case) as layer:
        alone = check_layer(layer, case)
    return {**facts, **own, "worst_error_over_single_gpu": max(own[name] / alone[name] for name in own)}


@contextmanager
def set_up(make: Callable[[Case], AbstractContextManager[Layer]], case: Case) -> Iterator[Layer]:
    """Yields a layer. Raises Skipped on all ranks if any rank cannot set it up."""
    with ExitStack() as stack:
        yield together(case, lambda: stack.enter_context(make(case)))


# ---- the records ----------------------------------------------------------------------------------------------------


def header(world: World, words: Sequence[str], flags: argparse.Namespace) -> dict[str, Any]:
    launch = f"-m torch.distributed.run --nproc_per_node={world.local_size} " if world.size > 1 else ""
    return {
        "benchmark": "attention",
        "command": f"python3 {launch}benchmarks/attention.py {shlex.join(words)}".strip(),
        "world": world.size,
        **provenance(flags.commit, world.device),
        "flops": FLOPS.format("(sum of document lengths^2)" if flags.documents else "length^2"),
    }


def line(record: Mapping[str, Any]) -> str:
    """Describes a measured point in one line."""
    request, schedule = record["request"], record["schedule"] if record["schedule"] != "auto" else None
    name = f"{record['implementation']} {request}".strip()
    name += f" → {schedule}" if request.startswith("auto") and schedule else ""
    where = ", ".join(filter(None, (name, record["kernel"], record["transport"])))
    head = f"{shown(record['length']):>6}  {where}:"
    if record["skipped"]:
        return f"{head} skipped: {record['skipped']}"
    if "relative_error_out" in record:
        found = [f"{name} {record[f'relative_error_{name}']:.1e}" for name in RESULTS]
        ratio = record.get("worst_error_over_single_gpu")
        return f"{head} {', '.join(found)}" + (f", {ratio:.2f} times one GPU's" if ratio is not None else "")
    median, least, most = (1e3 * record[f"seconds_{which}"] for which in ("median", "min", "max"))
    peak, exposed = record["peak_memory_bytes"], record["exposed_communication_seconds"]
    memory = f", {peak / 2**30:.2f} GiB" if peak is not None else ""
    waits = f", {1e3 * exposed:.2f} ms exposed" if exposed is not None else ""
    return (
        f"{head} {record['tflops_per_gpu']:.3g} TFLOP/s, {median:.2f} ms [{least:.2f}, {most:.2f}] "
        f"in {record['repeats']} runs{memory}{waits}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
