"""Gathered q, k and v of a rank, kept in one tensor from the forward to the backward pass."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from lightseq.attention.buffers import Buffer, BufferLayout
from lightseq.schedule.arenas import Arena, arenas
from lightseq.schedule.documents import MAX_PACKED_TABLES
from lightseq.schedule.table import Schedule


class Gathered(NamedTuple):
    """Gathered q, k and v in one tensor of `gathered_elements`."""

    memory: Tensor
    kv_heads: int  # heads of k and v (K)
    dim: int  # elements of a head of q and k

    def buffers(
        self, schedule: Schedule, rank: int, layouts: Mapping[str, BufferLayout]
    ) -> dict[tuple[str, int], Buffer]:
        """Returns packed buffers by item and head group; `layouts` of "q" and "kv" are the forward pass's."""
        found = _arenas(schedule, rank)
        shapes = [layouts[arena.item].packed_shape(len(arena.chunks)) for arena in found]
        pieces = self.memory.split_with_sizes([math.prod(shape) for shape in shapes])
        return {
            (arena.item, arena.head_group): (piece.view(shape),)
            for arena, shape, piece in zip(found, shapes, pieces, strict=True)
        }


@lru_cache(maxsize=MAX_PACKED_TABLES)
def _arenas(schedule: Schedule, rank: int) -> tuple[Arena, ...]:
    found = arenas(schedule.forward, schedule.layout, rank)
    assert all(len(arena.chunks) == schedule.layout.chunk_count for arena in found), (
        f"{schedule} does not gather the whole sequence"
    )
    return found


def gathered_elements(schedule: Schedule, q_BSHD: Tensor, v_BSKD: Tensor) -> int:
    """Returns the number of elements that one rank gathers: q, k and v of the whole sequence, for its heads.

    Lengths may be symbolic under torch.compile.
    """
    batch, local, heads, dim = q_BSHD.shape
    kv_heads, value_dim = v_BSKD.shape[2:]
    kv_heads_per_group = max(kv_heads // schedule.total_head_groups, 1)
    width = heads // schedule.total_head_groups * dim + kv_heads_per_group * (dim + value_dim)
    return batch * local * schedule.world * schedule.head_groups_per_rank * width
