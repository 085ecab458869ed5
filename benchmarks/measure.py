"""How one attention layer is timed on all ranks together, and what memory it takes.

Shapes: B batch, S sequence, H heads, D head dim.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from lightseq.kernels import KernelSpec
from lightseq.profiling.trace import gpu_breakdown, read_trace
from lightseq.training.gc_control import collected_together

T = TypeVar("T")
UNTRACED, TRACED = 2, 3  # repeats before and in a trace
EXCHANGE = ("attention's exchange", "collectives")  # of the kinds of what a device is busy with


@dataclass(frozen=True)
class Case:
    """One attention layer, and the group of ranks that shares its sequence."""

    length: int  # tokens of the whole sequence
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    boundaries: tuple[int, ...] = ()  # of packed documents: where each begins, and the end; none: one document

    @property
    def area(self) -> float:
        """Half the square of the length, of each document where there are several."""
        edges = self.boundaries or (0, self.length)
        return sum((b - a) ** 2 for a, b in pairwise(edges)) / 2

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def spec(self) -> KernelSpec:
        on_gpu = self.device.type == "cuda"
        capability = torch.cuda.get_device_capability(self.device) if on_gpu else (0, 0)
        return KernelSpec(self.device.type, capability, self.dtype, self.head_dim, packed=bool(self.boundaries))

    def shapes(self, tokens: int) -> list[tuple[int, ...]]:
        """(B, S, heads, D) of q, k, v and the output's gradient."""
        return [(self.batch, tokens, h, self.head_dim) for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)]


@dataclass(frozen=True)
class Layer:
    """An implementation set up on this rank: which tokens it wants here, and a differentiable function of q, k and v.

    `facts` are what the record says of it beyond the case. `ranks` share the sequence: all of the group, or this alone.
    """

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    positions: Tensor  # of every local token in the whole sequence, padding included
    ranks: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    heads_first: bool = False  # takes and gives (B, H, S, D), not (B, S, H, D)
    buffer_bytes: Callable[[], int] = lambda: 0  # device memory held that torch does not count as allocated

    def ordered(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        batch, tokens, heads, dim = shape
        return (batch, heads, tokens, dim) if self.heads_first else shape


@dataclass(frozen=True)
class Effort:
    """How long one point may take: about `seconds`, but never fewer than `least` nor more than `most` repeats."""

    warmup: int
    least: int
    most: int
    seconds: float

    def repeats(self, seconds_each: float) -> int:
        return max(self.least, min(self.most, int(self.seconds / max(seconds_each, 1e-9))))


class Skipped(Exception):
    """This point cannot be measured here; the message says why. Raised on all ranks alike."""


class Disagreement(Exception):
    """Some ranks failed in the middle of a layer and others did not: what those wait for will never arrive."""


def together(case: Case, action: Callable[[], T], fatal_if_split: bool = False) -> T:
    """`action()` on every rank of the group; Skipped on all of them if it raised on any.

    `fatal_if_split`: ranks exchange messages in it, so that a failure on some only is a Disagreement. The ranks compare
    notes on the host (gloo), past whatever may be stuck on a device.
    """
    reason, result = None, None
    try:
        result = action()
    except Exception as error:  # a peer may raise anything, and none of it may end the run
        reason = one_line(error)
    reasons: list[str | None] = [None] * case.world
    dist.all_gather_object(reasons, reason, group=case.group)
    failed = [said for said in reasons if said is not None]
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


def tflops_per_gpu(case: Case, ranks: int, seconds: float) -> float:
    """Forward and backward, the causal half counted once, the backward as 2.5 forwards."""
    forward = 4 * case.area * case.heads * case.head_dim * case.batch
    return 3.5 * forward / ranks / seconds / 1e12


# ---- time and memory ------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Marks moments in the order of the device's work, without making the host wait for it."""

    def mark(self) -> Any: ...

    def wait(self, mark: Any) -> None: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3


CLOCKS: dict[str, Callable[[], Clock]] = {"cuda": DeviceClock, "cpu": HostClock}


def time_layer(layer: Layer, case: Case, effort: Effort, seed: int) -> dict[str, Any]:
    """The record's times and memory of one layer; the slowest rank's time of each repeat, the largest rank's memory."""
    clear(case.device)
    step = together(case, lambda: make_step(layer, case, seed))
    together(case, step, fatal_if_split=True)  # only launched: who cannot allocate says so before anyone waits for him

    def warm_up() -> float:
        for _ in range(effort.warmup - 1):
            step()
        return sum(run(step, 1, case))

    with collected_together():  # as in training; one rank that looks for cycles of objects makes all others wait
        each = max(gathered(case, together(case, warm_up, fatal_if_split=True)))
        slowest = together(case, lambda: run(step, effort.repeats(each), case), fatal_if_split=True)
    seconds = [max(repeat) for repeat in zip(*gathered(case, slowest), strict=True)]
    on_gpu = case.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(case.device) + layer.buffer_bytes() if on_gpu else 0
    median = statistics.median(seconds)
    return {
        "seconds_median": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "repeats": len(seconds),
        "tflops_per_gpu": tflops_per_gpu(case, layer.ranks, median),
        "peak_memory_bytes": max(gathered(case, peak)) if on_gpu else None,
    }


def make_step(
    layer: Layer, case: Case, seed: int, around: Callable[[str], AbstractContextManager[Any]] = nullcontext
) -> Callable[[], None]:
    """Forward and backward over random inputs of this rank's shape, as autograd runs them."""
    generator = torch.Generator(case.device).manual_seed(seed + case.rank)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device=case.device, dtype=case.dtype)
        for shape in map(layer.ordered, case.shapes(len(layer.positions)))
    )
    for x in (q, k, v):
        x.requires_grad_()

    def step() -> None:
        with around("forward"):
            out = layer.attend(q, k, v)
        with around("backward"):
            torch.autograd.grad(out, (q, k, v), dout)

    return step


