"""Who computes which tile of the score matrix when; sends, receives and the backward pass follow from that table.

To add a schedule, write a function that says which tiles every rank computes at every step, and name it in `SCHEDULES`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from lightseq.layout import Kind, Layout
from lightseq.segments import Segments


class Mask(Enum):
    """Which keys of a tile a query sees, by index inside the tile."""

    FULL = "full"
    CAUSAL = "causal"  # aligned bottom-right: the last query sees every key
    STRICT = "strict"  # key index < query index, as striped needs where the key's rank comes after the query's


class Tile(NamedTuple):
    """One kernel call: query chunks against key/value chunks. `heads` is the group of heads it computes.

    Where a sequence holds several documents, segments take the place of the mask.
    """

    q: tuple[int, ...]
    kv: tuple[int, ...]
    mask: Mask | Segments
    heads: int = 0


class Move(NamedTuple):
    """One bundle of tensors leaving src for dst. Both ends read the same object, so they cannot disagree.

    Operands: kv (k and v), q (forward: q; backward: q, dout, out, lse; without q where the schedule keeps it). Results:
    out (out and lse), dq, dkv; `tile` says which of its rank's tiles in the step before made them.
    """

    item: str
    chunk: int
    src: int
    dst: int
    heads: int = 0
    tile: int = 0

    @property
    def is_result(self) -> bool:
        return self.item in ("out", "dq", "dkv")


@dataclass(frozen=True)
class Step:
    """What happens side by side: every rank's tiles, and the moves in flight while they compute."""

    tiles: tuple[tuple[Tile, ...], ...]  # indexed by rank
    moves: tuple[Move, ...]


Assignment = Sequence[Sequence[tuple[Tile, ...]]]  # [step][rank]


@dataclass(frozen=True)
class Rows(Sequence[Sequence[tuple[Tile, ...]]]):
    """An assignment whose steps are made when they are asked for: that of a thousand ranks has a million tiles."""

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
    """A distributed attention algorithm: a layout and the steps of its forward and backward pass."""

    name: str
    layout: Layout
    head_groups: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    boundaries: tuple[int, ...] | None = None  # where documents begin, and the end; None: one document of any length
    keeps: bool = False  # q, k and v that the forward pass gathered are there in the backward pass: none moves again

    @property
    def world(self) -> int:
        return self.layout.world

    def __str__(self) -> str:
        inside = f"heads split over {self.ulysses_size} ranks" if self.ulysses_size > 1 else ""
        turns = f"heads in {self.turns} turns" if self.turns > 1 else ""
        notes = ", ".join(filter(None, (inside, turns)))
        return self.name + (f" ({notes})" if notes else "")

    @property
    def turns(self) -> int:
        """Groups of heads that a rank computes one after the other: the head_groups that were asked for."""
        return self.head_groups // self.ulysses_size

    @property
    def ulysses_size(self) -> int:
        """Ranks that share each place of the sequence, each with heads of its own."""
        return self.layout.ulysses

    @cached_property
    def queries_travel(self) -> bool:
        return any(move.item == "q" for step in self.backward for move in step.moves)

    def gathers(self, backward: bool) -> "Items":
        """What travels to a tile in a pass, if it is not there."""
        return ("q",) if backward and self.keeps else OPERANDS

    @property
    def can_keep(self) -> bool:
        """Whether what a rank gathers can take the place of its own q, k and v, which no tile of its reads."""
        return SCHEDULES[self.name].assign is whole and self.world > 1

    @cached_property
    def keeping(self) -> "Schedule":
        """The same, but that the backward pass finds what the forward pass gathered. Only who `can_keep` has it."""
        assert self.can_keep, f"{self} needs its ranks' own tensors again"
        rows = [step.tiles for step in self.backward if any(step.tiles)]
        return replace(self, backward=plan(self.layout, rows, True, gathers=("q",)), keeps=True)


# ---- the algorithms: which tiles, nothing else ---------------------------------------------------------------------


def ring(layout: Layout) -> Assignment:
    """Ring attention (arXiv 2310.01889): at step t rank r meets the keys of rank r - t. Early ranks idle."""
    shards = [layout.chunks(rank) for rank in range(layout.world)]
    return Rows(
        layout.world, lambda t: [(_tile(shards[r], shards[r - t]),) if t <= r else () for r in range(layout.world)]
    )


def striped(layout: Layout) -> Assignment:
    """Striped attention (arXiv 2311.09431): every pair of ranks shares half a tile."""
    world = layout.world

    def tile(r: int, j: int) -> Tile:
        return Tile((r,), (j,), Mask.CAUSAL if j <= r else Mask.STRICT)

    return Rows(world, lambda t: [(tile(r, (r - t) % world),) for r in range(world)])


