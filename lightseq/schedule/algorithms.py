"""Attention schedules: each is a function that assigns tiles to ranks and steps, and a row of `SCHEDULES`.

To add one, write such a function and add its row. Layout, moves, buffers, the backward pass, the proof, the price for
`auto` and the choices of `--schedule` follow from the row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from lightseq.schedule.layout import MAX_FRAGMENTS, Layout, LayoutKind
from lightseq.schedule.table import Assignment, LazyAssignment, Mask, Schedule, Tile, derive_steps
from lightseq.utils.formatting import divisors


def ring(layout: Layout) -> Assignment:
    """Assigns tiles as ring attention does (arXiv 2310.01889).

    At step t rank r computes with the keys of rank r - t. Early ranks idle.
    """
    shards = [layout.chunks(rank) for rank in range(layout.world)]
    return LazyAssignment(
        layout.world,
        lambda t: [(_causal_or_full(shards[r], shards[r - t]),) if t <= r else () for r in range(layout.world)],
    )


def striped(layout: Layout) -> Assignment:
    """Assigns tiles as striped attention does (arXiv 2311.09431): half a tile for every pair of ranks."""
    world = layout.world

    def tile(r: int, j: int) -> Tile:
        return Tile((r,), (j,), Mask.CAUSAL if j <= r else Mask.STRICT)

    return LazyAssignment(world, lambda t: [(tile(r, (r - t) % world),) for r in range(world)])


def zigzag(layout: Layout) -> Assignment:
    """Assigns a ring over the zigzag layout: after the local step every rank computes half a full tile a step."""
    world = layout.world
    held = [layout.chunks(rank) for rank in range(world)]

    def tile(r: int, j: int) -> Tile:
        mine, theirs = held[r], held[j]
        if j == r:
            return Tile(mine, mine, Mask.CAUSAL)
        return Tile(mine, theirs[:1], Mask.FULL) if j < r else Tile(mine[1:], theirs, Mask.FULL)

    return LazyAssignment(world, lambda t: [(tile(r, (r - t) % world),) for r in range(world)])


def balanced(layout: Layout) -> Assignment:
    """Assigns tiles as DistFlashAttn does (arXiv 2310.03294): ranks whose own queries are done help others.

    In an even world the last step has work for half of the ranks only. There the two ranks of a pair, the one with the
    queries and the one with the keys, take one half of the queries each, so that even worlds balance too.
    """
    world = layout.world
    shards = [layout.chunks(rank) for rank in range(world)]

    def tile(t: int, r: int) -> Tile:
        if 2 * t == world:
            first, second = max(r, (r + t) % world), min(r, (r + t) % world)
            return _causal_or_full(shards[first][:1] if r == first else shards[first][1:], shards[second])
        return (
            _causal_or_full(shards[r], shards[r - t]) if r >= t else _causal_or_full(shards[world + r - t], shards[r])
        )

    return LazyAssignment(world // 2 + 1, lambda t: [(tile(t, r),) for r in range(world)])


def prefix(layout: Layout, head_groups: int = 1) -> Assignment:
    """Assigns every query chunk its whole prefix in one kernel call: partial outputs are never merged.

    The key/value chunks of a group of heads are fetched while the group before it computes.
    """

    def tiles(rank: int, heads: int) -> tuple[Tile, ...]:
        return tuple(Tile((c,), tuple(range(c + 1)), Mask.CAUSAL, heads) for c in layout.chunks(rank))

    return [[tiles(rank, heads) for rank in range(layout.world)] for heads in range(head_groups)]


def full_sequence(layout: Layout, head_groups: int = 1) -> Assignment:
    """Assigns the whole sequence to one tile: the schedule of a single Ulysses group of all ranks."""
    everything = layout.chunks(0)
    return [[(Tile(everything, everything, Mask.CAUSAL, heads),)] for heads in range(head_groups)]


def with_ulysses(assignment: Assignment, ulysses: int) -> Assignment:
    """Turns an assignment of Ulysses groups into one of ranks, each with its own heads (arXiv 2309.14509).

    With several groups this is the 2-D scheme of USP (arXiv 2405.07719).
    """

    def pieces(chunks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chunk * ulysses + piece for chunk in chunks for piece in range(ulysses))

    def split(tile: Tile, u: int) -> Tile:
        return Tile(pieces(tile.q), pieces(tile.kv), tile.mask, tile.head_group * ulysses + u)

    return [[tuple(split(t, u) for t in tiles) for tiles in row for u in range(ulysses)] for row in assignment]


def _causal_or_full(q: tuple[int, ...], kv: tuple[int, ...]) -> Tile:
    return Tile(q, kv, Mask.CAUSAL if q == kv else Mask.FULL)


@dataclass(frozen=True)
class Algorithm:
    """A row of the table of schedules.

    `assign_tiles` takes the layout of the Ulysses groups, and the number of head groups if `has_head_groups`, and
    returns the tiles of every group at every step.
    """

    layout: LayoutKind
    chunks_per_rank: int
    assign_tiles: Callable[..., Assignment]
    # Heads can be computed in groups, one after the other.
    has_head_groups: bool = False
    # A query meets all keys before it in one tile, which sliding windows need.
    one_tile_per_query: bool = False
    # Ranks in a Ulysses group, unless --ulysses_size says otherwise.
    ulysses_group: Literal["one", "half", "all"] = "one"
    # Balance of packed documents. own_layout: every batch gets a layout of its own, which needs tiles of one query
    # chunk with all its keys. even: all ranks share every document. uneven: neither.
    packed_work: Literal["own_layout", "even", "uneven"] = "uneven"
    # One line for the documentation, and the paper.
    description: str = ""
    source: str = ""


SCHEDULES: dict[str, Algorithm] = {
    "ring": Algorithm(
        "contiguous",
        1,
        ring,
        description="Rank r computes with the keys of ranks r, r-1, r-2, … in turn. Early ranks idle.",
        source="Ring Attention, arXiv 2310.01889",
    ),
    "striped": Algorithm(
        "striped",
        1,
        striped,
        packed_work="even",
        description="The ring over interleaved tokens.",
        source="Striped Attention, arXiv 2311.09431",
    ),
    "zigzag": Algorithm(
        "zigzag",
        2,
        zigzag,
        description="The ring; each rank holds a chunk and its mirror image.",
        source="Llama 3 report, arXiv 2407.21783",
    ),
    "balanced": Algorithm(
        "contiguous",
        2,
        balanced,
        description="Ranks that are done compute for ranks that are not.",
        source="DistFlashAttn, arXiv 2310.03294",
    ),
    "prefix": Algorithm(
        "zigzag",
        2,
        prefix,
        has_head_groups=True,
        one_tile_per_query=True,
        packed_work="own_layout",
        description="Each query chunk meets its whole prefix in one kernel call, so that nothing is merged.",
        source="this project",
    ),
    "ulysses": Algorithm(
        "contiguous",
        1,
        full_sequence,
        has_head_groups=True,
        one_tile_per_query=True,
        ulysses_group="all",
        packed_work="even",
        description="Each rank computes some of the heads over the whole sequence.",
        source="DeepSpeed-Ulysses, arXiv 2309.14509",
    ),
    "usp": Algorithm(
        "zigzag",
        2,
        prefix,
        has_head_groups=True,
        one_tile_per_query=True,
        ulysses_group="half",
        packed_work="own_layout",
        description="Heads split over some ranks, `prefix` over the others.",
        source="USP, arXiv 2405.07719",
    ),
}


def make_schedule(name: str, world: int, head_groups: int = 1, ulysses_size: int | None = None) -> Schedule:
    """Makes the schedule of that name for a number of ranks.

    `ulysses_size` is the size of a Ulysses group: all ranks under `ulysses`, half of them under `usp` unless it is
    given, else 1. `head_groups` is the number of groups that a rank computes its heads in, one after the other
    (`Schedule.head_groups_per_rank`). Raises ValueError for an unknown name and for sizes that the schedule does not
    support.
    """
    empty = schedule_without_steps(name, world, head_groups, ulysses_size)
    assignment = assign_tiles(empty)
    if empty.ulysses_size > 1:
        assignment = with_ulysses(assignment, empty.ulysses_size)
    return replace(
        empty,
        forward=derive_steps(empty.layout, assignment),
        backward=derive_steps(empty.layout, assignment, backward=True),
    )


def schedule_without_steps(name: str, world: int, head_groups: int = 1, ulysses_size: int | None = None) -> Schedule:
    """Makes a schedule without its steps: enough to check the arguments, at no cost for any number of ranks."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    for what, number in (("ranks", world), ("head_groups", head_groups), ("ulysses_size", ulysses_size)):
        if number is not None and number < 1:
            raise ValueError(f"{what} {number}: give at least 1")
    algorithm = SCHEDULES[name]
    if head_groups != 1 and not algorithm.has_head_groups:
        raise ValueError(f"schedule {name} computes all heads at once; head groups ({head_groups}) need prefix")
    ulysses = ulysses_group_size(name, world, ulysses_size)
    layout = Layout(algorithm.layout, world, algorithm.chunks_per_rank, ulysses)
    can_keep_gathered = algorithm.ulysses_group == "all" and world > 1
    return Schedule(name, layout, head_groups * ulysses, (), (), can_keep_gathered=can_keep_gathered)


