"""Predicted times: the counts are the table's, and the default rates are near what was measured."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from cases import slow_except

from lightseq.attention import context
from lightseq.attention.config import AttentionConfig
from lightseq.schedule.algorithms import SCHEDULES, make_schedule, schedule_without_steps
from lightseq.schedule.auto import ScheduleChoice, choose_by_counts, choose_by_time, possible_choices, why_impossible
from lightseq.schedule.cost import AttentionShape, tile_flops
from lightseq.schedule.schedule_choice import choose
from lightseq.schedule.table import Schedule, Step, Tile
from lightseq.schedule.timing import H200_NCCL, H200_SYMMETRIC, estimate, kernel_seconds
from lightseq.schedule.traffic import Traffic, count_traffic

WORLDS = (*range(1, 13), 16, 32)
ITEMS = (("q", "kv", "out", None), ("q", "kv", "dq", "dkv"))
K = 1024


def _shape(length: int, heads: int = 32, kv_heads: int = 8) -> AttentionShape:
    return AttentionShape(length, heads, kv_heads, 128)


def _cases(world: int) -> list[tuple[str, int, int | None]]:
    """Returns all distinct (schedule, head groups, ulysses size)."""
    sizes = [u for u in range(2, world) if world % u == 0]
    found: list[tuple[str, int, int | None]] = []
    for name, algorithm in SCHEDULES.items():
        for u in sizes[:1] + sizes[-1:] if name == "usp" else [None]:
            found += [(name, g, u) for g in ((1, 2, 5) if algorithm.has_head_groups else (1,))]
    return [*found, *[("zigzag", 1, u) for u in sizes[:1]]]


def _area(schedule: Schedule, tile: Tile) -> float:
    """In chunks of a place squared, from FLOPs that were counted elsewhere."""
    unit = AttentionShape(schedule.layout.chunk_count, schedule.total_head_groups, schedule.total_head_groups, 1)
    return tile_flops(schedule, unit, tile) / 4 / schedule.ulysses_size**2


def _counted(schedule: Schedule, step: Step, backward: bool, gpus_per_host: int) -> tuple[np.ndarray, ...]:
    """Work, items from the own host and items from others, from the moves of the table itself."""
    work, moved = np.zeros((schedule.world, 2)), np.zeros((2, schedule.world, 4))
    for rank, tiles in enumerate(step.tiles):
        work[rank] = sum(_area(schedule, tile) for tile in tiles), len(tiles)
    for move in step.moves:
        far = move.src // gpus_per_host != move.dst // gpus_per_host
        moved[int(far), move.dst, ITEMS[backward].index(move.item)] += 1
    return work, moved[0], moved[1]


def _unrolled(counted: Traffic, backward: bool) -> list[tuple[np.ndarray, ...]]:
    keep = np.array([item is not None for item in ITEMS[backward]])
    steps = [s for s in counted.steps for _ in range(s.count)]
    every = [(s.work, s.same_host * keep, s.other_hosts * keep) for s in steps]
    return [arrays for arrays in every if any(x.any() for x in arrays)]


@pytest.mark.parametrize(
    ("gpus_per_host", "world"), slow_except([*product((3, 8), range(1, 8)), (8, 8), (8, 10)], product((3, 8), WORLDS))
)
def test_the_load_equals_the_table(world: int, gpus_per_host: int) -> None:
    """For every schedule: each step's work and its received items, by kind of rank, as the moves themselves say."""
    for name, groups, size in _cases(world):
        table = make_schedule(name, world, groups, size)
        counted = count_traffic(name, world, gpus_per_host, groups, size, every_step=True)
        for backward, steps in ((False, table.forward), (True, table.backward)):
            found = _unrolled(counted, backward)
            assert len(found) == len(steps), (name, groups, size)
            for step, got in zip(steps, found, strict=True):
                for want, rows in zip(_counted(table, step, backward, gpus_per_host), got, strict=True):
                    assert np.allclose(np.unique(want, axis=0), np.unique(rows, axis=0)), (name, groups, size, backward)