def run(step: Callable[[], None], repeats: int, case: Case) -> list[float]:
    """Seconds of each repeat on this rank. All ranks start each one at the same moment of their devices' work.

    The host stays at most one repeat ahead: it hides its own work as in training, and piles no memory up.
    """
    clock = CLOCKS[case.device.type]()
    token = torch.zeros(1, device=case.device)
    marks: list[tuple[Any, Any]] = []
    for i in range(repeats):
        if i >= 2:
            clock.wait(marks[i - 2][1])
        dist.all_reduce(token, group=case.group)
        start = clock.mark()
        step()
        marks.append((start, clock.mark()))
    return [clock.seconds(start, end) for start, end in marks]


def trace_layer(layer: Layer, case: Case, seed: int, directory: Path) -> dict[str, Any]:
    """Traces some repeats on every rank, as `python3 -m analysis profile DIRECTORY` reads them.

    On a GPU milliseconds of rank 0's exchange, once where kernels hide it and once where nothing else runs.
    """
    step = make_step(layer, case, seed, record_function)
    for _ in range(UNTRACED):
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if case.device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for number in range(1, TRACED + 1):
            with record_function(f"step {number}"):
                step()
        if case.device.type == "cuda":
            torch.cuda.synchronize(case.device)
    file = directory / "profile" / f"rank{case.rank}.json.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))
    found: dict[str, Any] = {"trace": str(directory)}
    if case.rank == 0 and case.device.type == "cuda":
        account = gpu_breakdown(read_trace(file))
        exposed = sum(ms for (kind, _), ms in account.spent.items() if kind in EXCHANGE)
        hidden = sum(account.hidden[kind] for kind in EXCHANGE)
        found |= {"traced_ms": account.step_ms, "exchange_exposed_ms": exposed, "exchange_hidden_ms": hidden}
    return found


def gathered(case: Case, mine: T) -> list[T]:
    every: list[Any] = [None] * case.world
    dist.all_gather_object(every, mine, group=case.group)
    return every


def clear(device: torch.device) -> None:
    """What earlier points left behind goes, so that the peak is this point's own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
