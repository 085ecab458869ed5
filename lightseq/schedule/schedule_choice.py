"""The choice of a schedule and its sizes, for a run and for its plan."""

from dataclasses import dataclass

from lightseq.schedule.algorithms import SCHEDULES, check_takes_recurrences, takes_recurrences
from lightseq.schedule.auto import (
    AUTO,
    ScheduleChoice,
    choose_by_counts,
    choose_by_time,
    choose_packed,
    choose_windowed,
)
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.head_slices import with_fewer_head_groups
from lightseq.schedule.timing import H200_SYMMETRIC, RATES


@dataclass(frozen=True)
class ScheduleRequest:
    """Conditions for which a schedule is chosen. `requested` holds the options that are given."""

    world: int
    shape: AttentionShape
    transport: str  # a name without suffixes
    requested: ScheduleChoice
    gpus_per_host: int
    keep_gathered: bool = False  # the backward pass may reuse gathered q, k and v
    packed: bool = False  # most sequences hold several documents
    windows: bool = False  # some layers have a sliding window
    carries_states: bool = False  # some layers carry a state through the sequence
    slices_heads: bool = False  # layers pass their heads in slices


def choose(request: ScheduleRequest) -> ScheduleChoice:
    """Chooses the options that are left open: by predicted time on GPUs, by counts on CPU.

    Raises ValueError for a schedule without windows if some layer has one, for a striped one if some layer carries a
    state, and if nothing fits what is requested.
    """
    requested, world, shape = request.requested, request.world, request.shape
    names = tuple(name for name in SCHEDULES if not request.carries_states or takes_recurrences(name))
    if request.carries_states and requested.schedule != AUTO:
        check_takes_recurrences(requested.schedule)
    if request.windows:
        requested = choose_windowed(requested)
    if request.packed:
        requested = choose_packed(world, shape, requested)
    is_complete = requested.schedule != AUTO and None not in (requested.head_groups, requested.ulysses_size)
    if request.transport == "gloo":
        chosen = choose_by_counts(world, shape, requested, names) if requested.schedule == AUTO else requested
    elif is_complete:
        chosen = requested
    else:
        rates = RATES.get(request.transport, H200_SYMMETRIC)
        chosen = choose_by_time(world, shape, rates, request.gpus_per_host, requested, request.keep_gathered, names)
    return with_fewer_head_groups(chosen, world, shape) if request.slices_heads else chosen
