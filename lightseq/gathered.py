"""What a rank gathers of q, k and v in the forward pass, in one piece of memory that its backward pass reads again."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from lightseq.bundles import Bundle, Form
from lightseq.placement import Arena, arenas
from lightseq.schedule import Schedule


class Gathered(NamedTuple):
    """`memory` (uint8) of `gathered_bytes`, and how many key/value heads all ranks' tensors have."""

    memory: Tensor
    kv_heads: int

    def bundles(self, schedule: Schedule, rank: int, forms: Mapping[str, Form]) -> dict[tuple[str, int], Bundle]:
        """By item and head group, of a schedule that keeps; `forms` of "q" and "kv" are those of the forward pass."""
        found, start = {}, 0
        for arena in _arenas(schedule, rank):
            form, count = forms[arena.item], len(arena.chunks)
            found[arena.item, arena.heads] = form.packed(self.memory[start:], count)
            start += count * form.chunk_bytes
        assert start == self.memory.numel(), f"{schedule} gathers {start} bytes, not {self.memory.numel()}"
        return found


@lru_cache(maxsize=64)
def _arenas(schedule: Schedule, rank: int) -> tuple[Arena, ...]:
    found = arenas(schedule.forward, schedule.layout, rank)
    assert all(len(arena.chunks) == schedule.layout.chunk_count for arena in found), f"{schedule} gathers parts"
    return found


def gathered_bytes(schedule: Schedule, q_BSHD: Tensor, kv_heads: int) -> int:
    """Of q, k and v over the whole sequence, the heads that one rank computes; lengths may be symbols of a compiler."""
    batch, local, heads, dim = q_BSHD.shape
    of_group = heads // schedule.head_groups + 2 * max(kv_heads // schedule.head_groups, 1)
    return batch * local * schedule.world * dim * schedule.turns * of_group * q_BSHD.dtype.itemsize
