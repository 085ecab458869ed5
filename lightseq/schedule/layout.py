"""Which tokens of a sequence live on which rank, and the global position of every local token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

LayoutKind = Literal["contiguous", "zigzag", "striped", "balanced"]
LAYOUT_KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)


@dataclass(frozen=True)
class Layout:
    """The sequence is cut into `chunk_count` chunks of equal length; every rank holds `chunks_per_rank` of them.

    contiguous: rank r holds neighbouring chunks. zigzag: rank r holds chunk r and its mirror image 2·world-1-r, so
    that every rank has as much causal work as any other (Llama 3 technical report, §3.3.2). striped: chunk r holds the
    tokens r, r + world, r + 2·world, … (Striped Attention, arXiv 2311.09431). balanced: `homes` names the rank of every
    chunk, as many for each, which packed documents need: their work depends on where they begin.

    Where heads too are split, `ulysses` neighbouring ranks take one place in that order together, and each of its
    chunks is cut once more, into one piece for each of them.
    """

    kind: LayoutKind
    world: int
    chunks_per_rank: int = 1
    ulysses: int = 1
    homes: tuple[int, ...] = ()  # balanced: by chunk; the places, where several ranks share one

    def __post_init__(self) -> None:
        if self.kind not in LAYOUT_KINDS:
            raise ValueError(f"layout {self.kind!r} is unknown; choose one of {', '.join(LAYOUT_KINDS)}")
        if self.world < 1:
            raise ValueError(f"a layout needs at least one rank, not {self.world}")
        if self.world % self.ulysses:
            raise ValueError(f"{self.world} ranks do not divide into groups of {self.ulysses} that share heads")
        if self.kind == "zigzag":
            assert self.chunks_per_rank == 2, "zigzag pairs a chunk with its mirror image"
        if self.kind == "striped":
            assert self.chunks_per_rank == 1, "striped has one chunk a rank"
        if self.kind == "balanced":
            held = [self.homes.count(place) for place in range(self.world // self.ulysses)]
            assert {*held} == {self.chunks_per_rank}, f"{held} chunks a rank, not {self.chunks_per_rank} each"

    @property
    def chunk_count(self) -> int:
        return self.world * self.chunks_per_rank

    @cached_property
    def outer(self) -> "Layout":
        """The layout of the places, each of which `ulysses` ranks share."""
        return replace(self, world=self.world // self.ulysses, ulysses=1)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order in which they lie in its local tensors."""
        if self.ulysses > 1:
            place, piece = divmod(rank, self.ulysses)
            return tuple(chunk * self.ulysses + piece for chunk in self.outer.chunks(place))
        if self.kind == "zigzag":
            return (rank, 2 * self.world - 1 - rank)
        if self.kind == "balanced":
            return tuple(chunk for chunk, home in enumerate(self.homes) if home == rank)
        return tuple(range(rank * self.chunks_per_rank, (rank + 1) * self.chunks_per_rank))

    def home(self, chunk: int) -> int:
        """The rank that holds a chunk."""
        if self.ulysses > 1:
            whole, piece = divmod(chunk, self.ulysses)
            return self.outer.home(whole) * self.ulysses + piece
        if self.kind == "zigzag":
            return min(chunk, 2 * self.world - 1 - chunk)
        if self.kind == "balanced":
            return self.homes[chunk]
        return chunk // self.chunks_per_rank

    def padded_length(self, length: int) -> int:
        """The next length that divides into equal chunks. Causal attention never looks at padding on the right."""
        return -(-length // self.chunk_count) * self.chunk_count

    def chunk_positions(self, chunk: int, length: int) -> Tensor:
        """Global positions of one chunk's tokens, int64, for a padded length."""
        assert length % self.chunk_count == 0, f"length {length} is not padded to a multiple of {self.chunk_count}"
        if self.ulysses > 1:
            whole, piece = divmod(chunk, self.ulysses)
            return self.outer.chunk_positions(whole, length).chunk(self.ulysses)[piece]
        first, step, count = self.chunk_range(chunk, length)
        return torch.arange(first, first + step * count, step)

    def chunk_range(self, chunk: int, length: int) -> tuple[int, int, int]:
        """The global positions of one chunk's tokens, where places are not shared: the first, the step, how many."""
        assert self.ulysses == 1, "a piece of a place's chunk has no progression of its own"
        size = length // self.chunk_count
        return (chunk, self.world, size) if self.kind == "striped" else (chunk * size, 1, size)

    def positions(self, rank: int, length: int) -> Tensor:
        """Global position of every local token, int64 (length / world,): ids, labels, RoPE and masks follow from it."""
        return torch.cat([self.chunk_positions(chunk, length) for chunk in self.chunks(rank)])


def shard(
    x: Tensor, layout: Layout, rank: int, dim: int = 1, fill: float = 0, padded_length: int | None = None
) -> Tensor:
    """One rank's part of a whole tensor, padded on the right with `fill` where the length does not divide, or is less.

    `padded_length` divides into the layout's chunks.
    """
    missing = (padded_length or layout.padded_length(x.shape[dim])) - x.shape[dim]
    if missing:
        padding = [size if d != dim % x.ndim else missing for d, size in enumerate(x.shape)]
        x = torch.cat([x, x.new_full(padding, fill)], dim)
    return x.index_select(dim, layout.positions(rank, x.shape[dim]).to(x.device))


def unshard(parts: Sequence[Tensor], layout: Layout, length: int, dim: int = 1) -> Tensor:
    """The whole tensor from every rank's part, padding cut off: the inverse of `shard`."""
    padded = layout.padded_length(length)
    order = torch.cat([layout.positions(rank, padded) for rank in range(layout.world)]).argsort()
    return torch.cat(list(parts), dim).index_select(dim, order.to(parts[0].device)).narrow(dim, 0, length)
