"""Time and memory of one attention layer over all ranks.

Shapes: B batch, S sequence, H heads, D head dim.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.distributed.stopwatch import DeviceTimestamp
from lightseq.kernels.attention.base import KernelSpec, compute_capability
from lightseq.schedule.layout import Layout
from lightseq.schedule.nodes import Nodes
from lightseq.training.loop import synchronized_gc

T = TypeVar("T")
MIN_REPEATS = 3
FLOPS = (
    "3.5 * 4 * visible pairs * heads * head_dim / world: the causal half or the window once, the backward 2.5 forwards"
)


@dataclass(frozen=True)
class Case:
    """Shape of an attention layer, and the group of ranks that shares its sequence."""

    length: int  # tokens of the whole sequence
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    boundaries: tuple[int, ...] = ()  # starts of packed documents, and the end; empty: one document
    window: int | None = None  # keys that a query sees, with its own; None: all before it
    value_dim: int | None = None  # default: head_dim
    parents: tuple[int, ...] | None = None  # of the documents, if they are nodes of trees

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.boundaries or (0, self.length), self.parents)

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
        return KernelSpec(
            self.device.type,
            compute_capability(self.device),
            self.dtype,
            self.head_dim,
            False,
            bool(self.boundaries),
            self.window is not None,
            value_dim=self.value_dim,
        )

    @property
    def values(self) -> int:
        """Returns the head dimension of values."""
        return self.value_dim or self.head_dim

    def shapes(self, tokens: int) -> list[tuple[int, ...]]:
        """Returns shapes (B, S, H, D) of q, k, v and the output's gradient."""
        heads, dims = (self.heads, self.kv_heads, self.kv_heads, self.heads), (self.head_dim, self.values)
        return [(1, tokens, h, dims[i // 2]) for i, h in enumerate(heads)]

    def positions(self, layout: Any) -> Tensor:
        """Returns this rank's positions in the sequence, padded to a length that every peer's layout divides."""
        unit = 2 * self.world
        chunks_per_rank = 2 if layout == "zigzag" else 1
        return Layout(layout, self.world, chunks_per_rank).positions(self.rank, -(-self.length // unit) * unit)

    def needs_cuda(self, name: str) -> None:
        """Raises ValueError on a CPU, for peers without CPU kernels."""
        if not self.on_gpu:
            raise ValueError(f"{name} needs a CUDA device")

    def tflops_per_gpu(self, ranks: int, seconds: float) -> float:
        """Returns TFLOP/s of forward and backward, counting visible pairs only and the backward as 2.5 forwards."""
        if self.parents is None:
            sizes = [b - a for a, b in pairwise(self.nodes.boundaries)]
            windows = [size if self.window is None else min(self.window, size) for size in sizes]
            area = sum(window * size - window**2 / 2 for window, size in zip(windows, sizes, strict=True))
        else:
            area = float(self.nodes.area_before(np.array([self.length]))[0])
        return 3.5 * 2 * area * self.heads * (self.head_dim + self.values) / ranks / seconds / 1e12


@dataclass(frozen=True)
class Layer:
    """An implementation on this rank: its token positions and a differentiable function of q, k, v.

    `facts` go into the record. `ranks` is the number of ranks that share the sequence: the group's size or 1.
    """

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    positions: Tensor  # of local tokens in the whole sequence, including padding
    ranks: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    heads_first: bool = False  # inputs and output are (B, H, S, D) instead of (B, S, H, D)
    buffer_bytes: Callable[[], int] = lambda: 0  # device memory that torch does not count as allocated


class Skipped(Exception):
    """Error for a point that cannot be measured, with the reason. Raised on all ranks."""


class Disagreement(Exception):
    """Error for a failure of some ranks inside a layer, after which the other ranks hang."""


def together(case: Case, action: Callable[[], T], fatal_if_split: bool = False) -> T:
    """Runs `action` on every rank of the group. Raises Skipped on all ranks if it fails on any.

    With `fatal_if_split`, `action` exchanges messages, and a failure on only some ranks raises Disagreement. Ranks
    report over gloo, which works even if a device is stuck.
    """
    reason, result = None, None
    try:
        result = action()
    except Exception as error:  # peers may raise anything, and the run must go on
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
    """Frees memory of earlier points and resets the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def time_layer(layer: Layer, case: Case, flags: argparse.Namespace) -> dict[str, Any]:
    """Returns times of the slowest rank and memory of the fullest rank."""
    clear(case.device)
    step = together(case, lambda: make_step(layer, case))
    together(case, step, fatal_if_split=True)  # only launched, so out-of-memory errors appear before any rank waits

    def warm_up() -> float:
        for _ in range(flags.warmup - 1):
            step()
        return sum(run(step, 1, case))

    with synchronized_gc():  # as in training; garbage collection on one rank would delay all
        each = max(gathered(case, together(case, warm_up, fatal_if_split=True)))
        repeats = max(MIN_REPEATS, min(flags.repeats, int(flags.seconds / max(each, 1e-9))))
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
    """Returns a function that runs forward and backward on random inputs of this rank's shape."""
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
    """Returns this rank's seconds per repeat. An all-reduce makes all ranks start each repeat together.

    The host runs at most one repeat ahead, which hides launches as in training and bounds memory.
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
