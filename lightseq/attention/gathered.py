"""What a rank gathers of q, k and v in the forward pass, in one piece of memory that its backward pass reads again."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from lightseq.attention.buffers import Bundle, Form
from lightseq.schedule.documents import MOST_PACKED
from lightseq.schedule.placement import Arena, arenas
from lightseq.schedule.table import Schedule


class Gathered(NamedTuple):
    """`memory` (in the dtype of q, k and v) of `gathered_elements`, and how many key/value heads all ranks hold."""

    memory: Tensor
    kv_heads: int

    def bundles(self, schedule: Schedule, rank: int, forms: Mapping[str, Form]) -> dict[tuple[str, int], Bundle]:
        """By item and head group, of a schedule that keeps; `forms` of "q" and "kv" are those of the forward pass."""
        found = _arenas(schedule, rank)
        shapes = [forms[arena.item].packed_shape(len(arena.chunks)) for arena in found]
        pieces = self.memory.split_with_sizes([math.prod(shape) for shape in shapes])
        return {
            (arena.item, arena.heads): (piece.view(shape),)
            for arena, shape, piece in zip(found, shapes, pieces, strict=True)
        }


@lru_cache(maxsize=MOST_PACKED)
def _arenas(schedule: Schedule, rank: int) -> tuple[Arena, ...]:
    found = arenas(schedule.forward, schedule.layout, rank)
    assert all(len(arena.chunks) == schedule.layout.chunk_count for arena in found), f"{schedule} gathers parts"
    return found


def gathered_elements(schedule: Schedule, q_BSHD: Tensor, kv_heads: int) -> int:
    """Of q, k and v over the whole sequence, the heads that one rank computes; lengths may be symbols of a compiler."""
    batch, local, heads, dim = q_BSHD.shape
    of_group = heads // schedule.head_groups + 2 * max(kv_heads // schedule.head_groups, 1)
    return batch * local * schedule.world * dim * schedule.turns * of_group
