"""GPU memory of distributed attention, counted by running its executor on meta tensors.

The memory is proportional to a rank's tokens, so one short run gives it for every length.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightseq.attention.executor import Executor
from lightseq.attention.gathered import Gathered, gathered_elements
from lightseq.comm.transport import Outbox
from lightseq.comm.transport_choice import NoTransport
from lightseq.kernels.attention.base import GradientMemory, KernelSpec, Saved, gradient_memory
from lightseq.kernels.fused.launches import Launches
from lightseq.parts.facts import Heads
from lightseq.schedule.algorithms import make_schedule, ulysses_group_size
from lightseq.schedule.auto import ScheduleChoice
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.windows import windowed_schedule

CHUNK_TOKENS = 512  # tokens per chunk in a counted run
MAX_FLASH_DIM = 256  # largest head that flash kernels take
SCORE_BLOCK_BYTES = 1.2e9  # the kernel cublas at any length (benchmarks/results/attention-2xh100-other-heads.jsonl)
MAX_RING = 16  # ranks of the largest ring that is counted; larger rings are extrapolated from two smaller ones


def takes_cublas(kernel_name: str, capability: tuple[int, int], head_dim: int) -> bool:
    """Returns whether the cublas kernel computes attention: flash kernels need Ampere, and heads that fit them."""
    before_ampere = kernel_name == "auto" and capability < (8, 0)
    return kernel_name == "cublas" or before_ampere or head_dim > MAX_FLASH_DIM


class AttentionMemory(NamedTuple):
    """Bytes per local token on the rank that needs most."""

    buffers: float  # mapped by peers
    backward: float  # in addition to out, lse, dout, and q, k and v or the gathered tensors


@lru_cache(maxsize=512)
def attention_memory(
    choice: ScheduleChoice,
    world: int,
    heads: Heads,
    itemsize: int,
    keep_gathered: bool = False,
    window_share: float | None = None,
) -> AttentionMemory:
    """Counts a layer's memory. `window_share` is its sliding window over the length of the sequence."""
    ulysses = ulysses_group_size(choice.schedule, world, choice.ulysses_size)
    ring = world // ulysses
    if ring <= MAX_RING:
        return _count(choice, world, heads, itemsize, keep_gathered, window_share)
    low, high = (
        attention_memory(choice, ulysses * ranks, heads, itemsize, window_share=window_share)
        for ranks in (MAX_RING // 2, MAX_RING)
    )
    steps = (ring - MAX_RING) / (MAX_RING - MAX_RING // 2)
    return AttentionMemory(*(b + (b - a) * steps for a, b in zip(low, high, strict=True)))


def _count(
    choice: ScheduleChoice, world: int, heads: Heads, itemsize: int, keep_gathered: bool, window_share: float | None
) -> AttentionMemory:
    table = make_schedule(choice.schedule, world, choice.head_groups or 1, choice.ulysses_size)
    local = CHUNK_TOKENS * table.layout.chunks_per_rank
    if window_share is not None:
        length = local * world
        table = windowed_schedule(table, Nodes((0, length)), max(1, round(window_share * length)), packed=False)
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    query, key, dim, value_dim = heads.query, heads.key_value, heads.dim, heads.value_dim
    shapes = ((query, dim), (key, dim), (key, value_dim), (query, value_dim))
    q, k, v, out = (torch.empty(1, local, *shape, dtype=dtype, device="meta") for shape in shapes)
    lse = torch.empty(1, heads.query, local, device="meta")
    gathered: Gathered | None = None
    if keep_gathered and table.can_keep_gathered:
        memory = torch.empty(gathered_elements(table, q, v), dtype=dtype, device="meta")
        table, gathered = table.with_gathered_backward, Gathered(memory, key, dim)
    kernel, counts = _MetaKernel(), []
    for rank in sorted({0, world // 2, world - 1}):
        transport = _MetaTransport()
        Executor(table, rank, kernel, transport, 1.0).forward(q, k, v, gathered)
        with LiveBytes() as backward:
            Executor(table, rank, kernel, transport, 1.0).backward(out, gathered or (q, k, v), out, lse)
        counts.append((transport.largest_outbox, backward.peak))
    return AttentionMemory(*(max(column) / local for column in zip(*counts, strict=True)))


class LiveBytes(TorchDispatchMode):
    """Counter of the peak of the bytes of live tensors that were allocated under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._live = 0, weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self._live |= _storages(result) - _storages((args, kwargs))
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._live))
        return result


def _storages(tree: Any) -> set[torch.UntypedStorage]:
    return {x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)}


class _MetaKernel:
    """Kernel without arithmetic, which allocates what flash kernels do.

    Their backward pass has a workspace in float32: dq, and dk and dv too if query heads share key/value heads.
    """

    name = "meta"
    causal_alignment: Literal["bottom_right"] = "bottom_right"
    has_windows = True

    def why_unavailable(self, spec: KernelSpec) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        batch, length, heads, _ = q.shape
        out = torch.empty(batch, length, heads, v.shape[3], dtype=q.dtype, device="meta") if into is None else into
        return out, torch.empty(batch, heads, length, device="meta")

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, *_ = saved
        in_float32 = [q] if q.shape[2] == k.shape[2] else [q, k, v]
        if q.shape[3] > MAX_FLASH_DIM:
            in_float32 = [k, v]  # dk and dv, which the cublas kernel sums in float32
        workspace = [torch.empty(x.shape, dtype=torch.float32, device="meta") for x in in_float32]
        dq, dk, dv = gradient_memory(into, saved)
        del workspace
        return dq, dk, dv


class _NoLaunches(Launches):
    """Launches that skip copies and sums, which allocate nothing on a GPU."""

    def copy(self, key: Any, build: Any) -> None: ...

    def add(self, key: Any, build: Any, overwrite: bool) -> None: ...


class _MetaTransport(NoTransport):
    """Transport that records its largest outbox. `LiveBytes` does not count outboxes, because peers map them."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.largest_outbox = 0

    @contextmanager
    def outbox(self, size: int) -> Iterator[Outbox]:
        self.largest_outbox = max(self.largest_outbox, size)
        with torch.utils._python_dispatch._disable_current_modes():
            memory = torch.empty(size, dtype=torch.uint8, device="meta")
        yield Outbox(memory, {Launches: _NoLaunches})
