"""Times one attention layer, forward and backward, over all ranks: lightseq and its peers, in one process group.

python3 -m torch.distributed.run --nproc_per_node=4 benchmarks/attention.py --peers all --exposed
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # and hides no package behind this folder

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TextIO

import torch
import torch.distributed as dist

from benchmarks.errors import check_layer
from benchmarks.flags import CEILING, parse, parser
from benchmarks.layers import lightseq_layer, resolved, single_gpu_layer
from benchmarks.measure import Case, Disagreement, Effort, Layer, Skipped, time_layer, together, trace_layer
from benchmarks.plan import Subject, subjects
from benchmarks.report import columns, header, line
from lightseq.config.lengths import shown
from lightseq.distributed.environment import is_main_process
from lightseq.distributed.mesh import World, check_devices, init_distributed, on_all_ranks
from lightseq.kernels import KERNELS

TIMEOUT_SECONDS = 600.0  # for a rank that waits for one that died
TIMES = ("seconds_median", "seconds_min", "seconds_max", "repeats", "tflops_per_gpu", "peak_memory_bytes")


def main(words: Sequence[str]) -> None:
    if {"-h", "--help"} & set(words):
        if is_main_process():
            parser().print_help()
        return
    with init_distributed(TIMEOUT_SECONDS) as world:
        flags = on_all_ranks(world, lambda: parse(words))
        on_all_ranks(world, lambda: check_devices(world))
        file = on_all_ranks(world, lambda: open_output(flags, world))
        every = subjects(flags)
        write(file, header(world, words, flags.commit, packed=flags.documents is not None))
        say(world, columns(every, flags.check))
        for length in flags.lengths:
            for subject in every:
                record, stop = measure(subject, case_of(flags, world, length), flags)
                write(file, record)
                say(world, line(record, every, flags.check))
                if stop:
                    sys.stdout.flush()
                    os._exit(1)  # ranks are stuck in messages that never come: an orderly end would hang as well
        say(world, f"records  {flags.output}")
        if file is not None:
            file.close()
        dist.barrier()  # who leaves first closes connections that the others may still be reading from


def case_of(flags: argparse.Namespace, world: World, length: int) -> Case:
    dtype = getattr(torch, flags.dtype or ("bfloat16" if world.device.type == "cuda" else "float32"))
    group = dist.group.WORLD
    assert group is not None
    boundaries = flags.documents.boundaries(length) if flags.documents else ()
    return Case(
        length, flags.heads, flags.kv_heads, flags.head_dim, flags.batch, dtype, world.device, group, boundaries
    )


def measure(subject: Subject, case: Case, flags: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The record of one point, and whether the run has to end with it."""
    record = blank(subject, case, flags.check)
    if flags.documents:
        record |= {"documents": flags.documents.text, "boundaries": list(case.boundaries)}
    try:
        numbers = errors(subject, case, flags.seed) if flags.check else times(subject, case, flags)
        return {**record, **numbers}, False
    except Skipped as why:
        return {**record, "skipped": str(why)}, False
    except Disagreement as why:
        return {**record, "skipped": f"stopped here: {why}"}, True


def blank(subject: Subject, case: Case, check: bool) -> dict[str, Any]:
    """What is known before anything runs; all that is measured is null."""
    return {
        "length": case.length,
        "world": 1 if subject.implementation == CEILING else case.world,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "dtype": str(case.dtype).removeprefix("torch."),
        "batch": case.batch,
        "implementation": subject.implementation,
        "request": subject.request,
        **dict.fromkeys(("schedule", "head_groups", "ulysses_size", "keep_gathered", "kernel", "transport")),
        **subject.asked,
        **({} if check else dict.fromkeys((*TIMES, "exposed_communication_seconds"))),
        "skipped": None,
    }


def times(subject: Subject, case: Case, flags: argparse.Namespace) -> dict[str, Any]:
    effort = Effort(flags.warmup, flags.least_repeats, flags.repeats, flags.seconds)
    with opened(subject.open, case) as layer:
        numbers = {**layer.facts, **time_layer(layer, case, effort, flags.seed)}
        again = resolved(layer) if subject.choice else None
        if flags.trace and again is not None:
            words = (subject.request, layer.facts["kernel"], layer.facts["transport"], shown(case.length))
            directory = flags.trace / re.sub(r"[^\w.]+", "-", "-".join(words))
            tracing = partial(trace_layer, layer, case, flags.seed, directory)
            numbers |= together(case, tracing, fatal_if_split=True)
    if again is None or case.world == 1 or not flags.exposed:
        return numbers
    try:
        with opened(lambda c: lightseq_layer(c, again.silent), case) as layer:
            silent = time_layer(layer, case, effort, flags.seed)["seconds_median"]
    except Skipped as why:  # an earlier transport layer, or no memory left
        return {**numbers, "exposed_communication_note": f"not measured: {why}"}
    return {**numbers, "exposed_communication_seconds": numbers["seconds_median"] - silent}


def errors(subject: Subject, case: Case, seed: int) -> dict[str, Any]:
    """Errors against float64, and the worst of them as a multiple of what the same kernel errs on one GPU."""
    with opened(subject.open, case) as layer:
        facts, own = dict(layer.facts), check_layer(layer, case, seed)
    if facts["kernel"] not in KERNELS:
        return {**facts, **own}
    with opened(lambda c: single_gpu_layer(c, facts["kernel"]), case) as layer:
        alone = check_layer(layer, case, seed)
    return {**facts, **own, "worst_error_over_single_gpu": max(own[name] / alone[name] for name in own)}


@contextmanager
def opened(setting_up: Callable[[Case], AbstractContextManager[Layer]], case: Case) -> Iterator[Layer]:
    """A layer that every rank could set up; Skipped where any could not."""
    with ExitStack() as stack:
        yield together(case, lambda: stack.enter_context(setting_up(case)))


def open_output(flags: argparse.Namespace, world: World) -> TextIO | None:
    if not world.is_main:
        return None
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    return flags.output.open("a" if flags.append else "w", encoding="utf-8")


def write(file: TextIO | None, record: Mapping[str, Any]) -> None:
    if file is not None:
        file.write(json.dumps(record) + "\n")
        file.flush()


def say(world: World, text: str) -> None:
    if world.is_main:
        print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
