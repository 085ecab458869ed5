"""Chunked attention (Llama 4): a schedule's table limited to the chunk that a query is in.

Chunks are documents whose boundaries a layer adds to those of the sequence; the layout stays the model's.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from lightseq.schedule.algorithms import assign_tiles, with_ulysses
from lightseq.schedule.documents import MAX_PACKED_TABLES, assign_packed_tiles, limit_to_documents, packed_schedule
from lightseq.schedule.table import Schedule, derive_steps


def with_chunks(boundaries: Sequence[int], chunk: int) -> tuple[int, ...]:
    """Adds the boundaries of chunks to those of documents. Chunks count from a document's start."""
    inside = (edge for start, stop in pairwise(boundaries) for edge in range(start, stop, chunk))
    return (*inside, boundaries[-1])


@lru_cache(maxsize=MAX_PACKED_TABLES)
def chunked_schedule(schedule: Schedule, boundaries: tuple[int, ...], chunk: int, *, packed: bool) -> Schedule:
    """Makes the schedule's table for one sequence whose layers attend in chunks.

    `boundaries` separate documents, or are (0, padded length). A `packed` sequence keeps the layout of its documents.
    """
    if packed:
        layout = packed_schedule(schedule, boundaries).layout
        assignment = assign_packed_tiles(schedule, layout)
    else:
        layout, assignment = schedule.layout, assign_tiles(schedule)
    edges = with_chunks(boundaries, chunk)
    limited = limit_to_documents(assignment, layout.group_layout, edges)
    if layout.ulysses > 1:
        limited = with_ulysses(limited, layout.ulysses)
    return replace(
        schedule, layout=layout, boundaries=edges,
        forward=derive_steps(layout, limited), backward=derive_steps(layout, limited, backward=True),
    )  # fmt: skip