def with_few_fragments(schedule: Schedule) -> Schedule:
    """Returns a schedule whose layouts of packed documents have few fragments, for layers that carry a state."""
    return replace(schedule, layout=replace(schedule.layout, most_packed_chunks=MAX_FRAGMENTS))


def assign_tiles(schedule: Schedule) -> Assignment:
    """Assigns tiles to the Ulysses groups of a schedule, before their ranks split the heads."""
    algorithm, group_layout = SCHEDULES[schedule.name], schedule.layout.group_layout
    if not algorithm.has_head_groups:
        return algorithm.assign_tiles(group_layout)
    return algorithm.assign_tiles(group_layout, schedule.head_groups_per_rank)


def allows_heads(schedule: Schedule, heads: int, kv_heads: int) -> bool:
    """Returns whether heads can be cut into the schedule's head groups, several of which may share a key/value head."""
    groups = schedule.total_head_groups
    return heads % groups == 0 and (kv_heads % groups == 0 or groups % kv_heads == 0)


def check_heads(schedule: Schedule, heads: int, kv_heads: int) -> None:
    """Raises ValueError unless `allows_heads`."""
    if not allows_heads(schedule, heads, kv_heads):
        if schedule.head_groups_per_rank > 1:
            remedy = "leave head_groups out"
        elif schedule.ulysses_size > 1 and SCHEDULES[schedule.name].ulysses_group == "one":
            remedy = "leave --ulysses_size out"
        else:
            remedy = "prefix takes any number"
        raise ValueError(
            f"schedule {schedule.name} over {schedule.world} ranks cuts heads in {schedule.total_head_groups}, which "
            f"{heads} query and {kv_heads} key/value heads do not allow; {remedy}"
        )


