"""What a schedule asks of every rank and its links, step by step, as counts that hold for any length and head size.

The counts are those of the table, taken from the tiles of the places before they become ranks and moves: a table for a
thousand ranks has millions of moves. Of a long run of steps that ask the same only some are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from lightseq.schedule.algorithms import assign_tiles, schedule_without_steps
from lightseq.schedule.table import Assignment, Mask, Schedule, Tile

FEW_GROUPS = 3  # head groups after the first and before the last are alike
EDGE_STEPS = 3  # at either end, never taken for others: first operands, last results, half steps


@dataclass(frozen=True, eq=False)
class StepTraffic:
    """One step, or `count` steps alike. Each array has a row for every kind of rank in the step.

    What moves is counted in bundles: a chunk of one head group. Its columns are q, kv, results for queries (forward:
    out; backward: dq) and results for keys (backward: dkv).
    """

    count: int
    work: np.ndarray  # area of score matrix in chunks of a place squared, kernel calls
    same_host: np.ndarray  # bundles received from ranks of the same host
    other_hosts: np.ndarray  # bundles received from other hosts
    gathered: np.ndarray  # bundles of q and kv gathered for this step and already for the next

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepTraffic):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, x), getattr(other, x))
            for x in ("count", "work", "same_host", "other_hosts", "gathered")
        )


@dataclass(frozen=True, eq=False)
class Traffic:
    """All steps of a pass; forward and backward have the same tiles. `schedule` has no steps of its own."""

    schedule: Schedule
    steps: tuple[StepTraffic, ...]
    results: np.ndarray  # results for queries, for keys that a rank takes in; a row for every kind of rank
    accumulates: tuple[bool, bool]  # whether results for queries, for keys come in parts at several steps

    @property
    def travels(self) -> np.ndarray:
        """Whether each of the four columns moves at all."""
        return np.sum([step.same_host.sum(0) + step.other_hosts.sum(0) for step in self.steps], axis=0) > 0


class _Row(NamedTuple):
    """A row of the assignment: tiles as arrays of place, and chunks as arrays of (place, chunk, head group)."""

    work: np.ndarray
    q: np.ndarray
    kv: np.ndarray


@lru_cache(maxsize=1024)
def count_traffic(
    name: str,
    world: int,
    gpus_per_host: int,
    head_groups: int = 1,
    ulysses_size: int | None = None,
    every_step: bool = False,
) -> Traffic:
    """The load of `make_schedule`'s table. Raises ValueError for what cannot be had."""
    schedule = schedule_without_steps(name, world, head_groups, ulysses_size)
    fewer = schedule_without_steps(
        name, world, min(head_groups, FEW_GROUPS), ulysses_size
    )  # a group more is a middle step more
    counting = _TrafficCounter(schedule, gpus_per_host, assign_tiles(fewer))
    steps, results = [], np.zeros((counting.places, 2))
    for t, count in counting.sampled_steps(every_step):
        count += (head_groups - FEW_GROUPS) * (t == 1 and head_groups > FEW_GROUPS)
        step = counting.step(t)
        if step.work.any() or step.same_host.any() or step.other_hosts.any():
            steps.append(replace(step, count=count))
        results += count * counting.results(t)
    return Traffic(schedule, tuple(steps), _distinct_rows(results), counting.accumulates())


