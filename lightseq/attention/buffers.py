"""How tensors lie while they travel: rows first, then batch, then the heads of all tensors of an item side by side.

So a chunk is one piece of memory, and neighbouring chunks are one tensor that kernels read in place.
Shape suffixes: B batch, S local sequence, R rows of a chunk, N heads, D head dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightseq.schedule.table import Schedule

Bundle = tuple[Tensor, ...]  # packed: (rows, B, tensors x heads, D) and perhaps the lse (chunks, B, heads, R)


@dataclass(frozen=True)
class Form:
    """One chunk and head group of an item. `lse` is the dtype of the log-sum-exp that comes along, if one does."""

    tensors: int
    heads: int  # of one tensor in one group
    groups: int  # fewer than the schedule's where several groups of queries share key/value heads
    chunks: int  # on one rank
    rows: int
    batch: int
    dim: int
    dtype: torch.dtype
    lse: torch.dtype | None = None

    @property
    def chunk_bytes(self) -> int:
        lse = self.rows * self.batch * self.heads * self.lse.itemsize if self.lse else 0
        return self._main_bytes + lse

    @property
    def _main_bytes(self) -> int:
        """Of one chunk without its lse, which begins at an address that its dtype divides."""
        size, unit = math.prod(self.packed_shape(1)) * self.dtype.itemsize, 8
        if self.lse is None:
            return size
        unit = max(unit, self.lse.itemsize)
        return -(-size // unit) * unit

    @property
    def staged_chunks(self) -> int:
        """Chunks and head groups of one rank: what `stage` writes."""
        return self.groups * self.chunks

    def packed_shape(self, chunks: int) -> tuple[int, int, int, int]:
        return chunks * self.rows, self.batch, self.tensors * self.heads, self.dim

    def lse_shape(self, chunks: int) -> tuple[int, int, int, int]:
        return chunks, self.batch, self.heads, self.rows

    def packed(self, memory: Tensor, chunks: int) -> Bundle:
        """`chunks` neighbouring chunks in the first bytes of `memory` (uint8)."""
        shape = self.packed_shape(chunks)
        x = memory[: math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)
        if self.lse is None:
            return (x,)
        lse = memory[chunks * self._main_bytes : chunks * self.chunk_bytes].view(self.lse)
        return x, lse.view(self.lse_shape(chunks))

    def empty(self, chunks: int, device: torch.device) -> Bundle:
        """Memory for that many neighbouring chunks."""
        x = torch.empty(self.packed_shape(chunks), dtype=self.dtype, device=device)
        if self.lse is None:
            return (x,)
        return x, torch.empty(self.lse_shape(chunks), dtype=self.lse, device=device)

    def whole(self, device: torch.device, dtype: torch.dtype) -> Bundle:
        """Memory for a rank's own tensors (B, S, N, D), and for their lse (B, N, S) if one comes along."""
        length, heads = self.chunks * self.rows, self.groups * self.heads
        shape = (self.batch, length, heads, self.dim)
        tensors = [torch.empty(shape, dtype=dtype, device=device) for _ in range(self.tensors)]
        lse = [torch.empty(self.batch, heads, length, dtype=self.lse, device=device)] if self.lse else []
        return (*tensors, *lse)

    def slots(self, bundle: Bundle, start: int, count: int) -> Bundle:
        """Some neighbouring chunks of a packed bundle."""
        if count * self.rows == bundle[0].shape[0]:
            return bundle
        x = bundle[0].narrow(0, start * self.rows, count * self.rows)
        return (x, *(lse.narrow(0, start, count) for lse in bundle[1:]))

    def split(self, bundle: Bundle) -> list[Bundle]:
        """Every chunk of a packed bundle."""
        count = bundle[0].shape[0] // self.rows
        return list(zip(*(x.chunk(count) for x in bundle), strict=True))

    def unpacked(self, bundle: Bundle) -> Bundle:
        """The tensors of a packed bundle as views (B, S, N, D); the lse (B, N, S) of several chunks is a copy."""
        x = bundle[0].transpose(0, 1)
        parts = x.chunk(self.tensors, 2) if self.tensors > 1 else (x,)
        return (*parts, *(lse.permute(1, 2, 0, 3).flatten(2) for lse in bundle[1:]))

    def stage(self, into: Bundle, tensors: Bundle) -> list[tuple[Tensor, Tensor]]:
        """The copies (to, from) of a rank's own tensors (B, S, N, D), lse (B, N, S) into a bundle.

        It then holds the first head group's chunks, then the next one's.
        """
        copies = []
        for g in range(self.groups):
            packed = self.slots(into, g * self.chunks, self.chunks)
            mine = self.local(tensors, 0, self.chunks, g)
            copies += list(zip(self.unpacked(packed[:1]), mine, strict=False))
            for c in range(self.chunks if self.lse else 0):
                copies.append((packed[1][c], mine[-1].narrow(2, c * self.rows, self.rows)))
        return copies

    def local(self, tensors: Bundle, start: int, count: int, group: int) -> Bundle:
        """Neighbouring chunks and one head group of a rank's own tensors, as views."""
        found = []
        for x in tensors:
            of_rows, of_heads = (1, 2) if x.ndim == 4 else (2, 1)
            if count < self.chunks:
                x = x.narrow(of_rows, start * self.rows, count * self.rows)
            found.append(x if self.groups == 1 else x.narrow(of_heads, group * self.heads, self.heads))
        return tuple(found)


def form(
    schedule: Schedule, shape: Sequence[int], dtype: torch.dtype, tensors: int = 1, lse: torch.dtype | None = None
) -> Form:
    """The form of an item of so many of a rank's own tensors, all (B, S, N, D), and their lse (B, N, S), if any."""
    batch, length, heads, dim = shape
    groups = schedule.head_groups if heads % schedule.head_groups == 0 else heads
    chunks = schedule.layout.chunks_per_rank
    return Form(tensors, heads // groups, groups, chunks, length // chunks, batch, dim, dtype, lse)
