"""What distributed attention has to know on one rank: its schedule, group, kernel and transport, and the documents."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.comm import BLOCKING, Transport
from lightseq.documents import balance, check_boundaries, packed_schedule, padded, padded_length
from lightseq.environment import disable_multicast, keep_compiled_kernels
from lightseq.kernels import KernelSpec, Selection, select
from lightseq.kernels.elided import Elided
from lightseq.layout import Layout, shard
from lightseq.schedule import SCHEDULES, Schedule, check_heads, make_schedule
from lightseq.schedule_choice import Choice, cheapest, choices
from lightseq.schedule_cost import AttentionShape, cheapest_by_count
from lightseq.schedule_time import H200_SYMMETRIC, RATES
from lightseq.transports import make_transport


@dataclass
class Progress:
    """Passes of attention, forward and backward, that a rank's host has begun (long ones: has seen the end of)."""

    passes: int = 0


@dataclass
class FirstBatch:
    """Shape and checksum of the first batch that a rank was given, and whether the ranks have compared theirs."""

    seen: tuple[int, ...] | None = None
    compared: bool = False


@dataclass(frozen=True)
class SequenceContext:
    """Everything that distributed attention needs to know on one rank. Made by `make_context`, passed and never global.

    `name` is what the operator carries in its place, for an operator takes tensors, numbers and strings only.
    """

    name: str
    schedule: Schedule
    rank: int
    group: dist.ProcessGroup
    selection: Selection
    transport: Transport
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # that all ranks were seen to have in common
    progress: Progress = field(default_factory=Progress)
    first_batch: FirstBatch = field(default_factory=FirstBatch)
    keeps: bool = False  # what it gathers, from a forward pass to its backward pass

    @property
    def layout(self) -> Layout:
        return self.schedule.layout


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one packed sequence, alike on all ranks of a group: made by `pack`, handed to `attention`.

    No plain tensor, for what wraps models moves those to the device, where the host would have to wait for it.
    """

    boundaries: Tensor  # int64, on the CPU; the end stands there several times, so that batches differ in values alone
    layout: Layout
    balance: float  # attention area of the mean rank over the largest

    @property
    def padded_boundaries(self) -> tuple[int, ...]:
        """Where documents begin, those of padding among them, and the end."""
        return without_repeats(self.boundaries)

    def shard(self, x: Tensor, rank: int, fill: float = 0) -> Tensor:
        """One rank's part of a whole tensor (batch, length, ...), padded with `fill`."""
        return shard(x, self.layout, rank, fill=fill, padded_length=int(self.boundaries[-1]))


MOST_GATHERED_BYTES = 2**30  # keys and values of a whole packed sequence, in one turn of heads
LEAST_BOUNDARIES = 256  # in the tensor; a compiled graph sees another shape only where a sequence has more documents


def pack(context: SequenceContext, boundaries: Sequence[int], length: int | None = None) -> Documents:
    """Documents that begin at `boundaries`, the last of which ends the last one, in a sequence of `length` tokens.

    What is missing up to `length`, or to what the schedule needs, is padding. Raises ValueError for what does not rise.
    """
    length = int(boundaries[-1]) if length is None else length
    real = check_boundaries(boundaries, length)
    whole = padded(real, padded_length(context.schedule, length))
    size = LEAST_BOUNDARIES
    while size < len(whole):
        size *= 2
    carried = torch.tensor([*whole, *[whole[-1]] * (size - len(whole))], dtype=torch.int64)
    table = packed_schedule(context.schedule, whole)
    return Documents(carried, table.layout, balance(table))


def without_repeats(boundaries: Tensor) -> tuple[int, ...]:
    return tuple(dict.fromkeys(boundaries.tolist()))


_CONTEXTS: dict[str, SequenceContext] = {}
_numbers = count()


def make_context(
    group: dist.ProcessGroup,
    device: torch.device,
    spec: KernelSpec,
    shape: AttentionShape,
    schedule: str = "auto",
    kernel: str = "auto",
    transport: str = "auto",
    ulysses_size: int | None = None,
    head_groups: int | None = None,
    gpus_per_host: int | None = None,
    elide: bool = False,
    keep_gathered: bool = True,
) -> SequenceContext:
    """The context of one sequence-parallel group; every rank of the group calls it with the same arguments.

    `shape` is what `schedule="auto"`, and head groups that are not given, are chosen for; `gpus_per_host` neighbouring
    ranks of the group share a host (default: all of them), which matters for that choice alone. `elide` leaves the
    arithmetic out: memory and messages are real, results are zero. `keep_gathered`: under ulysses, q, k and v as a rank
    gathered them are kept for the backward pass in the place of its own, which take as much, and travel once; say False
    where a checkpoint keeps results and recomputes q, k and v. Where the spec says that sequences are packed, auto is
    prefix, which shares their work out. Raises ValueError for names that do not exist or cannot run here.
    """
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"schedule {schedule!r} is unknown; choose auto or one of {', '.join(SCHEDULES)}")
    world = dist.get_world_size(group)
    if spec.packed:
        schedule = "prefix" if schedule == "auto" else schedule
        head_groups = head_groups or _packed_turns(world, shape, Choice(schedule, ulysses_size))
    disable_multicast()
    keep_compiled_kernels()
    carrier = make_transport(transport, group, device)
    overlapped, asked = carrier.name.removesuffix(BLOCKING), Choice(schedule, ulysses_size, head_groups)
    chosen = _choose(world, shape, overlapped, gpus_per_host or world, asked, keep_gathered)
    table = make_schedule(chosen.schedule, world, chosen.head_groups or 1, chosen.ulysses_size)
    check_heads(table, shape.heads, shape.kv_heads)
    selection = select(kernel, spec)
    if elide:
        selection = replace(selection, kernel=Elided(selection.kernel))
    name = f"{chosen.schedule}-{world}-{next(_numbers)}"
    _CONTEXTS[name] = SequenceContext(
        name=name,
        schedule=table,
        rank=dist.get_rank(group),
        group=group,
        selection=selection,
        transport=carrier,
        keeps=keep_gathered and table.can_keep,
    )
    return _CONTEXTS[name]


def _choose(
    world: int, shape: AttentionShape, transport: str, gpus_per_host: int, asked: Choice, keep_gathered: bool = False
) -> Choice:
    """What was left open in `asked`: by predicted time between GPUs, by counting between CPU processes."""
    if transport == "gloo":
        return asked._replace(schedule=cheapest_by_count(world, shape)) if asked.schedule == "auto" else asked
    if None not in (asked.head_groups, asked.ulysses_size) and asked.schedule != "auto":
        return asked
    rates = RATES.get(transport, H200_SYMMETRIC)
    return cheapest(world, shape, rates, gpus_per_host, asked, keep_gathered=keep_gathered)


def _packed_turns(world: int, shape: AttentionShape, asked: Choice) -> int:
    """Turns that heads take on packed documents, where they hide nothing: as few as memory for keys allows."""
    whole = 2 * shape.length * shape.kv_heads * shape.head_dim * shape.element_bytes
    allowed = [choice.head_groups or 1 for choice in choices(world, shape, asked)] or [1]
    return next((turns for turns in allowed if whole / turns <= MOST_GATHERED_BYTES), allowed[-1])


def release(context: SequenceContext) -> None:
    """Forgets a context, so that the memory of its transport can go. No attention may use it afterwards."""
    _CONTEXTS.pop(context.name, None)


def find(name: str) -> SequenceContext:
    """The context that an operator was given by name."""
    return _CONTEXTS[name]
