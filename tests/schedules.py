"""The schedules that a test can run on some ranks and heads: all that fit, and never none."""

from lightseq.schedule.algorithms import SCHEDULES
from lightseq.schedule.auto import ScheduleChoice, why_impossible
from lightseq.schedule.cost import AttentionShape

ANY_WORLD = {"ring", "striped", "zigzag", "balanced", "prefix"}  # and any number of heads


def fitting(world: int, heads: int, kv_heads: int) -> list[str]:
    """The names of the schedules that exist for that many ranks and heads."""
    shape = AttentionShape(1024, heads, kv_heads, 64)
    found = [name for name in SCHEDULES if why_impossible(ScheduleChoice(name), world, shape) is None]
    assert {*found} >= ANY_WORLD, f"{ANY_WORLD - {*found}} must run on {world} ranks with any number of heads"
    return found