@pytest.mark.parametrize("name", ["ring", "striped", "zigzag", "balanced"])
@pytest.mark.parametrize("world, gpus_per_host", [(13, 4), (16, 8), (31, 1), (32, 4), (32, 8), (48, 8), (60, 7)])
def test_few_steps_stand_for_all(name: str, world: int, gpus_per_host: int) -> None:
    few, every = (count_traffic(name, world, gpus_per_host, every_step=every) for every in (False, True))
    assert sum(step.count for step in few.steps) == len(every.steps)
    for length in (64 * K, 4096 * K):
        got, want = (estimate(x, _shape(length), H200_NCCL).seconds for x in (few, every))
        assert got == pytest.approx(want, rel=1e-9)


def test_gathered_bytes_count_two_head_groups() -> None:
    """prefix holds the whole sequence's keys and values of the group that computes and of the one that comes next."""
    whole = 2 * 128 * K * 8 * 128 * 2
    shares = [
        estimate(count_traffic("prefix", 4, 4, g), _shape(128 * K), H200_SYMMETRIC).gathered_bytes for g in (1, 2, 4)
    ]
    assert shares == [whole, whole, whole / 2]
    lse = 128 * K * 32 / 4 * 4
    ulysses = estimate(count_traffic("ulysses", 4, 4), _shape(128 * K), H200_SYMMETRIC).gathered_bytes
    q = 128 * K * 32 / 4 * 128 * 2
    assert ulysses == whole / 4 + 3 * q + lse  # backward: q, dout, out and lse


def test_steps_without_tiles_expose_their_bytes() -> None:
    """ulysses hides nothing; a link twice as slow costs what its bytes take."""
    counted, shape = count_traffic("ulysses", 4, 4), _shape(128 * K)
    slow = replace(H200_SYMMETRIC, host_bytes_per_second=H200_SYMMETRIC.host_bytes_per_second / 2)
    q, kv, lse = 32 * K * 32 * 128 * 2, 2 * 32 * K * 8 * 128 * 2, 32 * K * 32 * 4
    received = 0.75 * (q + kv + q + lse + 3 * q + lse + kv + q + kv)
    more = estimate(counted, shape, slow).seconds - estimate(counted, shape, H200_SYMMETRIC).seconds
    assert more == pytest.approx(received / H200_SYMMETRIC.host_bytes_per_second)


def test_a_long_ring_is_counted_by_few_steps() -> None:
    counted = count_traffic("zigzag", 128, 8)
    assert len(counted.steps) < 48 and sum(step.count for step in counted.steps) == 129


def test_memory_counts_what_is_packed_and_what_adds_up() -> None:
    """ulysses packs its operands and copies results home; zigzag adds a float32 sum for every part."""
    rates, rows = H200_SYMMETRIC, 32 * K
    q, kv, lse = rows * 32 * 128 * 2, 2 * rows * 8 * 128 * 2, rows * 32 * 4
    ulysses = 2 * (q + kv) + 2 * (q + lse) + 2 * (3 * q + lse + kv) + 2 * (q + kv)
    got = estimate(count_traffic("ulysses", 4, 4), _shape(128 * K), rates).memory_seconds
    assert got == pytest.approx(ulysses / rates.memory_bytes_per_second)
    counted = count_traffic("zigzag", 4, 4)
    parts_q, parts_kv = counted.results.max(0) / 2  # of half of a rank's rows
    passes = 1 + rates.merge_passes * 4 / 2
    zigzag = 2 * kv + passes * parts_q * (q + lse) + 2 * kv + passes * (parts_q * q + parts_kv * kv)
    got = estimate(counted, _shape(128 * K), rates).memory_seconds
    assert got == pytest.approx(zigzag / rates.memory_bytes_per_second) and counted.accumulates == (True, True)


# ---- measured: four H200 of one host, 32/8 heads of 128, bfloat16, fa4 -----------------------------------------------

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def _records(files: str) -> list[dict[str, Any]]:
    """Returns the measured layers of lightseq, and of one GPU, whose records have no schedule."""
    records = [json.loads(line) for f in RESULTS.glob(files) for line in f.read_text().splitlines()]
    return [r for r in records if r.get("seconds_median") and r["implementation"] in ("lightseq", "single-gpu")]


def _waited_for_the_host(record: dict[str, Any], schedule: Schedule) -> bool:
    whole = schedule.name in ("ulysses", "prefix") and schedule.total_head_groups == schedule.ulysses_size
    return schedule.world > 1 and record["length"] < (16 * K if whole else 32 * K)


