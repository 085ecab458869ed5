"""State of distributed attention on one rank: schedule, group, kernel, transport, and the documents of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.attention.config import AttentionConfig
from lightseq.comm.select import make_transport
from lightseq.comm.transport import Transport, base_transport_name
from lightseq.distributed.environment import cache_compiled_kernels, disable_multicast
from lightseq.distributed.roll_call import RollCall
from lightseq.kernels import KernelSpec, Selection, compute_capability, select
from lightseq.kernels.selection import why_unsupported
from lightseq.schedule.algorithms import SCHEDULES, check_heads, make_schedule
from lightseq.schedule.auto import ScheduleChoice
from lightseq.schedule.choice import ScheduleRequest, choose
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.documents import balance, check_boundaries, packed_schedule, pad_boundaries, padded_length
from lightseq.schedule.layout import Layout, shard
from lightseq.schedule.table import Schedule


@dataclass
class Progress:
    """Counter of the attention passes that this rank has launched."""

    passes: int = 0  # forward and backward, of all layers


@dataclass
class ForwardPass:
    """State that a model's forward pass leaves for the checks of attention, of the loss and of the next pass."""

    outermost: object = None  # the module that the user called
    packed: bool = False  # the batch holds documents
    attention_passes: int = 0  # launched before this forward pass
    loss: tuple[Tensor, int] | None = None  # result of the loss function, and its tensor version
    batches: int = 0  # batches passed to the model so far
    comparison: tuple[dist.Work, list[Tensor]] | None = None  # all-gather of every rank's documents
    shared: bool = False  # a deep copy of the model uses the context too; never reset
    gradients_are_averaged_outside: bool = False  # as in trainers, which scale gradients themselves
    gradient_factor: int = 1  # of the outputs' gradients, where a wrapper such as DDP averages those of parameters
    averaging_checked: tuple[Any, ...] | None = None  # the wrappers for which `gradient_factor` was found
    announced: bool = False  # the call is in `roll_call` already, from a module around the model
    roll_call: RollCall | None = None  # calls of the ranks; set by `hf.enable`


@dataclass(frozen=True)
class SequenceContext:
    """Everything that distributed attention needs on one rank; made by `make_context`.

    A custom operator takes only tensors, numbers and strings, so it gets `name`. A registry holds the context and the
    memory of its transport under that name until `release`.
    """

    name: str
    schedule: Schedule
    rank: int
    group: dist.ProcessGroup
    selection: Selection
    transport: Transport
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # of inputs, known to be the same on all ranks
    progress: Progress = field(default_factory=Progress)
    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    keeps_gathered: bool = False  # the backward pass reuses q, k and v as the forward pass gathered them

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
    """Documents of one packed sequence, the same on all ranks of a group; made by `pack`, passed to `attention`.

    Not a tensor, because model wrappers move tensors to the device, and reading them there makes the host wait.
    """

    boundaries: Tensor  # int64 on the CPU; the end repeats up to a few sizes, so that shapes rarely change
    layout: Layout
    balance: float  # mean attention area of a rank over the largest
    count: int  # documents without those of padding

    @property
    def padded_boundaries(self) -> tuple[int, ...]:
        """First position of every document, those of padding included, and the end: `boundaries` without repeats."""
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

    def document_numbers(self, rank: int) -> Tensor:
        """Returns the number of each local token's document, int64 (local,). Padding belongs to the last document."""
        ends = torch.tensor(self.padded_boundaries[1:])
        positions = self.layout.positions(rank, int(self.boundaries[-1]))
        return torch.bucketize(positions, ends, right=True).clamp_max(self.count - 1)


MIN_BOUNDARIES = 256  # smallest boundary tensor; it doubles as needed, so compiled graphs see few shapes


def pack(context: SequenceContext, boundaries: Sequence[int], length: int | None = None) -> Documents:
    """Packs documents into a sequence of `length` tokens (default: the end of the last document).

    `boundaries` are the first token of each document and the end of the last. The sequence is padded to `length`, and
    further if the schedule needs it. Raises ValueError if boundaries do not rise from 0, or exceed `length`.
    """
    length = int(boundaries[-1]) if length is None else length
    real = check_boundaries(boundaries, length)
    whole = pad_boundaries(real, padded_length(context.schedule, length))
    size = MIN_BOUNDARIES
    while size < len(whole):
        size *= 2
    carried = torch.tensor([*whole, *[whole[-1]] * (size - len(whole))], dtype=torch.int64)
    table = packed_schedule(context.schedule, whole)
    return Documents(carried, table.layout, balance(table), len(real) - 1)


