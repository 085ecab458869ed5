"""Keys that a layer's queries see, and a schedule's table limited to these keys."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from lightseq.schedule.algorithms import SCHEDULES
from lightseq.schedule.chunks import chunked_schedule
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.table import Schedule
from lightseq.schedule.windows import windowed_schedule

WINDOW: Final = "window"
CHUNK: Final = "chunk"


@dataclass(frozen=True)
class Reach:
    """Keys that a query sees: the last `tokens` up to its own, or the keys of its chunk up to its own.

    Chunks of `tokens` count from the start of a document.
    """

    kind: str  # WINDOW or CHUNK
    tokens: int

    @property
    def is_passed(self) -> bool:
        """Returns whether layers pass it to attention; else only the mask of their model knows it."""
        return self.kind == WINDOW

    def area(self, sizes: ArrayLike) -> float:
        """Returns twice the visible (query, key) pairs in documents of these sizes, without half of the diagonal."""
        documents = np.asarray(sizes, dtype=np.float64)
        if self.kind == CHUNK:
            whole, rest = np.divmod(documents, self.tokens)
            return float((whole * self.tokens**2 + rest**2).sum())
        seen = np.minimum(documents, self.tokens)
        return float((seen * (2 * documents - seen)).sum())

    def limit(self, schedule: Schedule, nodes: Nodes, *, packed: bool) -> Schedule:
        """Returns the schedule's table for one sequence, limited to these keys.

        `nodes` are those of the sequence, or one of its padded length. Raises ValueError for a schedule that does not
        support windows.
        """
        if self.kind == CHUNK:
            return chunked_schedule(schedule, nodes, self.tokens, packed=packed)
        if not SCHEDULES[schedule.name].one_tile_per_query:
            raise ValueError(
                f"a row of {nodes.length} tokens, padding included, exceeds a layer's window of {self.tokens}, which "
                f"schedule {schedule.name} does not support; enable attention with that length, or with schedule prefix"
            )
        return windowed_schedule(schedule, nodes, self.tokens, packed=packed)


def sliding(window: int | None) -> Reach | None:
    """Returns the reach of a sliding window of `tokens` tokens; None for full attention."""
    return None if window is None else Reach(WINDOW, window)