def takes_recurrences(name: str) -> bool:
    """Returns whether layers can carry a state through the tokens of a rank, which a striped layout scatters."""
    return SCHEDULES[name].layout != "striped"


def check_takes_recurrences(name: str) -> None:
    """Raises ValueError for a schedule with scattered tokens, for a model whose layers carry a state through them."""
    if not takes_recurrences(name):
        raise ValueError(
            f"schedule {name} scatters tokens that recurrent layers read in order; use zigzag, prefix or ulysses, or "
            "--recurrent_schedule heads"
        )


def check_takes_windows(name: str) -> None:
    """Raises ValueError for a schedule that does not support sliding windows (`Algorithm.one_tile_per_query`)."""
    able = [other for other, algorithm in SCHEDULES.items() if algorithm.one_tile_per_query]
    if name not in able:
        raise ValueError(f"schedule {name} does not support sliding windows; use {', '.join(able)}")


def ulysses_group_size(name: str, world: int, requested: int | None) -> int:
    """Returns the number of ranks in a Ulysses group. Raises ValueError for an unsupported size."""
    shared_by = SCHEDULES[name].ulysses_group
    if shared_by == "all":
        if requested not in (None, world):
            raise ValueError(
                f"schedule {name} splits heads over all {world} ranks, not {requested}; usp splits them over a part"
            )
        return world
    size = requested or (world // 2 if shared_by == "half" else 1)
    if size and world % size:
        raise ValueError(f"ulysses_size {size} does not divide {world} ranks; use {divisors(world)}")
    if shared_by == "half" and not 1 < size < world:
        sizes = f" with ulysses_size {requested}" if requested else ""
        raise ValueError(
            f"schedule {name} needs two or more Ulysses groups of two or more ranks; {world} ranks{sizes} cannot form "
            f"them; use {'ulysses' if size == world > 1 else 'prefix'}"
        )
    return size
