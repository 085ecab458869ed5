"""Groups of heads that a layer passes to attention one after the other, so that q, k and v never exist whole."""

from math import gcd

from lightseq.schedule.algorithms import ulysses_group_size
from lightseq.schedule.auto import ScheduleChoice
from lightseq.schedule.cost import AttentionShape

MIN_COLUMNS = 256  # query heads x head dim of a group; products of 8192 tokens with fewer columns do not fill a GPU


def count_head_groups(heads: int, kv_heads: int, dim: int, parts: int) -> int:
    """Returns the most groups of equal heads whose key/value heads a schedule can cut in `parts` (`head_groups`).

    A group is at least MIN_COLUMNS wide. The result is 1 if no other number fits.
    """
    possible = (n for n in range(kv_heads, 1, -1) if kv_heads % (n * parts) == 0 and heads * dim >= n * MIN_COLUMNS)
    return next(possible, 1)


def with_fewer_turns(choice: ScheduleChoice, world: int, shape: AttentionShape) -> ScheduleChoice:
    """Returns a choice whose turns are left to a layer that passes its heads in groups.

    The layer's groups save the same memory, and more around attention.
    """
    ulysses, turns = ulysses_group_size(choice.schedule, world, choice.ulysses_size), choice.head_groups or 1
    groups = count_head_groups(shape.heads, shape.kv_heads, shape.head_dim, ulysses)
    return choice._replace(head_groups=turns // gcd(turns, groups))
