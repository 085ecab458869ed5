"""What distributed attention has to know on one rank: its schedule, group, kernel and transport, and the documents."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.comm.select import make_transport
from lightseq.comm.transport import Transport, plain
from lightseq.distributed.environment import cache_compiled_kernels, disable_multicast
from lightseq.kernels import KernelSpec, Selection, select
from lightseq.kernels.elided import Elided
from lightseq.kernels.select import unfit
from lightseq.schedule.algorithms import SCHEDULES, check_heads, make_schedule
from lightseq.schedule.auto import Choice, cheapest, cheapest_by_count, packed_choice
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.documents import balance, check_boundaries, packed_schedule, padded, padded_length
from lightseq.schedule.layout import Layout, shard
from lightseq.schedule.table import Schedule
from lightseq.schedule.timing import H200_SYMMETRIC, RATES


@dataclass
class Progress:
    """Passes of attention, forward and backward, that a rank's host has begun (long ones: has seen the end of)."""

    passes: int = 0


@dataclass
class ForwardPass:
    """State of the forward pass under way, against which attention and the loss are checked."""

    outermost: object = None  # the module that was called; the modules inside of it are called by it
    packed: bool = False  # it was passed documents
    attention_passes: int = 0  # of the rank, before it began
    loss: tuple[Tensor, int] | None = None  # what the loss function returned, and its version
    batches: int = 0  # that the model was given so far
    comparison: tuple[dist.Work, list[Tensor]] | None = None  # of the ranks' documents, under way
    shared: bool = False  # by a model and its deep copy


@dataclass(frozen=True)
class SequenceContext:
    """Everything that distributed attention needs to know on one rank. Made by `make_context` and passed on.

    `name` is what the operator carries in its place, for an operator takes tensors, numbers and strings only; under it
    a registry holds the context, and the memory of its transport, until `release`.
    """

    name: str
    schedule: Schedule
    rank: int
    group: dist.ProcessGroup
    selection: Selection
    transport: Transport
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # that all ranks were seen to have in common
    progress: Progress = field(default_factory=Progress)
    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    keeps: bool = False  # what it gathers, from a forward pass to its backward pass

    @property
    def layout(self) -> Layout:
        return self.schedule.layout

    def __deepcopy__(self, _memo: object) -> "SequenceContext":
        """A copy of a patched model, for averaged weights, say, attends over the same ranks."""
        self.forward_pass.shared = True
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a patched model holds a process group and cannot be pickled; save its state_dict")


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

    def fit(self, context: SequenceContext) -> bool:
        """Returns whether they were packed as the context's schedule lays them out."""
        whole = self.padded_boundaries
        if whole[-1] != padded_length(context.schedule, whole[-1]):
            return False
        return packed_schedule(context.schedule, whole).layout == self.layout

    def shard(self, x: Tensor, rank: int, fill: float = 0) -> Tensor:
        """One rank's part of a whole tensor (batch, length, ...), padded with `fill`."""
        return shard(x, self.layout, rank, fill=fill, padded_length=int(self.boundaries[-1]))


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
    world, asked = dist.get_world_size(group), Choice(schedule, ulysses_size, head_groups)
    if spec.packed:
        asked = packed_choice(world, shape, asked)
    if device.type == "cuda" and transport.startswith(("auto", "symmetric")):
        disable_multicast()
    if kernel in ("auto", "fa4") and unfit("fa4", spec) is None:
        cache_compiled_kernels()
    carrier = make_transport(transport, group, device)
    chosen = _choose(world, shape, plain(carrier.name), gpus_per_host or world, asked, keep_gathered)
    table = make_schedule(chosen.schedule, world, chosen.head_groups or 1, chosen.ulysses_size)
    check_heads(table, shape.heads, shape.kv_heads)
    selection = select(kernel, spec)
    if elide:
        selection = replace(selection, kernel=Elided(selection.kernel))
    keeps = keep_gathered and table.can_keep
    # A compiled graph carries the name, and torch's cache on disk knows the graph by it: what decides shapes is in it.
    cut = f"{table.ulysses_size}x{table.turns}{'-keeps' if keeps else ''}"
    name = f"{chosen.schedule}-{world}-{cut}-{next(_numbers)}"
    _CONTEXTS[name] = SequenceContext(
        name=name,
        schedule=table,
        rank=dist.get_rank(group),
        group=group,
        selection=selection,
        transport=carrier,
        keeps=keeps,
    )
    return _CONTEXTS[name]


def _choose(
    world: int, shape: AttentionShape, transport: str, gpus_per_host: int, asked: Choice, keep_gathered: bool = False
) -> Choice:
    """What was left open in `asked`: by predicted time between GPUs, by counting between CPU processes."""
    if transport == "gloo":
        return cheapest_by_count(world, shape, asked) if asked.schedule == "auto" else asked
    if None not in (asked.head_groups, asked.ulysses_size) and asked.schedule != "auto":
        return asked
    rates = RATES.get(transport, H200_SYMMETRIC)
    return cheapest(world, shape, rates, gpus_per_host, asked, keep_gathered=keep_gathered)


def release(context: SequenceContext) -> None:
    """Forgets a context, so that the memory of its transport can go. No attention may use it afterwards.

    One that a deep copy of its model attends with stays.
    """
    if not context.forward_pass.shared:
        _CONTEXTS.pop(context.name, None)


def find(name: str) -> SequenceContext:
    """The context that an operator was given by name."""
    return _CONTEXTS[name]
