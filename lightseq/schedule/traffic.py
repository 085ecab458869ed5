"""Work and traffic of a schedule, step by step, as counts that hold for any length and head size.

The counts equal the table's, but come from the tiles of Ulysses groups, without making moves: a table for a
thousand ranks has millions of moves. Long runs of equal steps are sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from lightseq.schedule.algorithms import assign_tiles, schedule_without_steps
from lightseq.schedule.table import Assignment, Mask, Schedule, Tile

COUNTED_HEAD_GROUPS = 3  # per rank; all between the first and the last are equal
EDGE_STEPS = 3  # at either end, counted one by one: first operands, last results, half steps


@dataclass(frozen=True, eq=False)
class StepTraffic:
    """One step, or `count` equal steps. Each array has a row for every kind of rank in the step.

    Traffic is counted in items, each of one chunk and one head group. Its columns are q, kv, results for queries
    (forward: out; backward: dq) and results for keys (backward: dkv).
    """

    count: int
    work: np.ndarray  # area of the score matrix in squared chunks of a Ulysses group; kernel calls
    same_host: np.ndarray  # items received from ranks of the same host
    other_hosts: np.ndarray  # items received from other hosts
    gathered: np.ndarray  # items of q and kv held for this step and the next

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepTraffic):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, x), getattr(other, x))
            for x in ("count", "work", "same_host", "other_hosts", "gathered")
        )


@dataclass(frozen=True, eq=False)
class Traffic:
    """Traffic of all steps of a pass. Forward and backward have the same tiles; `schedule` is without steps."""

    schedule: Schedule
    steps: tuple[StepTraffic, ...]
    results: np.ndarray  # results for queries and for keys that a rank reduces; a row for every kind of rank
    accumulates: tuple[bool, bool]  # results for queries, for keys come in several parts

    @property
    def travels(self) -> np.ndarray:
        """True for each of the four columns that has traffic."""
        return np.sum([step.same_host.sum(0) + step.other_hosts.sum(0) for step in self.steps], axis=0) > 0


class _Row(NamedTuple):
    """One step of the assignment, as arrays."""

    work: np.ndarray  # (Ulysses groups, 2): area and kernel calls, as in `StepTraffic.work`
    q: np.ndarray  # (3, entries): Ulysses group, chunk and head group of every query chunk of every tile
    kv: np.ndarray  # the same for every key/value chunk


@lru_cache(maxsize=1024)
def count_traffic(
    name: str,
    world: int,
    gpus_per_host: int,
    head_groups: int = 1,
    ulysses_size: int | None = None,
    every_step: bool = False,
) -> Traffic:
    """Counts the traffic of `make_schedule`'s table, if `gpus_per_host` neighbouring ranks share a host.

    `every_step` turns off the sampling of long runs of steps. Raises ValueError as `make_schedule`.
    """
    schedule = schedule_without_steps(name, world, head_groups, ulysses_size)
    fewer = schedule_without_steps(name, world, min(head_groups, COUNTED_HEAD_GROUPS), ulysses_size)
    counting = _TrafficCounter(schedule, gpus_per_host, assign_tiles(fewer))
    steps = []
    for t, count in counting.sampled_steps(every_step):
        if t == 1 and head_groups > COUNTED_HEAD_GROUPS:  # the middle group's step counts for all left out
            count += head_groups - COUNTED_HEAD_GROUPS
        step = counting.step(t)
        if step.work.any() or step.same_host.any() or step.other_hosts.any():
            steps.append(replace(step, count=count))
        counting.add_results(t, count)
    return Traffic(schedule, tuple(steps), _distinct_rows(counting.results), counting.accumulates())


class _TrafficCounter:
    """Counter over the steps of one assignment of tiles to Ulysses groups."""

    def __init__(self, schedule: Schedule, gpus_per_host: int, assignment: Assignment) -> None:
        group_layout = schedule.layout.group_layout
        self.assignment, self.ulysses_groups, self.chunks = assignment, group_layout.world, group_layout.chunk_count
        self.ulysses_size, self.gpus_per_host = schedule.ulysses_size, gpus_per_host
        self.head_groups = 1 + max(tile.head_group for tiles in assignment[-1] for tile in tiles)
        self.chunk_groups = np.array([group_layout.home(chunk) for chunk in range(self.chunks)])
        self.step = lru_cache(maxsize=None)(self._step)
        self.row = lru_cache(maxsize=3)(self._row)
        self.needs = lru_cache(maxsize=3)(self._needs)
        self.results = np.zeros((self.ulysses_groups, 2))  # for queries and for keys, reduced by each group
        # For queries and for keys: the chunks and head groups with a result, and whether one had several.
        self._seen = np.zeros((2, self.head_groups * self.chunks), dtype=bool)
        self._several = [False, False]

    def sampled_steps(self, every_step: bool) -> list[tuple[int, int]]:
        """Returns (step, number of steps it stands for), from before the first tiles until after the last."""
        first, last = -1, len(self.assignment)
        if every_step or last - first < 4 * EDGE_STEPS:
            chosen = list(range(first, last + 1))
        else:
            inner = (first + EDGE_STEPS, (first + last) // 2, last - EDGE_STEPS)
            found = {*range(first, inner[0]), *range(inner[2] + 1, last + 1), *inner}
            for low, high in pairwise(inner):
                found |= self._changes(low, high)
            chosen = sorted(found)
        return [(t, after - t) for t, after in pairwise([*chosen, last + 1])]

    def _changes(self, low: int, high: int) -> set[int]:
        """Finds the steps between two at which counts change, by bisection."""
        if high - low < 2 or self.step(low) == self.step(high):
            return set()
        middle = (low + high) // 2
        return {middle} | self._changes(low, middle) | self._changes(middle, high)

    def _row(self, t: int) -> _Row:
        tiles = self.assignment[t] if 0 <= t < len(self.assignment) else [()] * self.ulysses_groups
        flat = [tile for mine in tiles for tile in mine]
        group = np.repeat(np.arange(self.ulysses_groups), [len(mine) for mine in tiles])
        area = np.array([_area(tile) for tile in flat])
        heads = np.array([tile.head_group for tile in flat], dtype=np.int64)
        work = np.stack(
            [np.bincount(group, area, self.ulysses_groups), np.bincount(group, minlength=self.ulysses_groups)], axis=1
        )
        sides = ([tile.q for tile in flat], [tile.kv for tile in flat])
        return _Row(work, *(_tile_entries(group, chunks, heads) for chunks in sides))

    def _needs(self, t: int) -> np.ndarray:
        """Returns a mask (head group, q or kv, chunk, group) of the operands that the tiles of a step read."""
        row = self.row(t)
        needs = np.zeros((self.head_groups, 2, self.chunks, self.ulysses_groups), dtype=bool)
        for item, (group, chunk, heads) in enumerate((row.q, row.kv)):
            needs[heads, item, chunk, group] = True
        return needs

    def _step(self, t: int) -> StepTraffic:
        coming = self.needs(t + 1) & ~self.needs(t)
        wanted = [coming[:, item].nonzero() for item in (0, 1)]
        arrivals = [(group, self.chunk_groups[chunk]) for _, chunk, group in wanted]
        arrivals += [(self.chunk_groups[chunk], group) for group, chunk, _ in (self.row(t - 1).q, self.row(t - 1).kv)]
        near, far = zip(*(self._received(dst, src) for dst, src in arrivals), strict=True)
        same_host, other_hosts = (_distinct_rows(np.stack(columns, axis=1)) for columns in (near, far))
        return StepTraffic(
            1, _distinct_rows(self.row(t).work), same_host, other_hosts, _distinct_rows(self._gathered(t))
        )

    def _received(self, dst: np.ndarray, src: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts items per rank, from its host and from others: a rank of group dst receives from all ranks of src."""
        u, h = self.ulysses_size, self.gpus_per_host
        rank = dst[:, None] * u + np.arange(u)
        host, src = rank // h, src[:, None]
        near = np.clip(np.minimum((host + 1) * h, (src + 1) * u) - np.maximum(host * h, src * u), 0, None)
        world, flat = self.ulysses_groups * u, rank.ravel()
        counts = (np.bincount(flat, x.ravel(), world) for x in (near - (src == dst[:, None]), u - near))
        same_host, other_hosts = counts
        return same_host, other_hosts

    def _gathered(self, t: int) -> np.ndarray:
        """Counts gathered items: all of q or kv that a group's tiles read, if some of them are remote."""
        both = self.needs(t) | self.needs(t + 1)
        away = (self.chunk_groups[:, None] != np.arange(self.ulysses_groups)) | (self.ulysses_size > 1)
        gathered = [self.ulysses_size * x.sum((0, 1)) * (x & away).any((0, 1)) for x in (both[:, 0], both[:, 1])]
        return np.stack(gathered, axis=1)

    def add_results(self, t: int, count: int) -> None:
        """Counts step t's results `count` times, for the groups that reduce them."""
        row = self.row(t)
        for i, (_, chunk, heads) in enumerate((row.q, row.kv)):
            now = np.bincount(heads * self.chunks + chunk, minlength=self.head_groups * self.chunks)
            self._several[i] |= bool((self._seen[i] & (now > 0)).any() or (i == 0 and (now > 1).any()))
            self._seen[i] |= now > 0
            by_group = np.bincount(self.chunk_groups[chunk], minlength=self.ulysses_groups)
            self.results[:, i] += count * self.ulysses_size * by_group

    def accumulates(self) -> tuple[bool, bool]:
        """Returns whether outputs come in several parts, and gradients of keys at several of the steps added."""
        return self._several[0], self._several[1]


def _area(tile: Tile) -> float:
    masked = 0.0 if tile.mask is Mask.FULL else len(tile.q) ** 2 / 2
    return len(tile.q) * len(tile.kv) - masked


def _tile_entries(group: np.ndarray, chunks: Sequence[tuple[int, ...]], heads: np.ndarray) -> np.ndarray:
    """Returns (group, chunk, head group) of every chunk of every tile."""
    sizes = [len(x) for x in chunks]
    every = np.fromiter(chain.from_iterable(chunks), dtype=np.int64, count=sum(sizes))
    return np.stack([np.repeat(group, sizes), every, np.repeat(heads, sizes)])


def _distinct_rows(rows: np.ndarray) -> np.ndarray:
    """Returns each distinct row once."""
    return np.array(sorted({*map(tuple, rows.tolist())}))  # np.unique is many times slower for so few
