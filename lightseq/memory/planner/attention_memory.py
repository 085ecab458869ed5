"""Device memory that distributed attention takes on a rank: its own executor runs on tensors without memory.

What it makes is counted as it is made and freed. All of it is in proportion to the tokens of a rank, so that one run of
few tokens stands for every length.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightseq.attention.executor import Executor
from lightseq.attention.gathered import Gathered, gathered_elements
from lightseq.comm.select import NoTransport
from lightseq.comm.transport import Outbox
from lightseq.kernels.elided import Elided
from lightseq.kernels.flash_attn import FlashAttention4
from lightseq.kernels.launches import Launches
from lightseq.schedule.algorithms import make_schedule, ulysses_group_size
from lightseq.schedule.auto import ScheduleChoice

TOKENS = 512  # of a chunk in the run that is counted
MOST_PLACES = 16  # of a table that is made; beyond, two smaller ones are drawn out as a line


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes for every local token."""

    buffers: float  # that peers map
    forward: float  # on top of q, k and v; what it returns is among it
    backward: float  # on top of out, lse, their gradient, and q, k and v or what is kept in their place


@lru_cache(maxsize=512)
def attention_memory(
    choice: ScheduleChoice, world: int, heads: int, kv_heads: int, dim: int, element: int, keep_gathered: bool = False
) -> AttentionMemory:
    """Of the rank that takes most."""
    ulysses = ulysses_group_size(choice.schedule, world, choice.ulysses_size)
    places = world // ulysses
    if places <= MOST_PLACES:
        return _counted(choice, world, heads, kv_heads, dim, element, keep_gathered)
    low, high = (
        attention_memory(choice, ulysses * n, heads, kv_heads, dim, element) for n in (MOST_PLACES // 2, MOST_PLACES)
    )
    further = (places - MOST_PLACES) / (MOST_PLACES - MOST_PLACES // 2)
    drawn = [b + (b - a) * further for a, b in zip(vars(low).values(), vars(high).values(), strict=True)]
    return AttentionMemory(*drawn)


def _counted(
    choice: ScheduleChoice, world: int, heads: int, kv_heads: int, dim: int, element: int, keep_gathered: bool
) -> AttentionMemory:
    table = make_schedule(choice.schedule, world, choice.head_groups or 1, choice.ulysses_size)
    layout = table.layout
    local = TOKENS * layout.chunks_per_rank
    dtype = {2: torch.bfloat16, 4: torch.float32}[element]
    q, k, v = (torch.empty(1, local, n, dim, dtype=dtype, device="meta") for n in (heads, kv_heads, kv_heads))
    out, lse = torch.empty_like(q), torch.empty(1, heads, local, device="meta")
    kernel, found = Elided(FlashAttention4()), []
    kept: Gathered | None = None
    if keep_gathered and table.can_keep_gathered:
        size = gathered_elements(table, q, kv_heads)
        table, kept = table.keeping_gathered, Gathered(torch.empty(size, dtype=dtype, device="meta"), kv_heads)
    for rank in sorted({0, world // 2, world - 1}):
        carrier = _Counting()
        with _Live() as forward:
            Executor(table, rank, kernel, carrier, 1.0).forward(q, k, v, kept)
        with _Live() as backward:
            Executor(table, rank, kernel, carrier, 1.0).backward(out, kept or (q, k, v), out, lse)
        found.append((carrier.largest, forward.peak + (kept.memory.nbytes if kept else 0), backward.peak))
    return AttentionMemory(*(max(column) / local for column in zip(*found, strict=True)))


class _Live(TorchDispatchMode):
    """Bytes of the tensors made under it that are still there, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = op(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in known | self._seen:
                self._seen.add(key)
                self.now += x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self._freed, key, x.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


class _Silent(Launches):
    """Copies and sums are single kernels on a GPU, which take no memory."""

    def copy(self, key: Any, build: Any) -> None: ...

    def add(self, key: Any, build: Any, fresh: bool) -> None: ...


class _Counting(NoTransport):
    """Its outbox counts as what peers map, and not as what is made."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.largest = 0

    @contextmanager
    def outbox(self, size: int) -> Iterator[Outbox]:
        self.largest = max(self.largest, size)
        with torch.utils._python_dispatch._disable_current_modes():
            memory = torch.empty(size, dtype=torch.uint8, device="meta")
        yield Outbox(memory, {Launches: _Silent})