def without_repeats(boundaries: Tensor) -> tuple[int, ...]:
    """Returns the boundaries of a `Documents` tensor as integers, its end once."""
    return tuple(dict.fromkeys(boundaries.tolist()))


_CONTEXTS: dict[str, SequenceContext] = {}
_context_numbers = count()


def make_context(group: dist.ProcessGroup, shape: AttentionShape, config: AttentionConfig) -> SequenceContext:
    """Makes the context of one sequence-parallel group. Every rank of the group passes the same arguments.

    Options that the config leaves open are chosen for `shape`; dtype and device must be set. Raises ValueError for
    unknown names, for kernels and transports that cannot run here, and for ranks or heads that the schedule does not
    support.
    """
    device, dtype = config.device, config.dtype
    assert device is not None and dtype is not None, "the caller sets both"
    if config.schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"schedule {config.schedule!r} is unknown; choose auto or one of {', '.join(SCHEDULES)}")
    spec = kernel_spec(config, shape.head_dim, compute_capability(device))
    if device.type == "cuda" and config.transport.startswith(("auto", "symmetric")):
        disable_multicast()
    if config.kernel in ("auto", "fa4") and why_unsupported("fa4", spec) is None:
        cache_compiled_kernels()
    transport = make_transport(config.transport, group, device)
    world = dist.get_world_size(group)
    chosen = choose(schedule_request(config, world, shape, base_transport_name(transport.name)))
    schedule = make_schedule(chosen.schedule, world, chosen.head_groups or 1, chosen.ulysses_size)
    check_heads(schedule, shape.heads, shape.kv_heads)
    keeps_gathered = config.keep_gathered and schedule.can_keep_gathered
    # Compiled graphs contain the name and torch's disk cache looks them up by it, so it must determine all shapes.
    sizes = f"{schedule.ulysses_size}x{schedule.head_groups_per_rank}{'-keeps' if keeps_gathered else ''}"
    name = f"{chosen.schedule}-{schedule.world}-{sizes}-{next(_context_numbers)}"
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


def kernel_spec(config: AttentionConfig, head_dim: int, capability: tuple[int, int]) -> KernelSpec:
    """Returns what a kernel has to support, on a device of this CUDA compute capability."""
    assert config.device is not None and config.dtype is not None, "the caller sets both"
    return KernelSpec(
        config.device.type,
        capability,
        config.dtype,
        head_dim,
        deterministic=config.deterministic,
        packed=config.packed,
        windows=config.windows,
        softcap=config.softcap,
    )


def schedule_request(config: AttentionConfig, world: int, shape: AttentionShape, transport: str) -> ScheduleRequest:
    """Returns what a schedule is chosen for. `transport` is a name without suffixes."""
    return ScheduleRequest(
        world=world,
        shape=shape,
        transport=transport,
        requested=ScheduleChoice(config.schedule, config.ulysses_size, config.head_groups),
        gpus_per_host=config.gpus_per_host or world,
        keep_gathered=config.keep_gathered,
        packed=config.packed,
        windows=config.windows,
        slices_heads=config.layers_slice_heads,
    )


@cache
def one_rank_context() -> SequenceContext:
    """Returns a context of one rank without a process group, for tracing layers. It computes nothing."""
    ring = make_schedule("ring", 1)
    context = SequenceContext("one-rank", ring, 0, None, None, None)  # type: ignore[arg-type]
    _CONTEXTS[context.name] = context
    return context


def release(context: SequenceContext) -> None:
    """Drops a context and frees the memory of its transport. Attention must not use it afterwards.

    A context that a deep copy of the model uses too is kept.
    """
    if not context.forward_pass.shared:
        _CONTEXTS.pop(context.name, None)


def find(name: str) -> SequenceContext:
    """Returns the context with this name. Raises KeyError after `release`."""
    return _CONTEXTS[name]
