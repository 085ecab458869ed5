"""Table proofs: every schedule for every world size, and every mutation caught."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from cases import slow_except

from lightseq.cli import main
from lightseq.schedule.algorithms import SCHEDULES, check_heads, make_schedule
from lightseq.schedule.auto import choose_by_counts
from lightseq.schedule.cost import AttentionShape, cost
from lightseq.schedule.layout import LAYOUT_KINDS, Layout, shard, unshard
from lightseq.schedule.proof import InvalidSchedule, validate
from lightseq.schedule.render import render
from lightseq.schedule.table import Mask, Schedule, Step, Tile

WORLDS = range(1, 33)
SOME_WORLDS = (1, 2, 3, 4, 5, 8, 13, 32)
BIG = 16
SHAPE = AttentionShape(length=1 << 16, heads=32, kv_heads=8, head_dim=128)


def _sizes(name: str, world: int) -> list[int | None]:
    """Every ulysses_size that a schedule can have; in big worlds none, the smallest and the largest."""
    if name == "ulysses":
        return [None]
    divisors = [u for u in range(1, world + 1) if world % u == 0]
    sizes = divisors[1:-1] if name == "usp" else divisors
    if world <= BIG:
        return [*sizes]
    return [*sizes[:1], *sizes[-1:]] if name == "usp" else [*divisors[:-1][:2], *divisors[2:-1][-1:]]


@pytest.mark.parametrize(
    "worlds", slow_except([WORLDS[:8]], [WORLDS[:8], WORLDS[8:]]), ids=["up to 8 ranks", "up to 32"]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_causal_pair_is_computed_once_in_every_world(name: str, worlds: range) -> None:
    proven = set()
    for world in worlds:
        for ulysses in _sizes(name, world):
            schedule = make_schedule(name, world, ulysses_size=ulysses)
            validate(schedule)
            proven.add((world, schedule.ulysses_size))
    composite = {world for world in worlds if any(world % d == 0 for d in range(2, world))}
    assert {world for world, _ in proven} == (composite if name == "usp" else {*worlds})


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("name", [name for name, a in SCHEDULES.items() if a.has_head_groups])
def test_a_schedule_is_right_for_every_number_of_head_groups(name: str, groups: int) -> None:
    for world in SOME_WORLDS[:-1]:
        for ulysses in _sizes(name, world):
            validate(make_schedule(name, world, groups, ulysses))


@pytest.mark.parametrize("groups", [1, *(pytest.param(groups, marks=pytest.mark.slow) for groups in (2, 4))])
def test_kept_operands_do_not_move_again(groups: int) -> None:
    for world in SOME_WORLDS[1:]:
        schedule = make_schedule("ulysses", world, groups)
        kept = schedule.with_gathered_backward
        validate(kept)
        with pytest.raises(InvalidSchedule, match="are missing"):
            validate(dataclasses.replace(kept, reuses_gathered=False))
        shape = AttentionShape(1024 * world, 4 * groups * world, groups * world, 64)
        once, twice = cost(kept, shape), cost(schedule, shape)
        gathered = (world - 1) * 1024 * 64 * 2 * (4 + 2) * groups * world  # (query + 2 key/value) heads of bfloat16
        assert once.forward_bytes == twice.forward_bytes
        assert twice.backward_bytes - once.backward_bytes == gathered


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"ulysses"}))
def test_only_ulysses_keeps_gathered_operands(name: str) -> None:
    assert not make_schedule(name, 4).can_keep_gathered


def _without_one(steps: tuple[Step, ...], rng: random.Random, what: str) -> tuple[Step, ...] | None:
    """The steps with one tile or one move taken out; None where there is none to take."""
    places = [
        (t, *place)
        for t, step in enumerate(steps)
        for place in (
            [(i,) for i in range(len(step.moves))]
            if what == "move"
            else [(r, i) for r, tiles in enumerate(step.tiles) for i in range(len(tiles))]
        )
    ]
    if not places:
        return None
    t, *place = rng.choice(places)
    step = steps[t]
    if what == "move":
        changed = dataclasses.replace(step, moves=step.moves[: place[0]] + step.moves[place[0] + 1 :])
    else:
        rank, i = place
        tiles = step.tiles[rank][:i] + step.tiles[rank][i + 1 :]
        changed = dataclasses.replace(step, tiles=(*step.tiles[:rank], tiles, *step.tiles[rank + 1 :]))
    return (*steps[:t], changed, *steps[t + 1 :])


@pytest.mark.parametrize("what", ["tile", "move"])
@pytest.mark.parametrize("name", slow_except(["ring", "balanced", "prefix"], SCHEDULES))
def test_a_dropped_tile_or_move_is_always_caught(name: str, what: str) -> None:
    rng = random.Random(name + what)
    for world, ulysses in [(w, u) for w in SOME_WORLDS for u in _sizes(name, w)[:2]]:
        schedule = make_schedule(name, world, ulysses_size=ulysses)
        for direction in ("forward", "backward"):
            for _ in range(3):
                steps = _without_one(getattr(schedule, direction), rng, what)
                if steps is not None:
                    with pytest.raises(InvalidSchedule):
                        validate(dataclasses.replace(schedule, **{direction: steps}))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_tile_with_another_mask_is_always_caught(name: str) -> None:
    schedule = make_schedule(name, 4)
    for t, step in enumerate(schedule.forward):
        for rank, tiles in enumerate(step.tiles):
            for i, tile in enumerate(tiles):
                for mask in set(Mask) - {tile.mask}:
                    changed = (*tiles[:i], Tile(tile.q, tile.kv, mask, tile.head_group), *tiles[i + 1 :])
                    row = (*step.tiles[:rank], changed, *step.tiles[rank + 1 :])
                    steps = list(schedule.forward)
                    steps[t] = dataclasses.replace(step, tiles=row)
                    with pytest.raises(InvalidSchedule):
                        validate(dataclasses.replace(schedule, forward=tuple(steps)))


def _busy(name: str, world: int) -> float:
    return cost(make_schedule(name, world), SHAPE).busy


@pytest.mark.parametrize("name", ["zigzag", "balanced", pytest.param("prefix", marks=pytest.mark.slow)])
def test_balanced_schedules_keep_every_rank_busy_in_every_world(name: str) -> None:
    for world in WORLDS:
        assert _busy(name, world) == pytest.approx(1.0), world


def test_ring_leaves_ranks_idle_and_striped_nearly_none() -> None:
    assert _busy("ring", 8) == pytest.approx(32 / 60)
    assert _busy("striped", 8) > 0.99


def test_all_schedules_do_the_same_arithmetic() -> None:
    whole = 3.5 * 4 * SHAPE.length**2 / 2 * SHAPE.heads * SHAPE.head_dim
    for name in SCHEDULES:
        for world, ulysses in [(w, u) for w in (1, 3, 8) for u in _sizes(name, w)]:
            schedule = make_schedule(name, world, ulysses_size=ulysses)
            assert cost(schedule, SHAPE).flops == pytest.approx(whole), (name, world)


def test_bytes_equal_a_count_by_hand() -> None:
    """Ring on two ranks: rank 1 fetches rank 0's keys and values twice and returns their gradients."""
    c = cost(make_schedule("ring", 2), SHAPE)
    kv = 2 * SHAPE.length // 2 * SHAPE.kv_heads * SHAPE.head_dim * 2
    assert (c.forward_bytes, c.backward_bytes, c.exposed_bytes) == (kv, 2 * kv, kv)


