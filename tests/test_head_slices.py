"""Head slices of tiled layers: how many, which schedules accept them, and the head groups left to a schedule."""

import pytest

from lightseq.schedule.algorithms import check_heads, schedule_without_steps
from lightseq.schedule.auto import ScheduleChoice, possible_choices
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.head_slices import count_head_slices, with_fewer_head_groups

HEADS = {"8b": (32, 8, 128), "1b": (32, 8, 64), "7b": (32, 32, 128), "odd": (28, 4, 128), "mqa": (32, 1, 64)}


@pytest.mark.parametrize(
    ("model", "ulysses", "slices"),
    [
        ("8b", 1, 8), ("8b", 2, 4), ("8b", 8, 1), ("8b", 16, 1), ("8b", 3, 1),
        ("1b", 1, 8), ("7b", 1, 16), ("7b", 8, 4), ("odd", 1, 4), ("mqa", 1, 1),
    ],
)  # fmt: skip
def test_slices_are_as_small_as_schedules_and_products_allow(model: str, ulysses: int, slices: int) -> None:
    schedule = schedule_without_steps("ulysses" if ulysses > 1 else "prefix", ulysses)
    assert count_head_slices(schedule, *HEADS[model]) == slices


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("model", HEADS)
def test_every_schedule_takes_the_slices(model: str, world: int) -> None:
    heads, kv_heads, dim = HEADS[model]
    shape = AttentionShape(2**20, heads, kv_heads, dim)
    for choice in possible_choices(world, shape):
        fewer = with_fewer_head_groups(choice, world, shape)
        schedule = schedule_without_steps(fewer.schedule, world, fewer.head_groups or 1, fewer.ulysses_size)
        slices = count_head_slices(schedule, heads, kv_heads, dim)
        check_heads(schedule, heads // slices, kv_heads // slices)
        groups = choice.head_groups or 1
        assert slices * (fewer.head_groups or 1) >= groups, f"{choice}: no more heads at a time than before"
        if kv_heads % (groups * schedule.ulysses_size) == 0:
            assert kv_heads // slices % schedule.total_head_groups == 0, f"{choice}: no key/value head is shared"


def test_layers_take_the_turns_of_a_schedule() -> None:
    shape = AttentionShape(2**20, *HEADS["8b"])
    assert with_fewer_head_groups(ScheduleChoice("prefix", None, 8), 4, shape) == ("prefix", None, 1)
    assert with_fewer_head_groups(ScheduleChoice("usp", 2, 4), 8, shape) == ("usp", 2, 1)
    assert with_fewer_head_groups(ScheduleChoice("ulysses", None, 4), 8, shape) == ("ulysses", None, 4), "one slice"
    wide = AttentionShape(2**20, 24, 24, 32)  # three groups of 8 heads
    assert with_fewer_head_groups(ScheduleChoice("prefix", None, 8), 4, wide) == ("prefix", None, 8)