@pytest.mark.parametrize(
    "name",
    [
        "attention-4xh200",
        "attention-4xh200-512k",
        *(f"attention-2xh200-{x}" for x in ("overlap", "gather-once", "schedules")),
    ],
)
def test_default_rates_are_near_what_was_measured(name: str) -> None:
    compared = 0
    for r in _records(f"{name}.jsonl"):
        world = r["world"] if r["schedule"] else 1
        size = r["ulysses_size"] if r["schedule"] == "usp" else None
        counted = count_traffic(r["schedule"] or "ulysses", world, world, r["head_groups"] or 1, size)
        if not _waited_for_the_host(r, counted.schedule):
            shape = AttentionShape(r["length"], r["heads"], r["kv_heads"], r["head_dim"], r.get("batch", 1))
            predicted = estimate(counted, shape, H200_SYMMETRIC, bool(r.get("keep_gathered"))).seconds
            assert predicted == pytest.approx(r["seconds_median"], rel=0.08), r
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize(
    "name, length, milliseconds", [("ulysses", 128, 211.0), ("zigzag", 32, 15.9), ("zigzag", 128, 218.0)]
)
def test_default_rates_are_close_to_nccl_measurements(name: str, length: int, milliseconds: float) -> None:
    seconds = estimate(count_traffic(name, 4, 4), _shape(length * K), H200_NCCL).seconds
    assert seconds == pytest.approx(milliseconds / 1e3, rel=0.1)


HOST_LIMITED = pytest.mark.xfail(
    strict=True,
    reason="at 16K the host is the limit, which the model knows not: in the mean of three runs prefix is 5.7% ahead "
    "of what is taken (dev/LOG.md)",
)


OF_FOUR = [("attention-4xh200*.jsonl", 4, length) for length in (32, 64, 128, 512)]
OF_TWO = [("attention-2xh200-schedules.jsonl", 2, length) for length in (16, 32, 64, 128)]
OF_TWO_WITH_GRAPHS = [("attention-2xh100-short.jsonl", 2, length) for length in (8, 16, 32, 64)]


@pytest.mark.parametrize(
    "files, world, length",
    [pytest.param("attention-4xh200*.jsonl", 4, 16, marks=HOST_LIMITED), *OF_FOUR, *OF_TWO, *OF_TWO_WITH_GRAPHS],
)
def test_auto_is_within_three_percent_of_the_best_measured(files: str, world: int, length: int) -> None:
    """By the nearest number of head groups, where the chosen one was not measured; what several runs measured by its
    mean, for at 16K, where the host is the limit, they differ by up to a tenth."""
    chosen = choose_by_time(world, _shape(length * K), H200_SYMMETRIC, world)
    runs = defaultdict(list)
    for r in _records(files):
        shape = [r.get(x) for x in ("length", "heads", "kv_heads", "head_dim")]
        ablation = "gather_twice" in r.get("request", "")
        if r.get("implementation") == "lightseq" and shape == [length * K, 32, 8, 128] and not ablation:
            runs[r["schedule"], r["head_groups"]].append(r["seconds_median"])
    seconds = {key: fmean(found) for key, found in runs.items()}
    groups = min(
        (g for name, g in seconds if name == chosen.schedule), key=lambda g: abs(g - (chosen.head_groups or 1))
    )
    assert seconds[chosen.schedule, groups] <= 1.03 * min(seconds.values())


@pytest.mark.parametrize("length, milliseconds", [(16, 3.35), (32, 12.7), (128, 199.0)])
def test_the_default_kernel_is_near_what_was_measured(length: int, milliseconds: float) -> None:
    """One rank's share of the heads under ulysses: one call forward, one backward."""
    assert kernel_seconds(_shape(length * K, 8, 2), H200_SYMMETRIC) == pytest.approx(milliseconds / 1e3, rel=0.02)


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_the_cheapest_is_the_least_of_all_that_can_be_had() -> None:
    shape = _shape(256 * K)
    seconds = {
        c: estimate(count_traffic(c.schedule, 8, 4, c.head_groups or 1, c.ulysses_size), shape, H200_NCCL).seconds
        for c in possible_choices(8, shape)
    }
    assert seconds[choose_by_time(8, shape, H200_NCCL, 4)] == min(seconds.values())
    assert {c.schedule for c in seconds} == {*SCHEDULES}
    assert {(c.ulysses_size, c.head_groups) for c in seconds if c.schedule == "usp"} == {
        (2, 1), (2, 2), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4), (4, 8)
    }  # fmt: skip


