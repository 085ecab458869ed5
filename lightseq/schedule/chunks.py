"""Chunked attention: a schedule's table limited to the chunk that a query is in.

A layer cuts the nodes of the sequence at the borders of chunks; the layout stays the model's.
"""

from dataclasses import replace
from functools import lru_cache

from lightseq.schedule.algorithms import assign_tiles, with_ulysses
from lightseq.schedule.documents import MAX_PACKED_TABLES, assign_packed_tiles, limit_to_nodes, packed_schedule
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.table import Schedule, derive_steps


@lru_cache(maxsize=MAX_PACKED_TABLES)
def chunked_schedule(schedule: Schedule, nodes: Nodes, chunk: int, *, packed: bool) -> Schedule:
    """Makes the schedule's table for one sequence whose layers attend in chunks.

    `nodes` are those of the sequence, or one of its padded length. A `packed` sequence keeps the layout of its nodes.
    """
    if packed:
        layout = packed_schedule(schedule, nodes).layout
        assignment = assign_packed_tiles(schedule, layout)
    else:
        layout, assignment = schedule.layout, assign_tiles(schedule)
    parts = nodes.cut(chunk)
    limited = limit_to_nodes(assignment, layout.group_layout, parts)
    if layout.ulysses > 1:
        limited = with_ulysses(limited, layout.ulysses)
    return replace(
        schedule, layout=layout, nodes=parts,
        forward=derive_steps(layout, limited), backward=derive_steps(layout, limited, backward=True),
    )  # fmt: skip
