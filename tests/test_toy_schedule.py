"""A schedule of one's own: ten lines, a row of the table, and training with it."""

import pytest
from goldens import check_ended, numbers_of_run, words_of, write_inputs
from programs import programs
from worlds import spawn

from lightseq.schedule.algorithms import SCHEDULES, Algorithm, make_schedule
from lightseq.schedule.layout import Layout
from lightseq.schedule.proof import InvalidSchedule, validate
from lightseq.schedule.table import Assignment, Mask, Tile


def farthest_first(layout: Layout) -> Assignment:
    """Every rank meets its own chunk last, and the first chunk of the sequence first."""

    def tiles(step: int, rank: int) -> tuple[Tile, ...]:
        if step > rank:
            return ()
        return (Tile((rank,), (step,), Mask.CAUSAL if step == rank else Mask.FULL),)

    return [[tiles(step, rank) for rank in range(layout.world)] for step in range(layout.world)]


TOY = Algorithm("contiguous", 1, farthest_first)


def train_with_toy(rank: int, runs: list[str]) -> list:
    SCHEDULES["toy"] = TOY
    return programs(rank, "llama3", runs)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_schedule_of_ten_lines_trains(world: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    write_inputs(tmp_path)
    runs = [words_of(tmp_path, name, f"--schedule {name}") for name in ("toy", "ring")]
    check_ended(runs, spawn(world, train_with_toy, runs))
    toy, ring = (numbers_of_run(tmp_path / name) for name in ("toy", "ring"))
    assert toy["loss"] == pytest.approx(ring["loss"], rel=1e-5) and toy["loss"][0] != toy["loss"][1]


def test_a_wrong_schedule_is_found_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "toy", TOY)
    validate(make_schedule("toy", 3))
    first_keys_only = Algorithm("contiguous", 1, lambda layout: farthest_first(layout)[:1])
    monkeypatch.setitem(SCHEDULES, "toy", first_keys_only)
    with pytest.raises(InvalidSchedule, match="query 2 meets key 2 0 times"):
        validate(make_schedule("toy", 3))
