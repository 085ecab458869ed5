"""Table of a schedule: the tiles of every rank at every step, and the moves that follow from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from lightseq.schedule.layout import Layout
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.segments import Segments


class Mask(Enum):
    """Visible keys of a query, by index inside the tile."""

    FULL = "full"
    CAUSAL = "causal"  # aligned bottom-right: the last query sees every key
    STRICT = "strict"  # key index < query index, for striped, if the key's rank comes after the query's


class Tile(NamedTuple):
    """One kernel call: the queries of some chunks against the keys and values of some, for one head group.

    `q` and `kv` are chunk numbers in rising order; `head_group` counts from 0 (see `Schedule`). With packed documents
    or a window, segments take the place of the mask.
    """

    q: tuple[int, ...]
    kv: tuple[int, ...]
    mask: Mask | Segments
    head_group: int = 0


class Move(NamedTuple):
    """One item of one chunk that travels from src to dst. Both ends read the same object, so they cannot disagree.

    An item is a set of tensors that travel together. Operands: kv (k and v), q (forward: q; backward: q, dout, out
    and lse, without q if the schedule reuses the gathered one). Results: out (out and lse), dq, dkv; `tile` is the
    index of the tile of the sending rank that computed them in the step before.
    """

    item: str
    chunk: int
    src: int
    dst: int
    head_group: int = 0
    tile: int = 0

    @property
    def is_result(self) -> bool:
        return self.item in ("out", "dq", "dkv")


@dataclass(frozen=True)
class Step:
    """Tiles of every rank, and the moves in flight while they compute."""

    tiles: tuple[tuple[Tile, ...], ...]  # indexed by rank
    moves: tuple[Move, ...]


Assignment = Sequence[Sequence[tuple[Tile, ...]]]  # [step][rank]; before `with_ulysses` [step][Ulysses group]


@dataclass(frozen=True)
class LazyAssignment(Sequence[Sequence[tuple[Tile, ...]]]):
    """Assignment that makes a step when it is read: for a thousand ranks it has a million tiles."""

    steps: int
    make: Callable[[int], Sequence[tuple[Tile, ...]]]

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, t: Any) -> Any:
        if isinstance(t, slice):
            return [self[i] for i in range(*t.indices(self.steps))]
        if not -self.steps <= t < self.steps:
            raise IndexError(t)
        return self.make(t % self.steps)


Items = tuple[str, ...]
OPERANDS: Items = ("q", "kv")


@dataclass(frozen=True, eq=False)
class Schedule:
    """A distributed attention algorithm: a layout and the steps of its forward and backward pass.

    Heads are cut into `total_head_groups` equal groups, and a tile computes one of them. Each rank of a Ulysses group
    computes `head_groups_per_rank` of them, one after the other. If there are more groups than key/value heads,
    neighbouring groups share a key/value head.
    """

    name: str
    layout: Layout
    total_head_groups: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    nodes: Nodes | None = None  # a packed sequence's; None: one document of any length
    window: int | None = None  # keys that a query sees, with its own; None: all before it
    # Each rank gathers the whole q, k and v of its heads, so they can be saved for the backward pass, in place of the
    # rank's own q, k and v.
    can_keep_gathered: bool = False
    # This backward pass reads the q, k and v that the forward pass gathered; they do not move again.
    reuses_gathered: bool = False

    @property
    def world(self) -> int:
        return self.layout.world

    def __str__(self) -> str:
        inside = f"heads split over {self.ulysses_size} ranks" if self.ulysses_size > 1 else ""
        groups = self.head_groups_per_rank
        per_rank = f"{groups} head groups" if groups > 1 else ""
        notes = ", ".join(filter(None, (inside, per_rank)))
        return self.name + (f" ({notes})" if notes else "")

    @property
    def head_groups_per_rank(self) -> int:
        """Head groups that a rank computes one after the other: the `head_groups` of `make_schedule`."""
        return self.total_head_groups // self.ulysses_size

    @property
    def ulysses_size(self) -> int:
        """Ranks in a Ulysses group (see `Layout`)."""
        return self.layout.ulysses

    def steps(self, backward: bool) -> tuple[Step, ...]:
        """Returns the steps of the forward or the backward pass."""
        return self.backward if backward else self.forward

    def gathered_items(self, backward: bool) -> Items:
        """Returns the operand items that a rank gathers for its tiles in a pass.

        A backward pass that reuses q, k and v still gathers the item `q`, which then holds dout, out and lse.
        """
        return ("q",) if backward and self.reuses_gathered else OPERANDS

    @cached_property
    def with_gathered_backward(self) -> "Schedule":
        """The same schedule, whose backward pass reads gathered q, k and v. Needs `can_keep_gathered`."""
        assert self.can_keep_gathered, f"{self} cannot keep gathered tensors"
        rows = [step.tiles for step in self.backward if any(step.tiles)]
        backward = derive_steps(self.layout, rows, backward=True, gathered_items=("q",))
        return replace(self, backward=backward, reuses_gathered=True)


def result_chunks(tile: Tile, backward: bool) -> dict[str, tuple[int, ...]]:
    """Returns the chunks of a tile's results, by item."""
    return {"dq": tile.q, "dkv": tile.kv} if backward else {"out": tile.q}


# ---- moves, derived from the tiles -----------------------------------------------------------------------------------


def derive_steps(
    layout: Layout,
    assignment: Sequence[Sequence[tuple[Tile, ...]]],
    backward: bool = False,
    gathered_items: Items = OPERANDS,
) -> tuple[Step, ...]:
    """Derives the moves. Remote operands travel one step before their tile, results one step after it.

    An operand that the next step reads too stays and does not travel again.
    """
    rows = [list(row) for row in assignment]
    if any(_operands(layout, rank, tile, gathered_items) for rank, tiles in enumerate(rows[0]) for tile in tiles):
        rows.insert(0, [()] * layout.world)  # nothing to compute yet: the first operands travel
    # One more list than rows: results of the last row, if any, go to a step of their own.
    moves: list[list[Move]] = [[] for _ in range(len(rows) + 1)]
    held: set[Move] = set()
    for t, row in enumerate(rows):
        needed: set[Move] = set()
        for rank, tiles in enumerate(row):
            for i, tile in enumerate(tiles):
                for item, chunk in _operands(layout, rank, tile, gathered_items):
                    needed.add(Move(item, chunk, layout.home(chunk), rank, tile.head_group))
                for item, chunk in _results(layout, rank, tile, backward):
                    moves[t + 1].append(Move(item, chunk, rank, layout.home(chunk), tile.head_group, i))
        moves[t - 1] += needed - held  # at t = 0 nothing is needed
        held = needed
    if moves[-1]:
        rows.append([()] * layout.world)  # nothing left to compute: the last results travel
    return tuple(Step(tuple(row), tuple(sorted(moves[t]))) for t, row in enumerate(rows))


def _operands(layout: Layout, rank: int, tile: Tile, gathered_items: Items) -> list[tuple[str, int]]:
    """Returns the operands of a tile that its rank does not hold."""
    needs = [("q", chunk) for chunk in tile.q] + [("kv", chunk) for chunk in tile.kv]
    return [(item, chunk) for item, chunk in needs if item in gathered_items and layout.home(chunk) != rank]


def _results(layout: Layout, rank: int, tile: Tile, backward: bool) -> list[tuple[str, int]]:
    """Returns the results that a tile computes for other ranks."""
    made = result_chunks(tile, backward)
    return [(item, chunk) for item, chunks in made.items() for chunk in chunks if layout.home(chunk) != rank]
