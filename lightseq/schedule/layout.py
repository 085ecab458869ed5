"""Layouts of a sequence over ranks, and the global position of every local token.

Loads without torch, so that the command line knows the names of schedules without delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from lightseq.utils.tensors import upload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LayoutKind = Literal["contiguous", "zigzag", "striped", "explicit"]
MAX_FRAGMENTS = 4  # most on a rank where layers carry a state: each sends a message of the same size
LAYOUT_KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)


@dataclass(frozen=True)
class Layout:
    """A sequence cut into `chunk_count` chunks of equal length, `chunks_per_rank` of them on every rank.

    contiguous: rank r holds neighbouring chunks. zigzag: rank r holds chunk r and its mirror image 2·world-1-r, so
    that every rank has as much causal work as any other (Llama 3 technical report, §3.3.2). striped: chunk r holds the
    tokens r, r + world, r + 2·world, … (Striped Attention, arXiv 2311.09431). explicit: `chunk_groups` places each
    chunk, with equally many on every rank. Packed documents need it, because their work depends on where they begin;
    windows cut chunks into pieces with it.

    A Ulysses group is `ulysses` neighbouring ranks that together compute attention for the same chunks, each for its
    own heads. Outside attention each of these chunks is cut into one piece for each rank of the group. With
    `ulysses` 1 every rank is a group of its own.
    """

    kind: LayoutKind
    world: int
    chunks_per_rank: int = 1
    ulysses: int = 1
    chunk_groups: tuple[int, ...] = ()  # explicit: the Ulysses group of each of its chunks
    most_packed_chunks: int = 32  # most on a rank in layouts that balance packed documents

    def __post_init__(self) -> None:
        if self.kind not in LAYOUT_KINDS:
            raise ValueError(f"layout {self.kind!r} is unknown; choose one of {', '.join(LAYOUT_KINDS)}")
        if self.world < 1:
            raise ValueError(f"a layout needs at least one rank, not {self.world}")
        if self.world % self.ulysses:
            raise ValueError(f"{self.world} ranks do not divide into Ulysses groups of {self.ulysses}")
        if self.kind == "zigzag":
            assert self.chunks_per_rank == 2, "zigzag pairs a chunk with its mirror image"
        if self.kind == "striped":
            assert self.chunks_per_rank == 1, "striped has one chunk per rank"
        if self.kind == "explicit":
            held = [self.chunk_groups.count(group) for group in range(self.world // self.ulysses)]
            assert {*held} == {self.chunks_per_rank}, f"{held} chunks per rank, not {self.chunks_per_rank} each"

    @property
    def chunk_count(self) -> int:
        """Chunks on all ranks."""
        return self.world * self.chunks_per_rank

    @cached_property
    def group_layout(self) -> Layout:
        """Layout of the Ulysses groups, in which each group counts as one rank."""
        return replace(self, world=self.world // self.ulysses, ulysses=1)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Returns the chunks of a rank, in the order of its local tensors."""
        if self.ulysses > 1:
            group, piece = divmod(rank, self.ulysses)
            return tuple(chunk * self.ulysses + piece for chunk in self.group_layout.chunks(group))
        if self.kind == "zigzag":
            return (rank, 2 * self.world - 1 - rank)
        if self.kind == "explicit":
            return tuple(chunk for chunk, group in enumerate(self.chunk_groups) if group == rank)
        return tuple(range(rank * self.chunks_per_rank, (rank + 1) * self.chunks_per_rank))

    def home(self, chunk: int) -> int:
        """Returns the rank that holds a chunk."""
        if self.ulysses > 1:
            whole, piece = divmod(chunk, self.ulysses)
            return self.group_layout.home(whole) * self.ulysses + piece
        if self.kind == "zigzag":
            return min(chunk, 2 * self.world - 1 - chunk)
        if self.kind == "explicit":
            return self.chunk_groups[chunk]
        return chunk // self.chunks_per_rank

    def padded_length(self, length: int) -> int:
        """Returns the next length that divides into equal chunks. No causal query sees padding on the right."""
        return -(-length // self.chunk_count) * self.chunk_count

    def chunk_positions(self, chunk: int, length: int) -> Tensor:
        """Returns the global positions of one chunk's tokens, int64, for a padded length."""
        import torch

        assert length % self.chunk_count == 0, f"length {length} is not padded to a multiple of {self.chunk_count}"
        if self.ulysses > 1:
            whole, piece = divmod(chunk, self.ulysses)
            return self.group_layout.chunk_positions(whole, length).chunk(self.ulysses)[piece]
        first, step, count = self.chunk_range(chunk, length)
        return torch.arange(first, first + step * count, step)

    def chunk_range(self, chunk: int, length: int) -> tuple[int, int, int]:
        """Returns first, step and count of the global positions of one chunk. Needs `ulysses` 1: use `group_layout`."""
        assert self.ulysses == 1, "a piece of a striped chunk has no range of its own"
        size = length // self.chunk_count
        return (chunk, self.world, size) if self.kind == "striped" else (chunk * size, 1, size)

    def fragments_per_rank(self, local: int) -> int:
        """Returns how many runs of neighbouring tokens a rank's `local` tokens form: chunks, or tokens if striped."""
        is_scattered = self.kind == "striped" and self.world > self.ulysses
        return local if is_scattered else self.chunks_per_rank

    def positions(self, rank: int, length: int) -> Tensor:
        """Returns the global position of every local token, int64 (length / world,).

        Ids, labels, RoPE and masks are indexed by it.
        """
        import torch

        return torch.cat([self.chunk_positions(chunk, length) for chunk in self.chunks(rank)])

    def positions_on(self, device: torch.device, rank: int, length: int) -> Tensor:
        """Returns `positions` on a device, without making the host wait for the device's earlier work."""
        return upload(self.positions(rank, length), device)


def shard(
    x: Tensor, layout: Layout, rank: int, dim: int = 1, fill: float = 0, padded_length: int | None = None
) -> Tensor:
    """Returns one rank's part of a whole tensor, padded on the right with `fill`.

    `padded_length` has to divide into the layout's chunks; the default is the next length that does.
    """
    import torch

    missing = (padded_length or layout.padded_length(x.shape[dim])) - x.shape[dim]
    if missing:
        padding = [size if d != dim % x.ndim else missing for d, size in enumerate(x.shape)]
        x = torch.cat([x, x.new_full(padding, fill)], dim)
    return x.index_select(dim, layout.positions_on(x.device, rank, x.shape[dim]))


def unshard(parts: Sequence[Tensor], layout: Layout, length: int, dim: int = 1) -> Tensor:
    """Joins every rank's part and cuts the padding off: the inverse of `shard`."""
    import torch

    padded = layout.padded_length(length)
    order = torch.cat([layout.positions(rank, padded) for rank in range(layout.world)]).argsort()
    return torch.cat(list(parts), dim).index_select(dim, order.to(parts[0].device)).narrow(dim, 0, length)
