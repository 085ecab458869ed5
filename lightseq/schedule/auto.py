"""Choice of a schedule and its sizes by predicted time, for `--schedule auto`."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from lightseq.schedule.algorithms import (
    SCHEDULES,
    check_heads,
    check_takes_windows,
    make_schedule,
    schedule_without_steps,
)
from lightseq.schedule.cost import AttentionShape, cost
from lightseq.schedule.timing import Estimate, Rates, estimate
from lightseq.schedule.traffic import count_traffic

HEAD_GROUPS = (1, 2, 4, 8)
MAX_SLOWDOWN = 0.002  # relative difference of a layer's time that the rates cannot resolve
MAX_GATHERED_BYTES = 2**30  # gathered operands that a rank holds before more head groups are worth their time
MAX_SEQUENCE_RANKS = 2048  # a schedule for this many ranks takes half a minute and 4 GB
AUTO = "auto"


class ScheduleChoice(NamedTuple):
    """A schedule by name with its sizes. None and "auto" leave a field open.

    `head_groups` counts the groups that a rank computes in turn.
    """

    schedule: str = AUTO
    ulysses_size: int | None = None
    head_groups: int | None = None


class ChoiceEstimate(NamedTuple):
    """A choice and its predicted time."""

    choice: ScheduleChoice
    estimate: Estimate


@lru_cache(maxsize=256)
def choose_by_time(
    world: int,
    shape: AttentionShape,
    rates: Rates,
    gpus_per_host: int,
    requested: ScheduleChoice = ScheduleChoice(),  # noqa: B008 (immutable)
    keep_gathered: bool = False,
    names: tuple[str, ...] = tuple(SCHEDULES),
) -> ScheduleChoice:
    """Chooses the schedule with the least predicted time. The result depends on the arguments only, so ranks agree.

    Raises ValueError if no choice fits `requested`, with one of `names` if it leaves the schedule open.
    """
    found = [
        ChoiceEstimate(choice, estimate_choice(choice, world, shape, rates, gpus_per_host, keep_gathered))
        for choice in _require_choices(world, shape, requested, names)
    ]
    return choose_best(found, shape.kv_heads).choice


def choose_by_counts(
    world: int,
    shape: AttentionShape,
    requested: ScheduleChoice = ScheduleChoice(),  # noqa: B008
    names: tuple[str, ...] = tuple(SCHEDULES),
) -> ScheduleChoice:
    """Chooses by counts: least arithmetic on the critical path, then fewest exposed bytes, then fewest moved bytes.

    Raises ValueError as `choose_by_time`.
    """

    def price(choice: ScheduleChoice) -> tuple[float, int, int]:
        c = cost(make_schedule(choice.schedule, world, choice.head_groups or 1, choice.ulysses_size), shape)
        return (round(c.critical_flops / c.flops, 3), c.exposed_bytes, c.max_rank_bytes)

    requested = requested._replace(head_groups=requested.head_groups or 1)
    return min(_require_choices(world, shape, requested, names), key=price)


def choose_windowed(requested: ScheduleChoice) -> ScheduleChoice:
    """Chooses the schedule of a model with sliding windows. Raises ValueError for one that does not support them."""
    requested = requested._replace(schedule="prefix") if requested.schedule == AUTO else requested
    check_takes_windows(requested.schedule)
    return requested


def choose_packed(world: int, shape: AttentionShape, requested: ScheduleChoice) -> ScheduleChoice:
    """Chooses for packed documents: `auto` is prefix, which balances their work.

    It takes the fewest head groups that the memory for keys allows: with packed documents more groups hide no
    communication.
    """
    requested = requested._replace(schedule="prefix") if requested.schedule == AUTO else requested
    whole = shape.length * shape.kv_heads * shape.pair_dims * shape.element_bytes
    allowed = [choice.head_groups or 1 for choice in possible_choices(world, shape, requested)] or [1]
    fewest = next((groups for groups in allowed if whole / groups <= MAX_GATHERED_BYTES), allowed[-1])
    return requested._replace(head_groups=requested.head_groups or fewest)


def choose_best(found: list[ChoiceEstimate], kv_heads: int) -> ChoiceEstimate:
    """Chooses the fastest schedule, with the fewest head groups that need nearly the same time and little memory.

    If every choice gathers more than MAX_GATHERED_BYTES, takes the most. One group is 1% faster than four at 128K on
    two H100 (benchmarks/results/attention-2xh100-head-groups.jsonl).
    """
    fastest = min(found, key=lambda p: p.estimate.seconds)  # the first of equals
    longest = (1 + MAX_SLOWDOWN) * fastest.estimate.seconds
    most = max(kv_heads, _total_head_groups(fastest.choice))
    same_but_head_groups = [
        p
        for p in found
        if (p.choice.schedule, p.choice.ulysses_size) == (fastest.choice.schedule, fastest.choice.ulysses_size)
    ]
    similar = [p for p in same_but_head_groups if p.estimate.seconds <= longest]
    splits_all_heads = SCHEDULES[fastest.choice.schedule].ulysses_group == "all"
    frugal = [p for p in similar if splits_all_heads or _total_head_groups(p.choice) <= most]
    small = [p for p in frugal if p.estimate.gathered_bytes <= MAX_GATHERED_BYTES]
    return min(small, key=_head_groups) if small else max(frugal, key=_head_groups)


def _head_groups(found: ChoiceEstimate) -> int:
    return found.choice.head_groups or 1


def _total_head_groups(choice: ScheduleChoice) -> int:
    """Returns the number of head groups on all ranks of a Ulysses group (not under `ulysses`, whose size is open).

    More groups than key/value heads need more memory if keys travel: each group that shares a head gathers it, and the
    head's gradients add up in float32.
    """
    return (choice.head_groups or 1) * (choice.ulysses_size or 1)


def estimate_choice(
    choice: ScheduleChoice,
    world: int,
    shape: AttentionShape,
    rates: Rates,
    gpus_per_host: int,
    keep_gathered: bool = False,
) -> Estimate:
    """Estimates the time of a layer under a choice. Raises ValueError as `make_schedule`."""
    counted = count_traffic(choice.schedule, world, gpus_per_host, choice.head_groups or 1, choice.ulysses_size)
    return estimate(counted, shape, rates, keep_gathered)


def possible_choices(
    world: int,
    shape: AttentionShape,
    requested: ScheduleChoice = ScheduleChoice(),  # noqa: B008
    names: tuple[str, ...] = tuple(SCHEDULES),
) -> Iterator[ScheduleChoice]:
    """Yields every choice that fits `requested` and that these ranks and heads allow."""
    for name in names if requested.schedule == AUTO else (requested.schedule,):
        splits_some = SCHEDULES[name].ulysses_group == "half"
        sizes = [u for u in range(2, world) if world % u == 0] if splits_some else [None]
        for size in sizes if requested.ulysses_size is None else [requested.ulysses_size]:
            groups = HEAD_GROUPS if SCHEDULES[name].has_head_groups else (1,)
            for count in groups if requested.head_groups is None else [requested.head_groups]:
                choice = ScheduleChoice(name, size, count)
                if why_impossible(choice, world, shape) is None:
                    yield choice


def _require_choices(
    world: int, shape: AttentionShape, requested: ScheduleChoice, names: tuple[str, ...]
) -> list[ScheduleChoice]:
    """Returns the possible choices. Raises ValueError with a reason if there are none."""
    if found := list(possible_choices(world, shape, requested, names)):
        return found
    name = names[0] if requested.schedule == AUTO else requested.schedule
    raise ValueError(why_impossible(requested._replace(schedule=name), world, shape))


def why_impossible(choice: ScheduleChoice, world: int, shape: AttentionShape) -> str | None:
    """Returns the reason why a choice is impossible, None if it is possible."""
    try:
        schedule = schedule_without_steps(choice.schedule, world, choice.head_groups or 1, choice.ulysses_size)
        for layer in (shape, *shape.other_layers):
            check_heads(schedule, layer.heads, layer.kv_heads)
    except ValueError as error:
        return str(error)
    return None
