"""Chunked attention: tables in which a query sees the keys of its own chunk."""

from itertools import pairwise

import pytest
from schedules import fitting

from lightseq.parts.facts import Attention, Heads
from lightseq.schedule.algorithms import make_schedule
from lightseq.schedule.chunks import chunked_schedule
from lightseq.schedule.documents import padded_length
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.proof import validate
from lightseq.schedule.reach import CHUNK, Reach

HEADS = Heads(query=8, key_value=8, dim=4, value_dim=4)


def test_chunks_count_from_the_start_of_a_document() -> None:
    assert Nodes((0, 5, 12)).cut(3) == Nodes((0, 3, 5, 8, 11, 12))
    assert Nodes((0, 12)).cut(20) == Nodes((0, 12))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_every_schedule_computes_the_pairs_of_each_chunk_once(world: int, packed: bool) -> None:
    for name in fitting(world, 8, 8):
        schedule = make_schedule(name, world)
        length = padded_length(schedule, 96) if packed else schedule.layout.padded_length(96)
        boundaries = (0, 31, 40, length) if packed else (0, length)
        table = chunked_schedule(schedule, Nodes(boundaries), 14, packed=packed)
        validate(table)
        assert table.layout.chunks_per_rank >= schedule.layout.chunks_per_rank or packed
        sizes = [stop - start for start, stop in pairwise(boundaries)]
        expected = Attention(HEADS, Reach(CHUNK, 14)).area(sizes)
        whole = [min(14, size - start) for size in sizes for start in range(0, size, 14)]
        assert expected == sum(size**2 for size in whole)