def test_auto_never_picks_an_unbalanced_schedule() -> None:
    for world in (2, 3, 4, 8, 16):
        assert _busy(choose_by_counts(world, SHAPE).schedule, world) > 0.99


@pytest.mark.parametrize("kind", LAYOUT_KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", [1, 7, 48, 61])
def test_shards_hold_every_token_once_and_join_again(kind: str, world: int, length: int) -> None:
    chunk_groups = tuple(reversed(range(world))) * 2 if kind == "explicit" else ()
    layout = Layout(kind, world, 2 if kind in ("zigzag", "explicit") else 1, chunk_groups=chunk_groups)
    x = torch.arange(2 * length).reshape(2, length)
    parts = [shard(x, layout, rank, dim=1, fill=-1) for rank in range(world)]
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(unshard(parts, layout, length, dim=1), x)
    for rank, part in enumerate(parts):
        positions = layout.positions(rank, layout.padded_length(length))
        inside = positions < length
        assert torch.equal(part[:, inside], x[:, positions[inside]])
        assert (part[:, ~inside] == -1).all()
        assert all(layout.home(chunk) == rank for chunk in layout.chunks(rank))


REFUSED: list[tuple[str, int, dict[str, int], str]] = [
    ("spiral", 4, {}, "'spiral' is unknown; choose one of ring, striped"),
    ("ring", 4, {"head_groups": 2}, r"ring computes all heads at once; head groups \(2\)"),
    ("usp", 3, {}, "usp needs two or more Ulysses groups of two or more ranks; 3 ranks"),
    ("usp", 4, {"ulysses_size": 4}, "4 ranks with ulysses_size 4 cannot form them; use ulysses"),
    ("usp", 4, {"ulysses_size": 1}, "4 ranks with ulysses_size 1 cannot form them; use prefix"),
    ("ulysses", 4, {"ulysses_size": 2}, "ulysses splits heads over all 4 ranks, not 2; usp splits them over a part"),
    ("usp", 1, {}, "two or more ranks; 1 ranks cannot form them; use prefix"),
    ("zigzag", 4, {"ulysses_size": 3}, "ulysses_size 3 does not divide 4 ranks; use 1, 2 or 4"),
    ("usp", 9, {}, "ulysses_size 4 does not divide 9 ranks; use 1, 3 or 9"),
]


@pytest.mark.parametrize("name, world, sizes, words", REFUSED)
def test_unsupported_sizes_are_refused_by_name(name: str, world: int, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_schedule(name, world, **sizes)


@pytest.mark.parametrize("heads, kv_heads, words", [(6, 2, "6 query and 2"), (5, 5, "5 query and 5"), (12, 3, "and 3")])
def test_heads_that_cannot_be_cut_are_refused(heads: int, kv_heads: int, words: str) -> None:
    with pytest.raises(ValueError, match=f"ulysses over 4 ranks cuts heads in 4, which .*{words}.*prefix takes any"):
        check_heads(make_schedule("ulysses", 4), heads, kv_heads)


def test_heads_are_split_over_half_of_the_ranks_unless_told_otherwise() -> None:
    for world, asked, got in ((4, None, 2), (12, None, 6), (12, 3, 3)):
        assert make_schedule("usp", world, ulysses_size=asked).ulysses_size == got
    assert make_schedule("ulysses", 6).ulysses_size == 6 and make_schedule("zigzag", 6).ulysses_size == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_drawing_shows_every_tile(name: str) -> None:
    schedule: Schedule = make_schedule(name, 4)
    text = render(schedule)
    assert text.count("q") > sum(len(tiles) for step in schedule.forward for tiles in step.tiles)
    assert "rank 3" in text and "busy" in text


def test_the_command_draws_a_table_and_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--schedule", "balanced", "--ranks", "8"]) == 0
    assert "balanced: 8 ranks" in capsys.readouterr().out
    assert main(["schedule", "--schedule", "balanced", "--ranks", "0"]) == 2
    assert capsys.readouterr().err == "error: ranks 0: give at least 1\n"


def test_the_page_of_shared_prefixes_shows_what_the_program_draws(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path("docs/shared-prefixes.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("lightseq schedule"))
    assert main(command.split()[1:]) == 0
    drawn = capsys.readouterr().out
    assert f"```text\n{drawn.rstrip()}\n```" in page


def test_rows_that_share_prefixes_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--schedule", "prefix", "--ranks", "2", "--rows", "abc,abd"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "5 tokens instead of 6; number: rank that computes this pair of a query (row) and a key (column); · no pair",
        "",
        "    a  b c  b d",
        "  a 0  · ·  · ·",
        "",
        "  b 0  0 ·  · ·",
        "  c 0  0 0  · ·",
        "",
        "  b 1  · ·  1 ·",
        "  d 1  · ·  1 1",
    ]
    assert main(["schedule", "--schedule", "ring", "--ranks", "2", "--rows", "abc,"]) == 2
    assert capsys.readouterr().err == "error: row 1 has no tokens; leave it out\n"