class _TrafficCounter:
    """Counts the steps of one assignment of tiles to places."""

    def __init__(self, schedule: Schedule, gpus_per_host: int, assignment: Assignment) -> None:
        outer = schedule.layout.outer
        self.assignment, self.places, self.chunks = assignment, outer.world, outer.chunk_count
        self.ulysses, self.gpus_per_host = schedule.ulysses_size, gpus_per_host
        self.groups = 1 + max(tile.heads for tiles in assignment[-1] for tile in tiles)
        self.homes = np.array([outer.home(chunk) for chunk in range(self.chunks)])
        self.step = lru_cache(maxsize=None)(self._step)
        self.row = lru_cache(maxsize=3)(self._row)
        self.needs = lru_cache(maxsize=3)(self._needs)
        self._seen = np.zeros((2, self.groups * self.chunks), dtype=bool)
        self._again = [False, False]

    def sampled_steps(self, every_step: bool) -> list[tuple[int, int]]:
        """(step, how many it stands for): from before the first row of tiles until after the last."""
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
        """Steps between two, by halving where these differ: each found stands for those after it."""
        if high - low < 2 or self.step(low) == self.step(high):
            return set()
        middle = (low + high) // 2
        return {middle} | self._changes(low, middle) | self._changes(middle, high)

    def _row(self, t: int) -> _Row:
        tiles = self.assignment[t] if 0 <= t < len(self.assignment) else [()] * self.places
        flat = [tile for mine in tiles for tile in mine]
        place = np.repeat(np.arange(self.places), [len(mine) for mine in tiles])
        area = np.array([_area(tile) for tile in flat])
        heads = np.array([tile.heads for tile in flat], dtype=np.int64)
        work = np.stack([np.bincount(place, area, self.places), np.bincount(place, minlength=self.places)], axis=1)
        sides = ([tile.q for tile in flat], [tile.kv for tile in flat])
        return _Row(work, *(_tile_entries(place, chunks, heads) for chunks in sides))

    def _needs(self, t: int) -> np.ndarray:
        """What the tiles of a row read: true at (head group, q or kv, chunk, place)."""
        row = self.row(t)
        needs = np.zeros((self.groups, 2, self.chunks, self.places), dtype=bool)
        for item, (place, chunk, heads) in enumerate((row.q, row.kv)):
            needs[heads, item, chunk, place] = True
        return needs

    def _step(self, t: int) -> StepTraffic:
        coming = self.needs(t + 1) & ~self.needs(t)
        wanted = [coming[:, item].nonzero() for item in (0, 1)]
        arrivals = [(place, self.homes[chunk]) for _, chunk, place in wanted]
        arrivals += [(self.homes[chunk], place) for place, chunk, _ in (self.row(t - 1).q, self.row(t - 1).kv)]
        near, far = zip(*(self._received(dst, src) for dst, src in arrivals), strict=True)
        same_host, other_hosts = (_distinct_rows(np.stack(columns, axis=1)) for columns in (near, far))
        return StepTraffic(
            1, _distinct_rows(self.row(t).work), same_host, other_hosts, _distinct_rows(self._gathered(t))
        )

    def _received(self, dst: np.ndarray, src: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bundles per rank, from its host and from others: each rank of place dst hears all ranks of place src."""
        u, h = self.ulysses, self.gpus_per_host
        rank = dst[:, None] * u + np.arange(u)
        host, src = rank // h, src[:, None]
        near = np.clip(np.minimum((host + 1) * h, (src + 1) * u) - np.maximum(host * h, src * u), 0, None)
        world, flat = self.places * u, rank.ravel()
        counts = (np.bincount(flat, x.ravel(), world) for x in (near - (src == dst[:, None]), u - near))
        same_host, other_hosts = counts
        return same_host, other_hosts

    def _gathered(self, t: int) -> np.ndarray:
        """Gathered bundles: all that a place's tiles read of an item, where some of it is not there already."""
        both = self.needs(t) | self.needs(t + 1)
        away = (self.homes[:, None] != np.arange(self.places)) | (self.ulysses > 1)
        gathered = [self.ulysses * x.sum((0, 1)) * (x & away).any((0, 1)) for x in (both[:, 0], both[:, 1])]
        return np.stack(gathered, axis=1)

    def results(self, t: int) -> np.ndarray:
        """Results of row t by the place that takes them in."""
        row, found = self.row(t), []
        for i, (_, chunk, heads) in enumerate((row.q, row.kv)):
            now = np.bincount(heads * self.chunks + chunk, minlength=self.groups * self.chunks)
            self._again[i] |= bool((self._seen[i] & (now > 0)).any() or (i == 0 and (now > 1).any()))
            self._seen[i] |= now > 0
            found.append(self.ulysses * np.bincount(self.homes[chunk], minlength=self.places))
        return np.stack(found, axis=1)

    def accumulates(self) -> tuple[bool, bool]:
        """Whether parts of a result were met again: the output at all, gradients of keys in another step."""
        return self._again[0], self._again[1]


def _area(tile: Tile) -> float:
    masked = 0.0 if tile.mask is Mask.FULL else len(tile.q) ** 2 / 2
    return len(tile.q) * len(tile.kv) - masked


def _tile_entries(place: np.ndarray, chunks: Sequence[tuple[int, ...]], heads: np.ndarray) -> np.ndarray:
    """(place, chunk, head group) of every chunk of every tile."""
    sizes = [len(x) for x in chunks]
    every = np.fromiter(chain.from_iterable(chunks), dtype=np.int64, count=sum(sizes))
    return np.stack([np.repeat(place, sizes), every, np.repeat(heads, sizes)])


def _distinct_rows(rows: np.ndarray) -> np.ndarray:
    """Each distinct row once."""
    return np.array(sorted({*map(tuple, rows.tolist())}))  # np.unique is many times slower for so few
