"""State of distributed attention on one rank: schedule, group, kernel, transport, and the documents of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.comm.select import make_transport
from lightseq.comm.transport import Transport, base_transport_name
from lightseq.distributed.environment import cache_compiled_kernels, disable_multicast
from lightseq.kernels import KernelSpec, Selection, select
from lightseq.kernels.selection import why_unsupported
from lightseq.schedule.algorithms import SCHEDULES, check_heads, make_schedule
from lightseq.schedule.auto import ScheduleChoice, choose_by_counts, choose_by_time, choose_packed
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.documents import balance, check_boundaries, packed_schedule, pad_boundaries, padded_length
from lightseq.schedule.layout import Layout, shard
from lightseq.schedule.table import Schedule
from lightseq.schedule.timing import H200_SYMMETRIC, RATES


@dataclass
class Progress:
    """Number of attention passes that a rank's host has begun, or finished if they are long."""

    passes: int = 0


@dataclass
class ForwardPass:
    """State of the forward pass under way, against which attention and the loss are checked."""

    outermost: object = None  # the module that was called; it calls the modules inside of it
    packed: bool = False  # it was passed documents
    attention_passes: int = 0  # of the rank before this forward pass
    loss: tuple[Tensor, int] | None = None  # returned by the loss function, and its version
    batches: int = 0  # passed to the model so far
    comparison: tuple[dist.Work, list[Tensor]] | None = None  # of the documents of all ranks, under way
    shared: bool = False  # by a model and its deep copy


@dataclass(frozen=True)
class SequenceContext:
    """Everything that distributed attention needs on one rank. Made by `make_context` and passed on.

    A custom operator takes tensors, numbers and strings only, so it is passed `name`. A registry holds the
    context under that name, with the memory of its transport, until `release`.
    """

    name: str
    schedule: Schedule
    rank: int
    group: dist.ProcessGroup
    selection: Selection
    transport: Transport
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # known to be the same on all ranks
    progress: Progress = field(default_factory=Progress)
    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    keeps_gathered: bool = False  # gathered q, k and v stay from a forward pass to its backward pass

    @property
    def layout(self) -> Layout:
        return self.schedule.layout

    def __deepcopy__(self, _memo: object) -> "SequenceContext":
        """Returns the context itself: a copy of a patched model attends over the same ranks."""
        self.forward_pass.shared = True
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a patched model holds a process group and cannot be pickled; save its state_dict")


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one packed sequence, the same on all ranks of a group; made by `pack`, passed to `attention`.

    It is not a tensor, because model wrappers move tensors to the device, where the host would wait for them.
    """

    boundaries: Tensor  # int64, on the CPU, the end repeated so that shapes do not change
    layout: Layout
    balance: float  # attention area of the mean rank over the largest

    @property
    def padded_boundaries(self) -> tuple[int, ...]:
        """First positions of all documents, those of padding among them, and the end."""
        return without_repeats(self.boundaries)

    def match(self, context: SequenceContext) -> bool:
        """Returns whether the documents were packed for the context's schedule."""
        whole = self.padded_boundaries
        if whole[-1] != padded_length(context.schedule, whole[-1]):
            return False
        return packed_schedule(context.schedule, whole).layout == self.layout

    def shard(self, x: Tensor, rank: int, fill: float = 0) -> Tensor:
        """Returns one rank's part of a whole tensor (batch, length, ...), padded with `fill`."""
        return shard(x, self.layout, rank, fill=fill, padded_length=int(self.boundaries[-1]))


MIN_BOUNDARIES = 256  # in the tensor, so that compiled graphs see a new shape only for more documents


def pack(context: SequenceContext, boundaries: Sequence[int], length: int | None = None) -> Documents:
    """Returns documents that begin at `boundaries`, whose last entry is the end, in a sequence of `length` tokens.

    The rest up to `length`, or to what the schedule needs, is padding. Raises ValueError if boundaries do not rise.
    """
    length = int(boundaries[-1]) if length is None else length
    real = check_boundaries(boundaries, length)
    whole = pad_boundaries(real, padded_length(context.schedule, length))
    size = MIN_BOUNDARIES
    while size < len(whole):
        size *= 2
    carried = torch.tensor([*whole, *[whole[-1]] * (size - len(whole))], dtype=torch.int64)
    table = packed_schedule(context.schedule, whole)
    return Documents(carried, table.layout, balance(table))


def without_repeats(boundaries: Tensor) -> tuple[int, ...]:
    return tuple(dict.fromkeys(boundaries.tolist()))


