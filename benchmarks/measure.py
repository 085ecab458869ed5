"""Times one attention layer on all ranks together, and measures the memory that it takes.

Shapes: B batch, S sequence, H heads, D head dim.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.distributed.stopwatch import DeviceTimestamp
from lightseq.kernels import KernelSpec
from lightseq.schedule.layout import Layout
from lightseq.training.loop import collected_together

T = TypeVar("T")
LEAST_REPEATS = 3
FLOPS = "3.5 * 4 * {} * heads * head_dim / 2 / world: the causal half once, the backward 2.5 forwards"


@dataclass(frozen=True)
class Case:
    """One attention layer, and the group of ranks that shares its sequence."""

    length: int  # tokens of the whole sequence
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    boundaries: tuple[int, ...] = ()  # of packed documents: where each begins, and the end; none: one document

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def spec(self) -> KernelSpec:
        capability = torch.cuda.get_device_capability(self.device) if self.on_gpu else (0, 0)
        return KernelSpec(self.device.type, capability, self.dtype, self.head_dim, packed=bool(self.boundaries))

    def shapes(self, tokens: int) -> list[tuple[int, ...]]:
        """Returns (B, S, heads, D) of q, k, v and the output's gradient."""
        return [(1, tokens, h, self.head_dim) for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)]

    def positions(self, layout: Any) -> Tensor:
        """Returns this rank's positions in the sequence, padded to what every peer's layout divides."""
        unit = 2 * self.world
        chunks_per_rank = 2 if layout == "zigzag" else 1
        return Layout(layout, self.world, chunks_per_rank).positions(self.rank, -(-self.length // unit) * unit)

    def needs_cuda(self, name: str) -> None:
        """Raises ValueError for a peer without kernels for the CPU."""
        if not self.on_gpu:
            raise ValueError(f"{name} needs a CUDA device")

    def tflops_per_gpu(self, ranks: int, seconds: float) -> float:
        """Counts forward and backward, the causal half once, the backward as 2.5 forwards."""
        area = sum((b - a) ** 2 for a, b in pairwise(self.boundaries or (0, self.length))) / 2
        return 3.5 * 4 * area * self.heads * self.head_dim / ranks / seconds / 1e12


@dataclass(frozen=True)
class Layer:
    """An implementation set up on this rank: the tokens that it takes here, and a differentiable function of q, k, v.

    `facts` go into the record. `ranks` share the sequence: all of the group, or this one alone.
    """

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    positions: Tensor  # of every local token in the whole sequence, padding included
    ranks: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    heads_first: bool = False  # takes and gives (B, H, S, D), not (B, S, H, D)
    buffer_bytes: Callable[[], int] = lambda: 0  # device memory held that torch does not count as allocated


class Skipped(Exception):
    """A point that cannot be measured here, with the reason. Raised on all ranks alike."""


class Disagreement(Exception):
    """A failure of some ranks in the middle of a layer: what the others wait for will never arrive."""


def together(case: Case, action: Callable[[], T], fatal_if_split: bool = False) -> T:
    """Runs `action` on every rank of the group. Raises Skipped on all of them if it raised on any.

    `fatal_if_split`: ranks exchange messages in it, so that a failure on some only is a Disagreement. The ranks compare
    notes on the host (gloo), past whatever may be stuck on a device.
    """
    reason, result = None, None
    try:
        result = action()
    except Exception as error:  # a peer may raise anything, and none of it may end the run
        reason = one_line(error)
    failed = [said for said in gathered(case, reason) if said is not None]
    if not failed:
        return result  # type: ignore[return-value]
    if fatal_if_split and len(failed) < case.world:
        raise Disagreement(f"{failed[0]} (on {len(failed)} of {case.world} ranks)")
    raise Skipped(failed[0])


def one_line(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = " ".join(str(error).split())[:200]
    known = isinstance(error, ValueError | ImportError) and text
    return text if known else f"{type(error).__name__}: {text}".rstrip(": ")


def gathered(case: Case, mine: T) -> list[T]:
    every: list[Any] = [None] * case.world
    dist.all_gather_object(every, mine, group=case.group)
    return every


def clear(device: torch.device) -> None:
    """Frees what earlier points left behind, so that the peak is this point's own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def time_layer(layer: Layer, case: Case, flags: argparse.Namespace) -> dict[str, Any]:
    """Returns times and memory: the slowest rank's time of each repeat, the largest rank's memory."""
    clear(case.device)
    step = together(case, lambda: make_step(layer, case))
    together(case, step, fatal_if_split=True)  # only launched: out of memory is known before anyone waits

    def warm_up() -> float:
        for _ in range(flags.warmup - 1):
            step()
        return sum(run(step, 1, case))

    with collected_together():  # as in training; one rank that looks for cycles of objects makes all others wait
        each = max(gathered(case, together(case, warm_up, fatal_if_split=True)))
        repeats = max(LEAST_REPEATS, min(flags.repeats, int(flags.seconds / max(each, 1e-9))))
        mine = together(case, lambda: run(step, repeats, case), fatal_if_split=True)
    seconds = [max(repeat) for repeat in zip(*gathered(case, mine), strict=True)]
    peak = torch.cuda.max_memory_allocated(case.device) + layer.buffer_bytes() if case.on_gpu else 0
    median = statistics.median(seconds)
    return {
        "seconds_median": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "repeats": repeats,
        "tflops_per_gpu": case.tflops_per_gpu(layer.ranks, median),
        "peak_memory_bytes": max(gathered(case, peak)) if case.on_gpu else None,
    }


def make_step(layer: Layer, case: Case) -> Callable[[], None]:
    """Returns forward and backward over random inputs of this rank's shape, as autograd runs them."""
    generator = torch.Generator(case.device).manual_seed(case.rank)
    q, k, v, dout = (
        torch.randn(
            (b, h, s, d) if layer.heads_first else (b, s, h, d),
            generator=generator,
            device=case.device,
            dtype=case.dtype,
        )
        for b, s, h, d in case.shapes(len(layer.positions))
    )
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> None:
        torch.autograd.grad(layer.attend(q, k, v), (q, k, v), dout)

    return step


def run(step: Callable[[], None], repeats: int, case: Case) -> list[float]:
    """Returns this rank's seconds of each repeat. All ranks start each one at the same moment of their devices' work.

    The host stays at most one repeat ahead: it hides its own work as in training, and piles no memory up.
    """
    token = torch.zeros(1, device=case.device)
    marks: list[tuple[DeviceTimestamp, DeviceTimestamp]] = []
    for i in range(repeats):
        if i >= 2:
            marks[i - 2][0].seconds_until(marks[i - 2][1])
        dist.all_reduce(token, group=case.group)
        start = DeviceTimestamp(case.device)
        step()
        marks.append((start, DeviceTimestamp(case.device)))
    return [start.seconds_until(end) for start, end in marks]
