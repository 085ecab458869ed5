"""Placement of buffers: arenas hold what tiles read and no more, and packing gives back exactly what went in."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import Tensor

from lightseq.attention.buffers import buffer_layout
from lightseq.schedule.algorithms import SCHEDULES, make_schedule
from lightseq.schedule.arenas import Arena, arenas, local_start
from lightseq.schedule.proof import InvalidSchedule, validate
from lightseq.schedule.table import Schedule


def _schedules(name: str) -> list[Schedule]:
    """The schedule in small worlds, alone and with its heads split over every number of ranks, and into groups."""
    found = []
    for world, groups in ((1, 1), (2, 1), (4, 1), (5, 1), (8, 2)):
        for ulysses in (u for u in range(1, world + 1) if world % u == 0):
            if (name == "ulysses" and ulysses != world) or (name == "usp" and not 1 < ulysses < world):
                continue
            found.append(make_schedule(name, world, groups if SCHEDULES[name].has_head_groups else 1, ulysses))
    return found


# ---- arenas --------------------------------------------------------------------------------------------------------


def _check_arenas(schedule: Schedule, backward: bool, rank: int) -> None:
    layout, steps = schedule.layout, schedule.backward if backward else schedule.forward
    found = arenas(steps, layout, rank)
    read: dict[Arena, set[int]] = {arena: set() for arena in found}
    used: dict[Arena, set[int]] = {arena: set() for arena in found}
    for t, step in enumerate(steps):
        for tile in step.tiles[rank]:
            for item, chunks in (("q", tile.q), ("kv", tile.kv)):
                if local_start(layout, rank, chunks) is None:
                    kind = (item, tile.head_group)
                    (arena,) = (a for a in found if (a.item, a.head_group) == kind and a.first <= t <= a.last)
                    ((start, count),) = arena.find(chunks)
                    assert arena.chunks[start : start + count] == chunks
                    read[arena] |= {*chunks}
                    used[arena] |= {t}
    for arena in found:
        assert read[arena] == {*arena.chunks}, "a chunk that no tile reads"
        assert used[arena] == {*range(arena.first, arena.last + 1)}, "memory that is held and not read"


@pytest.mark.parametrize("name", SCHEDULES)
def test_tiles_find_their_operands_side_by_side_and_no_arena_lives_longer_than_needed(name: str) -> None:
    for schedule in _schedules(name):
        for rank in range(schedule.world):
            _check_arenas(schedule, False, rank)
            _check_arenas(schedule, True, rank)


# ---- what stays where it is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_operand_moves_again_only_if_a_step_did_without_it(name: str) -> None:
    for schedule in _schedules(name):
        for steps in (schedule.forward, schedule.backward):
            arrived = Counter((m.item, m.chunk, m.head_group, m.dst) for s in steps for m in s.moves if not m.is_result)
            for (item, chunk, head_group, rank), times in arrived.items():
                needed = [
                    any(chunk in (t.q if item == "q" else t.kv) for t in step.tiles[rank] if t.head_group == head_group)
                    for step in steps
                ]
                begins = sum(now and not before for before, now in zip([False, *needed], needed, strict=False))
                assert times == begins, f"{schedule.name} on {schedule.world}: {item} {chunk} to rank {rank}"


def test_zigzag_with_split_heads_moves_every_query_once_a_pass() -> None:
    schedule = make_schedule("zigzag", 4, ulysses_size=2)
    for steps in (schedule.forward, schedule.backward):
        moved = Counter((m.chunk, m.dst, m.head_group) for step in steps for m in step.moves if m.item == "q")
        assert {*moved.values()} == {1}
        assert len(moved) == schedule.layout.chunk_count, "every chunk has one other rank that computes the other heads"
        assert sum(any(m.item == "q" for m in step.moves) for step in steps) == 1, "all of them before the first tile"


def test_an_operand_that_moves_twice_is_caught() -> None:
    schedule = make_schedule("zigzag", 4, ulysses_size=2)
    first, second, *rest = schedule.forward
    q = next(m for m in first.moves if m.item == "q")
    again = dataclasses.replace(second, moves=(*second.moves, q))
    with pytest.raises(InvalidSchedule, match="arrive without use"):
        validate(dataclasses.replace(schedule, forward=(first, again, *rest)))


# ---- packing -------------------------------------------------------------------------------------------------------

# name, ranks, ulysses_size, head groups, query and key/value heads: whole, split, in groups, shared by several groups
PACKINGS = [
    ("ring", 2, 1, 1, (6, 2)),
    ("zigzag", 4, 2, 1, (4, 4)),
    ("prefix", 2, 1, 2, (8, 4)),
    ("ulysses", 4, 4, 1, (8, 2)),
    ("usp", 4, 2, 4, (16, 2)),
]


def _own(shape: tuple[int, ...], dtype: torch.dtype, strided: bool, seed: int) -> Tensor:
    """A rank's tensor (B, S, N, D), as it is or the second half of a projection's heads."""
    batch, length, heads, dim = shape
    g = torch.Generator().manual_seed(seed)
    if not strided:
        return torch.randn(shape, generator=g).to(dtype)
    return torch.randn((batch, length, 2 * heads, dim), generator=g).to(dtype)[:, :, heads:]


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, 16), (torch.bfloat16, 20), (torch.float32, 6)], ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: p[0])
def test_staged_tensors_come_out_as_they_went_in(packing: tuple, dtype: torch.dtype, dim: int, strided: bool) -> None:
    name, world, ulysses, groups, heads = packing
    schedule = make_schedule(name, world, groups, ulysses)
    rows, batch, chunks = 3, 2, schedule.layout.chunks_per_rank
    q, dout, out, k, v = (
        _own((batch, chunks * rows, n, dim), dtype, strided, i)
        for i, n in enumerate((heads[0], heads[0], heads[0], heads[1], heads[1]))
    )
    lse = torch.randn(batch, chunks * rows, heads[0]).transpose(1, 2) if strided else torch.randn(
        batch, heads[0], chunks * rows
    )  # fmt: skip
    lse[:, :, 1] = -torch.inf
    narrow = v[..., : dim // 2].contiguous()
    for tensors, its_lse in (((q, dout, out), lse), ((q,), None), ((k, v), None), ((k, narrow), None)):
        whole = (*tensors, *([] if its_lse is None else [its_lse]))
        shapes = [x.shape for x in tensors]
        f = buffer_layout(schedule, shapes, dtype, None if its_lse is None else its_lse.dtype)
        assert [x.shape for x in f.whole(q.device, dtype)] == [x.shape for x in whole]
        assert f.head_groups == min(schedule.total_head_groups, tensors[0].shape[2]) and f.rows == rows
        assert f.head_groups * f.chunk_count * f.chunk_bytes == sum(x.nbytes for x in whole), (
            "all of it, and nothing twice"
        )
        memory = torch.full((f.staged_chunks * f.chunk_bytes + 16,), 255, dtype=torch.uint8)
        buffer = f.packed(memory, f.staged_chunks)
        for to, x in f.stage(buffer, whole):
            to.copy_(x)
        assert (memory[-16:] == 255).all()
        for group in range(f.head_groups):
            for start, count in [(0, chunks), *((i, 1) for i in range(chunks))]:
                got = f.unpacked(f.slots(buffer, group * f.chunk_count + start, count))
                s = slice(start * rows, (start + count) * rows)
                n = slice(group * f.heads_per_group, (group + 1) * f.heads_per_group)
                want = [*(x[:, s, n] for x in tensors), *([] if its_lse is None else [its_lse[:, n, s]])]
                for a, b, c in zip(got, want, f.local(whole, start, count, group), strict=True):
                    assert a.dtype == b.dtype and torch.equal(a, b) and torch.equal(c, b)


def test_a_packed_chunk_is_one_piece_of_memory_that_can_be_sent() -> None:
    x, lse = torch.randn(2, 6, 8, 16), torch.randn(2, 8, 6)
    f = buffer_layout(make_schedule("usp", 4), [x.shape] * 2, x.dtype, lse.dtype)
    buffer = f.packed(torch.empty(f.staged_chunks * f.chunk_bytes, dtype=torch.uint8), f.staged_chunks)
    for i in range(f.staged_chunks):
        assert all(part.is_contiguous() for part in f.slots(buffer, i, 1))
        views = f.unpacked(f.slots(buffer, i, 1))  # made before anything arrives
        for part in f.slots(buffer, i, 1):
            part.fill_(i)
        assert all((view == i).all() for view in views)
    assert [x.shape for x in f.empty(2, torch.device("cpu"))] == [x.shape for x in f.slots(buffer, 0, 2)]