_CONTEXTS: dict[str, SequenceContext] = {}
_numbers = count()


@dataclass(frozen=True)
class AttentionConfig:
    """Options of distributed attention. Schedules, kernels and transports are named as in the README's tables."""

    schedule: str = "auto"
    kernel: str = "auto"
    transport: str = "auto"
    # Ranks in a Ulysses group, which splits heads; a divisor of all ranks (default: the schedule's).
    ulysses_size: int | None = None
    # Groups of heads that a rank computes one after the other (default: chosen by predicted time).
    head_groups: int | None = None
    dtype: torch.dtype | None = None  # of q, k and v (default: the parameters'; set it under autocast)
    device: torch.device | None = None  # of q, k and v (default: the parameters')
    # Sequence length in tokens that `schedule="auto"` is chosen for; the longest allowed if layers have a window.
    length: int = 65536
    deterministic: bool = False  # gradients are the same to the bit each time
    gpus_per_host: int | None = None  # neighbouring ranks of the group that share a host (default: all)
    packed: bool = False  # most sequences hold several documents; `auto` is then prefix, which balances them
    # Under ulysses, save gathered q, k and v for the backward pass instead of a rank's own: they travel once. Set it to
    # False if a checkpoint recomputes q, k and v.
    keep_gathered: bool = True


def make_context(group: dist.ProcessGroup, shape: AttentionShape, config: AttentionConfig) -> SequenceContext:
    """Makes the context of one sequence-parallel group. Every rank of the group passes the same arguments.

    Open options are chosen for `shape`; the config has dtype and device. Raises ValueError for names that are unknown
    or cannot run here.
    """
    device, dtype = config.device, config.dtype
    assert device is not None and dtype is not None, "the caller knows them"
    if config.schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"schedule {config.schedule!r} is unknown; choose auto or one of {', '.join(SCHEDULES)}")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    spec = KernelSpec(device.type, capability, dtype, shape.head_dim, config.deterministic, config.packed)
    if device.type == "cuda" and config.transport.startswith(("auto", "symmetric")):
        disable_multicast()
    if config.kernel in ("auto", "fa4") and why_unsupported("fa4", spec) is None:
        cache_compiled_kernels()
    transport = make_transport(config.transport, group, device)
    chosen = _choose(dist.get_world_size(group), shape, base_transport_name(transport.name), config)
    schedule = make_schedule(chosen.schedule, dist.get_world_size(group), chosen.head_groups or 1, chosen.ulysses_size)
    check_heads(schedule, shape.heads, shape.kv_heads)
    keeps_gathered = config.keep_gathered and schedule.can_keep_gathered
    # Compiled graphs contain the name, and torch's cache on disk finds them by it, so it has all that decides shapes.
    cut = f"{schedule.ulysses_size}x{schedule.head_groups_per_rank}{'-keeps' if keeps_gathered else ''}"
    name = f"{chosen.schedule}-{schedule.world}-{cut}-{next(_numbers)}"
    _CONTEXTS[name] = SequenceContext(
        name=name,
        schedule=schedule,
        rank=dist.get_rank(group),
        group=group,
        selection=select(config.kernel, spec),
        transport=transport,
        keeps_gathered=keeps_gathered,
    )
    return _CONTEXTS[name]


def _choose(world: int, shape: AttentionShape, transport: str, config: AttentionConfig) -> ScheduleChoice:
    """Chooses what the config leaves open: by predicted time between GPUs, by counting between CPU processes."""
    asked = ScheduleChoice(config.schedule, config.ulysses_size, config.head_groups)
    if config.packed:
        asked = choose_packed(world, shape, asked)
    if transport == "gloo":
        return choose_by_counts(world, shape, asked) if asked.schedule == "auto" else asked
    if None not in (asked.head_groups, asked.ulysses_size) and asked.schedule != "auto":
        return asked
    rates = RATES.get(transport, H200_SYMMETRIC)
    return choose_by_time(world, shape, rates, config.gpus_per_host or world, asked, keep_gathered=config.keep_gathered)


def release(context: SequenceContext) -> None:
    """Drops a context, so that the memory of its transport is freed. No attention may use it afterwards.

    A context that a deep copy of its model shares stays.
    """
    if not context.forward_pass.shared:
        _CONTEXTS.pop(context.name, None)


def find(name: str) -> SequenceContext:
    """Returns the context of a name."""
    return _CONTEXTS[name]