def test_two_levels_pay_across_hosts_and_heads_stay_inside_one() -> None:
    assert choose_by_time(64, _shape(1024 * K), H200_NCCL, 8)[:2] == ("usp", 8)


def test_requested_schedules_are_kept() -> None:
    shape = _shape(64 * K)
    assert choose_by_time(8, shape, H200_SYMMETRIC, 8, ScheduleChoice("usp", 2))[:2] == ("usp", 2)
    assert choose_by_time(8, shape, H200_SYMMETRIC, 8, ScheduleChoice("prefix", None, 4)) == ("prefix", None, 4)
    assert {c.ulysses_size for c in possible_choices(8, shape, ScheduleChoice(ulysses_size=4))} == {4}


def test_head_counts_decide_which_schedules_fit() -> None:
    assert {c.schedule for c in possible_choices(8, _shape(64 * K, 9, 3))} == {
        "ring",
        "striped",
        "zigzag",
        "balanced",
        "prefix",
    }
    assert "9 query and 3" in (why_impossible(ScheduleChoice("ulysses"), 8, _shape(64 * K, 9, 3)) or "")
    with pytest.raises(ValueError, match="9 query and 3 key/value heads do not allow"):
        choose_by_time(8, _shape(64 * K, 9, 3), H200_SYMMETRIC, 8, ScheduleChoice("ulysses"))


@pytest.mark.parametrize(
    "asked",
    [ScheduleChoice("usp"), ScheduleChoice("usp", 2), ScheduleChoice("zigzag", 3), ScheduleChoice("ring", None, 2)],
)
def test_choice_and_make_schedule_refuse_with_the_same_line(asked: ScheduleChoice) -> None:
    world = 2 if asked.schedule == "usp" else 4
    with pytest.raises(ValueError) as expected:
        make_schedule(asked.schedule, world, asked.head_groups or 1, asked.ulysses_size)
    with pytest.raises(ValueError) as got:
        choose_by_time(world, _shape(64 * K), H200_SYMMETRIC, 8, asked)
    assert str(got.value) == str(expected.value)


def test_an_outline_is_its_schedule_without_steps() -> None:
    for world, (name, groups, size) in ((w, case) for w in (4, 6) for case in _cases(w)):
        empty, full = schedule_without_steps(name, world, groups, size), make_schedule(name, world, groups, size)
        assert (empty.name, empty.layout, empty.total_head_groups) == (full.name, full.layout, full.total_head_groups)
        assert not empty.forward and full.forward


def _choose(world: int, shape: AttentionShape, transport: str, per_host: int, asked: ScheduleChoice) -> ScheduleChoice:
    options = {"schedule": asked.schedule, "ulysses_size": asked.ulysses_size, "head_groups": asked.head_groups}
    config = AttentionConfig(**options, gpus_per_host=per_host, keep_gathered=False)
    return choose(context.schedule_request(config, world, shape, transport))


def test_a_context_chooses_the_options_that_are_not_given() -> None:
    """By predicted time between GPUs; between CPU processes by counting, where head groups stay one."""
    shape, auto = _shape(1024 * K), ScheduleChoice()
    assert _choose(64, shape, "nccl", 8, auto) == choose_by_time(64, shape, H200_NCCL, 8)
    assert _choose(3, shape, "nccl", 1, ScheduleChoice("prefix")).head_groups in (2, 4, 8)
    assert _choose(4, shape, "symmetric", 4, ScheduleChoice("usp", 2, 4)) == ("usp", 2, 4)
    assert _choose(4, shape, "gloo", 4, auto) == choose_by_counts(4, shape)
    assert _choose(4, shape, "gloo", 4, ScheduleChoice("prefix")) == ("prefix", None, None)


def test_auto_between_cpu_processes_keeps_to_what_was_asked_for_beside_it() -> None:
    assert _choose(6, AttentionShape(1024, 12, 3, 64), "gloo", 6, ScheduleChoice(ulysses_size=3))[1:] == (3, 1)
    assert _choose(4, _shape(K), "gloo", 4, ScheduleChoice(head_groups=2)).head_groups == 2
    with pytest.raises(ValueError, match="ulysses_size 3 does not divide 4 ranks"):
        _choose(4, _shape(K), "gloo", 4, ScheduleChoice(ulysses_size=3))
