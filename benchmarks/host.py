"""What the host does for a layer of attention, on one GPU: one rank's part of it, with its own memory for its peers'.

python3 benchmarks/host.py --ranks 4 --lengths 8K,16K
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # and hides no package behind this folder

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.flags import listed, one_of
from benchmarks.measure import tflops_per_gpu
from benchmarks.report import header
from lightseq.attention import context as contexts
from lightseq.attention.operator import attention
from lightseq.comm import symmetric
from lightseq.comm.select import Unrecorded
from lightseq.comm.transport import Transport
from lightseq.config.checks import CHOICES
from lightseq.config.lengths import length_flag, shown
from lightseq.distributed.mesh import World
from lightseq.schedule.algorithms import SCHEDULES
from lightseq.schedule.cost import AttentionShape
from lightseq.training.loop import collected_together

WARMUP = 6  # with the two after which a pass is recorded
AHEAD_CYCLES = 20_000_000  # some ten milliseconds in which the device waits and the host runs ahead of it
COLUMNS = ("tokens", "schedule", "transport", "host us", "lowest", "device us", "both us", "TFLOP/s")


def main(words: Sequence[str]) -> int:
    flags = parser().parse_args(words)
    if not torch.cuda.is_available():
        print("error: no GPU here; this times what is launched on one", file=sys.stderr)
        return 2
    dist.init_process_group("fake", rank=0, world_size=flags.ranks, store=FakeStore())
    device = torch.device("cuda", 0)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    with flags.output.open("w", encoding="utf-8") as file:
        world = World(0, 1, 0, 1, device)
        file.write(json.dumps(header(world, words, flags.commit, benchmark="host")) + "\n")
        print("  ".join(f"{name:>15}" for name in COLUMNS))
        for length in flags.lengths:
            for schedule in flags.schedules:
                for transport in ("symmetric", "symmetric-unrecorded"):
                    record = measure(length, schedule, transport, flags, device)
                    file.write(json.dumps(record) + "\n")
                    print(line(record), flush=True)
    dist.destroy_process_group()
    print(f"records  {flags.output}")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/host.py", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=4, help="of which the first one's part is run")
    of_lengths, of_schedules = listed(length_flag), listed(one_of(SCHEDULES))
    parser.add_argument("--lengths", type=of_lengths, default="8K,16K", help="of the whole sequence (default: 8K,16K)")
    parser.add_argument("--schedules", type=of_schedules, default="ulysses,prefix", help="(default: %(default)s)")
    parser.add_argument("--kernel", type=one_of(CHOICES["kernel"]), default="auto")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--commit", help="of this tree, where git does not know")
    parser.add_argument("--output", type=Path, default=Path("outputs/host.jsonl"))
    return parser


def measure(
    length: int, schedule: str, transport: str, flags: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Microseconds of the host for one layer while it runs ahead, of the device alone, and of both where neither is."""
    with layer(length, schedule, transport, flags, device) as (step, facts), collected_together():
        for _ in range(WARMUP):
            step()
        host, alone = ahead(step, flags.repeats)
        both = [timed(step) for _ in range(flags.repeats)]
    case = SimpleNamespace(area=length**2 / 2, heads=flags.heads, head_dim=flags.head_dim, batch=1)
    seconds = statistics.median(alone)
    return {
        "length": length, "ranks": flags.ranks, "heads": flags.heads, "kv_heads": flags.kv_heads,
        "head_dim": flags.head_dim, "schedule": schedule, **facts, "repeats": flags.repeats,
        "host_seconds_median": statistics.median(host), "host_seconds_min": min(host), "host_seconds_max": max(host),
        "device_seconds_median": seconds, "both_seconds_median": statistics.median(both),
        "tflops_per_gpu_of_device": tflops_per_gpu(case, flags.ranks, seconds),  # type: ignore[arg-type]
    }  # fmt: skip


@contextmanager
def layer(
    length: int, schedule: str, transport: str, flags: argparse.Namespace, device: torch.device
) -> Iterator[tuple[Callable[[], None], dict[str, Any]]]:
    """Forward and backward of the first rank's part, as autograd runs them."""
    shape = AttentionShape(length, flags.heads, flags.kv_heads, flags.head_dim)
    group = dist.group.WORLD
    assert group is not None

    def carrier(*_: object) -> Transport:
        made = symmetric.SymmetricTransport(group, device)
        return Unrecorded(made) if transport.endswith("-unrecorded") else made

    with patch.object(symmetric, "symmetric_memory", _Own), patch.object(contexts, "make_transport", carrier):
        config = contexts.AttentionConfig(schedule, flags.kernel, dtype=torch.bfloat16, device=device, head_groups=1)
        context = contexts.make_context(group, shape, config)
        tokens = context.layout.padded_length(length) // flags.ranks
        heads = (flags.heads, flags.kv_heads, flags.kv_heads, flags.heads)
        q, k, v, dout = (torch.randn(1, tokens, n, flags.head_dim, device=device).bfloat16() for n in heads)
        for x in (q, k, v):
            x.requires_grad_()
        context.shapes.add((*q.shape, flags.kv_heads, 0))  # the other ranks are not there to be asked for theirs

        def step() -> None:
            out, _ = attention(q, k, v, context)
            torch.autograd.grad(out, (q, k, v), dout)

        try:
            yield step, {"kernel": context.selection.kernel.name, "transport": transport}
        finally:
            contexts.release(context)


class _Own:
    """torch's symmetric memory where every peer's is this rank's own, and all have come to a barrier."""

    @staticmethod
    def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        noise = torch.randn(size // 2 + 1, device=device).bfloat16()  # zeros would take a GPU less power
        return noise.view(torch.uint8)[:size]

    @staticmethod
    def rendezvous(memory: Tensor, _group: object) -> SimpleNamespace:
        token = torch.zeros(8, device=memory.device)
        return SimpleNamespace(get_buffer=lambda *_: memory, barrier=token.zero_)


def ahead(step: Callable[[], None], repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of the host, and of the device where all was launched before it began."""
    host, device = [], []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        end.record()
        end.synchronize()
        device.append(start.elapsed_time(end) / 1e3)
    return host, device


def timed(step: Callable[[], None]) -> float:
    """Seconds until the device is done with what the host begins to launch now."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def line(record: dict[str, Any]) -> str:
    us = [1e6 * record[f"{name}_seconds_{which}"] for name, which in (
        ("host", "median"), ("host", "min"), ("device", "median"), ("both", "median")
    )]  # fmt: skip
    words = (shown(record["length"]), record["schedule"], record["transport"].removeprefix("symmetric-"))
    numbers = [f"{x:.0f}" for x in (*us, record["tflops_per_gpu_of_device"])]
    return "  ".join(f"{x:>15}" for x in (*words, *numbers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
