"""Head slices: the heads that a tiled layer passes to attention at a time, so that q, k and v never exist whole.

The layer projects and attends slice by slice (`parts/tiled.py`). The schedule cuts each slice into head groups
(`Schedule`).
"""

from math import gcd

from lightseq.schedule.algorithms import allows_heads, schedule_without_steps
from lightseq.schedule.auto import ScheduleChoice
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.table import Schedule

MIN_COLUMNS = 256  # query heads x head dim of a slice; products of 8192 tokens with fewer columns do not fill a GPU


def count_head_slices(schedule: Schedule, heads: int, kv_heads: int, dim: int) -> int:
    """Returns the most slices of equal heads that a schedule accepts; 1 if only all heads at once will do.

    A slice is at least MIN_COLUMNS wide, and each rank of a Ulysses group gets key/value heads of its own.
    """

    def possible(slices: int) -> bool:
        if kv_heads % (slices * schedule.ulysses_size) or heads * dim < slices * MIN_COLUMNS:
            return False
        return allows_heads(schedule, heads // slices, kv_heads // slices)

    return next(filter(possible, range(kv_heads, 1, -1)), 1)


def with_fewer_head_groups(choice: ScheduleChoice, world: int, shape: AttentionShape) -> ScheduleChoice:
    """Returns a choice with fewer head groups, for a layer that passes its heads in slices.

    Slices save the same memory as head groups, and more around attention.
    """
    one_group = schedule_without_steps(choice.schedule, world, 1, choice.ulysses_size)
    slices, groups = count_head_slices(one_group, shape.heads, shape.kv_heads, shape.head_dim), choice.head_groups or 1
    return choice._replace(head_groups=groups // gcd(groups, slices))
