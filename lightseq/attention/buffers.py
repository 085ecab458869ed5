"""Memory layout of tensors that travel between ranks.

Rows come first, then batch, then the heads of all tensors of an item side by side. A chunk is therefore contiguous, and
neighbouring chunks form one tensor that kernels read in place. Values may have another dimension than keys.

Shape suffixes: B batch, S local sequence, R rows of a chunk, N heads, D head dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightseq.schedule.table import Schedule

# The tensors of an item. Packed: (rows, B, heads x sum of dims), and the lse (chunks, B, heads, R) if the item has one.
Buffer = tuple[Tensor, ...]


@dataclass(frozen=True)
class BufferLayout:
    """Layout of one chunk and one head group of an item (q, kv, out, dq, dkv).

    An item is one or more tensors that differ in their head dimension only, and a log-sum-exp if `lse_dtype` is given.
    """

    dims: tuple[int, ...]  # head dimension of each tensor
    heads_per_group: int  # heads in one tensor
    head_groups: int  # fewer than the schedule's if groups share key/value heads (see `item_head_group`)
    chunk_count: int  # on one rank
    rows: int  # tokens of a chunk
    batch: int
    dtype: torch.dtype
    lse_dtype: torch.dtype | None = None

    @property
    def tensor_count(self) -> int:
        return len(self.dims)

    @cached_property
    def distinct_dims(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.dims))

    @cached_property
    def _widths(self) -> list[int]:
        return [self.heads_per_group * dim for dim in self.dims]

    @property
    def chunk_bytes(self) -> int:
        lse = self.rows * self.batch * self.heads_per_group * self.lse_dtype.itemsize if self.lse_dtype else 0
        return self._main_bytes + lse

    @property
    def _main_bytes(self) -> int:
        """Bytes of one chunk without its lse, rounded up to the alignment of the lse."""
        size, unit = math.prod(self.packed_shape(1)) * self.dtype.itemsize, 8
        if self.lse_dtype is None:
            return size
        unit = max(unit, self.lse_dtype.itemsize)
        return -(-size // unit) * unit

    @property
    def staged_chunks(self) -> int:
        """Chunks that `stage` writes: one rank's, once for every head group."""
        return self.head_groups * self.chunk_count

    def packed_shape(self, chunks: int) -> tuple[int, int, int]:
        return chunks * self.rows, self.batch, self.heads_per_group * sum(self.dims)

    def lse_shape(self, chunks: int) -> tuple[int, int, int, int]:
        return chunks, self.batch, self.heads_per_group, self.rows

    def packed(self, memory: Tensor, chunks: int) -> Buffer:
        """Returns the first bytes of `memory` (uint8) viewed as `chunks` neighbouring chunks."""
        shape = self.packed_shape(chunks)
        x = memory[: math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)
        if self.lse_dtype is None:
            return (x,)
        lse = memory[chunks * self._main_bytes : chunks * self.chunk_bytes].view(self.lse_dtype)
        return x, lse.view(self.lse_shape(chunks))

    def empty(self, chunks: int, device: torch.device) -> Buffer:
        """Allocates `chunks` neighbouring chunks."""
        x = torch.empty(self.packed_shape(chunks), dtype=self.dtype, device=device)
        if self.lse_dtype is None:
            return (x,)
        return x, torch.empty(self.lse_shape(chunks), dtype=self.lse_dtype, device=device)

    def whole(self, device: torch.device, dtype: torch.dtype) -> Buffer:
        """Allocates a rank's own tensors (B, S, N, D), and their lse (B, N, S) if the item has one."""
        length, heads = self.chunk_count * self.rows, self.head_groups * self.heads_per_group
        tensors = [torch.empty(self.batch, length, heads, dim, dtype=dtype, device=device) for dim in self.dims]
        lse = [torch.empty(self.batch, heads, length, dtype=self.lse_dtype, device=device)] if self.lse_dtype else []
        return (*tensors, *lse)

    def slots(self, buffer: Buffer, start: int, count: int) -> Buffer:
        """Returns `count` neighbouring chunks of a packed buffer as views."""
        if count * self.rows == buffer[0].shape[0]:
            return buffer
        x = buffer[0].narrow(0, start * self.rows, count * self.rows)
        return (x, *[lse.narrow(0, start, count) for lse in buffer[1:]])

    def split(self, buffer: Buffer) -> list[Buffer]:
        """Returns every chunk of a packed buffer as views."""
        count = buffer[0].shape[0] // self.rows
        return list(zip(*(x.chunk(count) for x in buffer), strict=True))

    def unpacked(self, buffer: Buffer) -> Buffer:
        """Returns the tensors of a packed buffer as views (B, S, N, D).

        The lse (B, N, S) of several chunks is a copy.
        """
        x, count = buffer[0].transpose(0, 1), len(self.dims)
        batch, rows, _ = x.shape
        parts: Sequence[Tensor]
        if len(self.distinct_dims) == 1:
            x = x.view(batch, rows, count * self.heads_per_group, self.dims[0])
            parts = x.chunk(count, 2) if count > 1 else (x,)
        else:
            split = zip(x.split_with_sizes(self._widths, 2), self.dims, strict=True)
            parts = [part.view(batch, rows, self.heads_per_group, dim) for part, dim in split]
        return (*parts, *[lse.permute(1, 2, 0, 3).flatten(2) for lse in buffer[1:]])

    def stage(self, into: Buffer, tensors: Buffer) -> list[tuple[Tensor, Tensor]]:
        """Returns the copies (to, from) that pack a rank's own tensors (B, S, N, D) and lse (B, N, S) into a buffer.

        The buffer then holds the first head group's chunks, then the next one's.
        """
        copies = []
        for g in range(self.head_groups):
            packed = self.slots(into, g * self.chunk_count, self.chunk_count)
            mine = self.local(tensors, 0, self.chunk_count, g)
            copies += list(zip(self.unpacked(packed[:1]), mine, strict=False))  # `mine` ends with the lse
            for c in range(self.chunk_count if self.lse_dtype else 0):
                copies.append((packed[1][c], mine[-1].narrow(2, c * self.rows, self.rows)))
        return copies

    def local(self, tensors: Buffer, start: int, count: int, head_group: int) -> Buffer:
        """Returns neighbouring chunks and one head group of a rank's own tensors as views."""
        if count < self.chunk_count:
            start, length = start * self.rows, count * self.rows
            tensors = tuple([x.narrow(1 if x.ndim == 4 else 2, start, length) for x in tensors])
        if self.head_groups > 1:
            first, heads = head_group * self.heads_per_group, self.heads_per_group
            tensors = tuple([x.narrow(2 if x.ndim == 4 else 1, first, heads) for x in tensors])
        return tensors


def buffer_layout(
    schedule: Schedule,
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    lse_dtype: torch.dtype | None = None,
) -> BufferLayout:
    """Returns the layout of an item: local tensors of `shapes` (B, S, N, D), which differ only in D, and maybe an lse.

    Key/value heads that are fewer than the schedule's head groups form groups of one head.
    """
    batch, length, heads, _ = shapes[0]
    head_groups = schedule.total_head_groups if heads % schedule.total_head_groups == 0 else heads
    chunk_count = schedule.layout.chunks_per_rank
    return BufferLayout(
        dims=tuple(dim for *_, dim in shapes),
        heads_per_group=heads // head_groups,
        head_groups=head_groups,
        chunk_count=chunk_count,
        rows=length // chunk_count,
        batch=batch,
        dtype=dtype,
        lse_dtype=lse_dtype,
    )
