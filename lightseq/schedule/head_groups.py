"""Groups of heads that a layer passes to attention one after the other, so that q, k and v never exist whole."""

from math import gcd

from lightseq.schedule.algorithms import allows_heads, schedule_without_steps
from lightseq.schedule.auto import ScheduleChoice
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.table import Schedule

MIN_COLUMNS = 256  # query heads x head dim of a group; products of 8192 tokens with fewer columns do not fill a GPU


def count_head_groups(schedule: Schedule, heads: int, kv_heads: int, dim: int) -> int:
    """Returns the most groups of equal heads that a schedule accepts; 1 if only all heads at once will do.

    A group is at least MIN_COLUMNS wide, and each rank of a Ulysses group gets key/value heads of its own.
    """

    def possible(groups: int) -> bool:
        if kv_heads % (groups * schedule.ulysses_size) or heads * dim < groups * MIN_COLUMNS:
            return False
        return allows_heads(schedule, heads // groups, kv_heads // groups)

    return next(filter(possible, range(kv_heads, 1, -1)), 1)


def with_fewer_turns(choice: ScheduleChoice, world: int, shape: AttentionShape) -> ScheduleChoice:
    """Returns a choice whose turns are left to a layer that passes its heads in groups.

    The layer's groups save the same memory, and more around attention.
    """
    in_one_turn = schedule_without_steps(choice.schedule, world, 1, choice.ulysses_size)
    groups, turns = count_head_groups(in_one_turn, shape.heads, shape.kv_heads, shape.head_dim), choice.head_groups or 1
    return choice._replace(head_groups=turns // gcd(turns, groups))