def zigzag(layout: Layout) -> Assignment:
    """Ring over the zigzag layout: after the local step every step is half a full tile for every rank."""
    world = layout.world
    held = [layout.chunks(rank) for rank in range(world)]

    def tile(r: int, j: int) -> Tile:
        mine, theirs = held[r], held[j]
        if j == r:
            return Tile(mine, mine, Mask.CAUSAL)
        return Tile(mine, theirs[:1], Mask.FULL) if j < r else Tile(mine[1:], theirs, Mask.FULL)

    return Rows(world, lambda t: [(tile(r, (r - t) % world),) for r in range(world)])


def balanced(layout: Layout) -> Assignment:
    """DistFlashAttn (arXiv 2310.03294): a rank whose own queries are done computes for one that still has work.

    In an even world the last step has work for half of the ranks only. There the two ranks of a pair, the one with the
    queries and the one with the keys, take one half of the queries each, so that even worlds balance too.
    """
    world = layout.world
    shards = [layout.chunks(rank) for rank in range(world)]

    def tile(t: int, r: int) -> Tile:
        if 2 * t == world:
            first, second = max(r, (r + t) % world), min(r, (r + t) % world)
            return _tile(shards[first][:1] if r == first else shards[first][1:], shards[second])
        return _tile(shards[r], shards[r - t]) if r >= t else _tile(shards[world + r - t], shards[r])

    return Rows(world // 2 + 1, lambda t: [(tile(t, r),) for r in range(world)])


def prefix(layout: Layout, head_groups: int = 1) -> Assignment:
    """Every query chunk against its whole prefix in one kernel call: partial outputs are never merged.

    The key/value chunks of a group of heads are fetched while the group before it computes.
    """

    def tiles(rank: int, heads: int) -> tuple[Tile, ...]:
        return tuple(Tile((c,), tuple(range(c + 1)), Mask.CAUSAL, heads) for c in layout.chunks(rank))

    return [[tiles(rank, heads) for rank in range(layout.world)] for heads in range(head_groups)]


def whole(layout: Layout, head_groups: int = 1) -> Assignment:
    """One place that holds the whole sequence: what is left of a schedule where all ranks share the heads."""
    everything = layout.chunks(0)
    return [[(Tile(everything, everything, Mask.CAUSAL, heads),)] for heads in range(head_groups)]


def with_ulysses(assignment: Assignment, ulysses: int) -> Assignment:
    """The same tiles for `ulysses` ranks in each place, each with its own heads (DeepSpeed-Ulysses, arXiv 2309.14509).

    Over a ring of several places this is the 2-D scheme of USP (arXiv 2405.07719).
    """

    def pieces(chunks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chunk * ulysses + piece for chunk in chunks for piece in range(ulysses))

    def split(tile: Tile, u: int) -> Tile:
        return Tile(pieces(tile.q), pieces(tile.kv), tile.mask, tile.heads * ulysses + u)

    return [[tuple(split(t, u) for t in tiles) for tiles in row for u in range(ulysses)] for row in assignment]


def _tile(q: tuple[int, ...], kv: tuple[int, ...]) -> Tile:
    return Tile(q, kv, Mask.CAUSAL if q == kv else Mask.FULL)


@dataclass(frozen=True)
class Algorithm:
    """A row of the table of schedules."""

    kind: Kind
    chunks_per_rank: int
    assign: Callable[..., Assignment]
    has_head_groups: bool = False


SCHEDULES: dict[str, Algorithm] = {
    "ring": Algorithm("contiguous", 1, ring),
    "striped": Algorithm("striped", 1, striped),
    "zigzag": Algorithm("zigzag", 2, zigzag),
    "balanced": Algorithm("contiguous", 2, balanced),
    "prefix": Algorithm("zigzag", 2, prefix, has_head_groups=True),
    "ulysses": Algorithm("contiguous", 1, whole, has_head_groups=True),
    "usp": Algorithm("zigzag", 2, prefix, has_head_groups=True),
}


def make_schedule(name: str, world: int, head_groups: int = 1, ulysses_size: int | None = None) -> Schedule:
    """The schedule of that name for a number of ranks.

    `ulysses_size` ranks share a place of the sequence and split its heads: all of them under `ulysses`, half of them
    under `usp` unless it is given, else none. `head_groups` is how often a rank's heads are cut, to be computed one
    after the other. Raises ValueError for a name, head groups or a ulysses_size that cannot be had.
    """
    empty = outline(name, world, head_groups, ulysses_size)
    assignment = assign(empty)
    if empty.ulysses_size > 1:
        assignment = with_ulysses(assignment, empty.ulysses_size)
    return replace(empty, forward=plan(empty.layout, assignment), backward=plan(empty.layout, assignment, True))


def outline(name: str, world: int, head_groups: int = 1, ulysses_size: int | None = None) -> Schedule:
    """The schedule without its steps: enough to ask whether it can be had, at no cost for any number of ranks."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    for what, number in (("ranks", world), ("head_groups", head_groups), ("ulysses_size", ulysses_size)):
        if number is not None and number < 1:
            raise ValueError(f"a schedule needs at least 1 as its {what}, not {number}")
    algorithm = SCHEDULES[name]
    if head_groups != 1 and not algorithm.has_head_groups:
        raise ValueError(f"schedule {name} computes all heads at once; head groups ({head_groups}) need prefix")
    ulysses = _ulysses_size(name, world, ulysses_size)
    layout = Layout(algorithm.kind, world, algorithm.chunks_per_rank, ulysses)
    return Schedule(name, layout, head_groups * ulysses, (), ())


def assign(schedule: Schedule) -> Assignment:
    """The tiles of a schedule's places, before the ranks of a place share out its heads."""
    algorithm, outer = SCHEDULES[schedule.name], schedule.layout.outer
    if not algorithm.has_head_groups:
        return algorithm.assign(outer)
    return algorithm.assign(outer, schedule.turns)


def check_heads(schedule: Schedule, heads: int, kv_heads: int) -> None:
    """Raises ValueError unless the heads can be cut into the schedule's head groups; key/value heads may be shared."""
    groups = schedule.head_groups
    if heads % groups or (kv_heads % groups and groups % kv_heads):
        given = schedule.ulysses_size > 1 and schedule.name not in ("ulysses", "usp")
        remedy = "leave --ulysses_size out" if given else "prefix takes any number"
        raise ValueError(
            f"schedule {schedule.name} over {schedule.world} ranks cuts heads in {groups}, which {heads} query "
            f"and {kv_heads} key/value heads do not allow; {remedy}"
        )


def _ulysses_size(name: str, world: int, asked: int | None) -> int:
    if name == "ulysses":
        if asked not in (None, world):
            raise ValueError(
                f"schedule ulysses splits heads over all {world} ranks, not {asked}; usp splits them over a part"
            )
        return world
    size = asked or (world // 2 if name == "usp" else 1)
    if name == "usp" and not 1 < size < world:
        raise ValueError(
            f"schedule usp needs more than one place and more than one rank in each: {world} ranks with ulysses_size "
            f"{size} are {'ulysses' if size == world else 'prefix'}"
        )
    if world % size:
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        raise ValueError(f"ulysses_size {size} does not divide {world} ranks; choose one of {divisors}")
    return size


# ---- what follows from the tiles -----------------------------------------------------------------------------------


def plan(
    layout: Layout, assignment: Sequence[Sequence[tuple[Tile, ...]]], backward: bool = False, gathers: Items = OPERANDS
) -> tuple[Step, ...]:
    """The moves: remote operands travel one step before their tile, results one step after it.

    An operand that the next step needs as well stays where it is.
    """
    rows = [list(row) for row in assignment]
    if any(_operands(layout, rank, tile, gathers) for rank, tiles in enumerate(rows[0]) for tile in tiles):
        rows.insert(0, [()] * layout.world)  # nothing to compute yet: the first operands travel
    moves: list[list[Move]] = [[] for _ in range(len(rows) + 1)]
    held: set[Move] = set()
    for t, row in enumerate(rows):
        needed: set[Move] = set()
        for rank, tiles in enumerate(row):
            for i, tile in enumerate(tiles):
                for item, chunk in _operands(layout, rank, tile, gathers):
                    needed.add(Move(item, chunk, layout.home(chunk), rank, tile.heads))
                for item, chunk in _results(layout, rank, tile, backward):
                    moves[t + 1].append(Move(item, chunk, rank, layout.home(chunk), tile.heads, i))
        moves[t - 1] += needed - held
        held = needed
    if moves[-1]:
        rows.append([()] * layout.world)  # nothing left to compute: the last results travel
    return tuple(Step(tuple(row), tuple(sorted(moves[t]))) for t, row in enumerate(rows))


def _operands(layout: Layout, rank: int, tile: Tile, gathers: Items) -> list[tuple[str, int]]:
    """What a rank needs for a tile and does not hold itself."""
    needs = [("q", chunk) for chunk in tile.q] + [("kv", chunk) for chunk in tile.kv]
    return [(item, chunk) for item, chunk in needs if item in gathers and layout.home(chunk) != rank]


def _results(layout: Layout, rank: int, tile: Tile, backward: bool) -> list[tuple[str, int]]:
    """What a tile computes for other ranks."""
    made = [("dq" if backward else "out", chunk) for chunk in tile.q]
    made += [("dkv", chunk) for chunk in tile.kv] if backward else []
    return [(item, chunk) for item, chunk in made if layout.home(chunk) != rank]
