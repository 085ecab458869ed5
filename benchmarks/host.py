"""Times the CPU side of an attention layer on one GPU: one rank's tiles, with local memory in place of its peers'.

python3 benchmarks/host.py --ranks 4 --lengths 8K,16K
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # instead of this folder, whose modules would hide packages

import shlex
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

from benchmarks.command_line import Parser, length, listed, one_of, positive
from benchmarks.measure import FLOPS, Case, Layer, make_step
from benchmarks.records import append, provenance
from lightseq.attention import context as contexts
from lightseq.attention.operator import attention
from lightseq.comm import symmetric
from lightseq.comm.select import WithoutCudaGraphs
from lightseq.comm.transport import Transport
from lightseq.config.lengths import format_tokens
from lightseq.config.parser import print_error
from lightseq.distributed.stopwatch import DeviceTimestamp
from lightseq.schedule.algorithms import SCHEDULES
from lightseq.schedule.cost import AttentionShape
from lightseq.training.loop import synchronized_gc

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama 3 8B
REPEATS = 60
WARMUP = 6  # includes the two passes before CUDA graphs are recorded
AHEAD_CYCLES = 20_000_000  # about ten milliseconds; the device waits while the host runs ahead


def main(words: Sequence[str]) -> int:
    try:
        flags = parser().parse_args(words)
        if not torch.cuda.is_available():
            raise ValueError("no GPU found; this benchmark needs one")
    except ValueError as error:
        return print_error(error)
    dist.init_process_group("fake", rank=0, world_size=flags.ranks, store=FakeStore())
    assert dist.group.WORLD is not None
    device = torch.device("cuda", 0)
    command = f"python3 benchmarks/host.py {shlex.join(words)}".strip()
    flags.output.unlink(missing_ok=True)
    about = {"world": 1, **provenance(flags.commit, device), "flops": FLOPS.format("length^2")}
    append(flags.output, {"benchmark": "host", "command": command, **about})
    for tokens in flags.lengths:
        case = Case(tokens, HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, device, dist.group.WORLD)
        for schedule in flags.schedules:
            for transport in ("symmetric", "symmetric-unrecorded"):
                record = measure(case, schedule, transport)
                append(flags.output, record)
                print(line(record), flush=True)
    dist.destroy_process_group()
    print(f"records  {flags.output}")
    return 0


def parser() -> Parser:
    out = Parser("benchmarks/host.py", __doc__)
    out.add_argument("--ranks", type=positive, default=4, help="ranks of the layer; only the first one runs")
    out.add_argument("--lengths", type=listed(length), default="8K,16K", help="sequence lengths in tokens")
    out.add_argument("--schedules", type=listed(one_of(*SCHEDULES)), default="ulysses,prefix", help="schedules")
    out.add_output("outputs/host.jsonl")
    return out


def measure(case: Case, schedule: str, transport: str) -> dict[str, Any]:
    """Times the host while it runs ahead, the device alone, and both together."""
    with one_rank(case, schedule, transport) as layer, synchronized_gc():
        step = make_step(layer, case)
        for _ in range(WARMUP):
            step()
        host, alone = ahead(step, case.device)
        both = [until_done(step) for _ in range(REPEATS)]
    seconds = statistics.median(alone)
    return {
        "length": case.length, "ranks": case.world, "heads": case.heads, "kv_heads": case.kv_heads,
        "head_dim": case.head_dim, "schedule": schedule, **layer.facts, "repeats": REPEATS,
        "host_seconds_median": statistics.median(host), "host_seconds_min": min(host), "host_seconds_max": max(host),
        "device_seconds_median": seconds, "both_seconds_median": statistics.median(both),
        "tflops_per_gpu_of_device": case.tflops_per_gpu(case.world, seconds),
    }  # fmt: skip


@contextmanager
def one_rank(case: Case, schedule: str, transport: str) -> Iterator[Layer]:
    """Sets up the first rank's part of a layer."""
    shape = AttentionShape(case.length, case.heads, case.kv_heads, case.head_dim)

    def carrier(*_: object) -> Transport:
        made = symmetric.SymmetricTransport(case.group, case.device)
        return WithoutCudaGraphs(made) if transport.endswith("-unrecorded") else made

    with patch.object(symmetric, "symmetric_memory", OwnMemory), patch.object(contexts, "make_transport", carrier):
        config = contexts.AttentionConfig(schedule, dtype=case.dtype, device=case.device, head_groups=1)
        context = contexts.make_context(case.group, shape, config)
        positions = context.layout.positions(0, context.layout.padded_length(case.length))
        # The other ranks do not exist, so their shapes are entered here.
        context.shapes.add((1, len(positions), case.heads, case.head_dim, case.kv_heads, 0))
        facts = {"kernel": context.selection.kernel.name, "transport": transport}
        try:
            yield Layer(lambda q, k, v: attention(q, k, v, context)[0], positions, case.world, facts)
        finally:
            contexts.release(context)


class OwnMemory:
    """Replacement for torch's symmetric memory: peers' buffers are this rank's own, and barriers return at once."""

    @staticmethod
    def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        noise = torch.randn(size // 2 + 1, device=device).bfloat16()  # zeros would need less power
        return noise.view(torch.uint8)[:size]

    @staticmethod
    def rendezvous(memory: Tensor, _group: object) -> SimpleNamespace:
        token = torch.zeros(8, device=memory.device)
        return SimpleNamespace(get_buffer=lambda *_: memory, barrier=token.zero_)


def ahead(step: Callable[[], None], device: torch.device) -> tuple[list[float], list[float]]:
    """Returns seconds of the host, and of the device when everything is launched before it starts."""
    host, alone = [], []
    for _ in range(REPEATS):
        torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        start, began = DeviceTimestamp(device), time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        alone.append(start.seconds_until(DeviceTimestamp(device)))
    return host, alone


def until_done(step: Callable[[], None]) -> float:
    """Returns seconds from the first launch until the device is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def line(record: dict[str, Any]) -> str:
    host, least, device, both = (
        1e6 * record[f"{name}_seconds_{which}"]
        for name, which in (("host", "median"), ("host", "min"), ("device", "median"), ("both", "median"))
    )
    name = f"{format_tokens(record['length'])} {record['schedule']} {record['transport']}"
    rate = f"{record['tflops_per_gpu_of_device']:.0f} TFLOP/s"
    return f"{name}: host {host:.0f} us, lowest {least:.0f}; device {device:.0f} us ({rate}); both {both:.0f} us"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
