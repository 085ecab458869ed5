"""Distributed attention on one rank: a sequence group with a schedule and a kernel."""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch.distributed as dist

from lightseq.attention.config import AttentionConfig
from lightseq.attention.forward_pass import ForwardPass
from lightseq.comm.transport import Transport, base_transport_name
from lightseq.comm.transport_choice import make_transport
from lightseq.config.recurrent_schedules import AUTO as AUTO_RECURRENT
from lightseq.config.recurrent_schedules import HEADS, RECURRENT_SCHEDULES
from lightseq.distributed.environment import cache_compiled_kernels, disable_multicast
from lightseq.kernels.attention.base import KernelSpec, compute_capability
from lightseq.kernels.attention.tile_kernel_choice import Kernels, Selection, why_unsupported
from lightseq.schedule.algorithms import (
    SCHEDULES,
    allows_heads,
    check_heads,
    check_takes_recurrences,
    check_takes_windows,
    make_schedule,
    with_few_fragments,
)
from lightseq.schedule.auto import AUTO, ScheduleChoice
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.documents import balance, has_own_layouts, packed_schedule
from lightseq.schedule.layout import Layout
from lightseq.schedule.schedule_choice import ScheduleRequest, choose
from lightseq.schedule.table import Schedule
from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup, make_sequence_group, release_group, traced_group


@dataclass
class Progress:
    """Counter of the attention passes that this rank has launched."""

    passes: int = 0  # forward and backward, of all layers


@dataclass(frozen=True)
class SequenceContext:
    """Attention over the ranks of a sequence group: its schedule and kernel. Made by `make_context`.

    A custom operator takes only tensors, numbers and strings, so it gets `name`. A registry holds the context under
    that name until `release`.
    """

    sequence: SequenceGroup
    schedule: Schedule
    kernels: Kernels  # by the dimensions of heads
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # input shapes that all ranks are known to share
    progress: Progress = field(default_factory=Progress)
    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    recurrent_schedule: str = AUTO_RECURRENT  # schedule of the scans of recurrent layers
    keeps_gathered: bool = False  # the backward pass reuses q, k and v as the forward pass gathered them
    config: AttentionConfig = field(default_factory=AttentionConfig)  # options, completed by the model's

    @property
    def name(self) -> str:
        return self.sequence.name

    @property
    def selection(self) -> Selection:
        """Returns the kernel of the layers with most work."""
        spec = self.kernels.spec
        return self.kernels.of(spec.head_dim, spec.value_dim or spec.head_dim)

    @property
    def rank(self) -> int:
        return self.sequence.rank

    @property
    def group(self) -> dist.ProcessGroup:
        return self.sequence.process_group

    @property
    def transport(self) -> Transport:
        return self.sequence.transport

    @property
    def layout(self) -> Layout:
        return self.sequence.layout

    def __deepcopy__(self, _memo: object) -> "SequenceContext":
        """Returns the context itself: a copy of a patched model attends over the same ranks."""
        self.forward_pass.shared = True
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a patched model holds a process group and cannot be pickled; save its state_dict")


_CONTEXTS: dict[str, SequenceContext] = {}


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
    if config.recurrent_schedule not in RECURRENT_SCHEDULES:
        choices = ", ".join(RECURRENT_SCHEDULES)
        raise ValueError(f"recurrent_schedule {config.recurrent_schedule!r} is unknown; choose one of {choices}")
    spec = kernel_spec(config, shape.head_dim, compute_capability(device), shape.values)
    if device.type == "cuda" and config.transport.startswith(("auto", "symmetric")):
        disable_multicast()
    if config.kernel in ("auto", "fa4") and why_unsupported("fa4", spec) is None:
        cache_compiled_kernels()
    transport = make_transport(config.transport, group, device)
    world, rated = dist.get_world_size(group), base_transport_name(transport.name)
    if config.gpus_per_host is not None and rated == "nccl":
        config = replace(config, gpus_per_host=_smallest(group, config.gpus_per_host))
    chosen = choose(schedule_request(config, world, shape, rated))
    schedule = make_schedule(chosen.schedule, world, chosen.head_groups or 1, chosen.ulysses_size)
    if config.carries_states:
        schedule = with_few_fragments(schedule)
    kernels = Kernels(config.kernel, spec)
    for layer in (shape, *shape.other_layers):
        check_heads(schedule, layer.heads, layer.kv_heads)
        kernels.of(layer.head_dim, layer.values)
    keeps_gathered = config.keep_gathered and schedule.can_keep_gathered
    # Compiled graphs contain the name and torch's disk cache looks them up by it, so it must determine all shapes.
    sizes = f"{schedule.ulysses_size}x{schedule.head_groups_per_rank}{'-keeps' if keeps_gathered else ''}"
    sequence = make_sequence_group(
        group,
        schedule.layout,
        transport,
        balances_documents=has_own_layouts(schedule),
        stem=f"{chosen.schedule}-{schedule.world}-{sizes}",
    )
    context = SequenceContext(
        sequence,
        schedule,
        kernels,
        recurrent_schedule=config.recurrent_schedule,
        keeps_gathered=keeps_gathered,
        config=config,
    )
    _CONTEXTS[context.name] = context
    return context


def context_beside(context: SequenceContext, shape: AttentionShape, config: AttentionConfig) -> SequenceContext:
    """Returns the context of another model over the same ranks, in the same layout and over the same transport.

    It is the given one if its schedule and kernels take the other model's layers. `config` has what these need. Raises
    ValueError for windows, heads or recurrences that the schedule does not support.
    """
    assert config.device is not None, "the caller sets it"
    schedule, layers = _schedule_beside(context.schedule, shape, config), (shape, *shape.other_layers)
    spec, own = kernel_spec(config, shape.head_dim, compute_capability(config.device)), context.kernels.spec
    if schedule is context.schedule and replace(own, head_dim=0, value_dim=None) == replace(spec, head_dim=0):
        kernels = context.kernels
    else:
        kernels = Kernels(config.kernel, spec)
    for layer in layers:
        kernels.of(layer.head_dim, layer.values)
    if kernels is context.kernels:
        return context
    sequence = make_sequence_group(
        context.group,
        schedule.layout,
        context.transport,
        balances_documents=context.sequence.balances_documents,
        stem=f"{schedule.name}-{schedule.world}-{schedule.ulysses_size}x{schedule.head_groups_per_rank}",
    )
    beside = SequenceContext(sequence, schedule, kernels, recurrent_schedule=config.recurrent_schedule, config=config)
    _CONTEXTS[beside.name] = beside
    return beside


def _schedule_beside(schedule: Schedule, shape: AttentionShape, config: AttentionConfig) -> Schedule:
    """Returns a schedule of the same layout for other layers, which may need fewer groups of heads."""
    if config.windows:
        check_takes_windows(schedule.name)
    if config.carries_states and config.recurrent_schedule != HEADS:
        check_takes_recurrences(schedule.name)
    layers = (shape, *shape.other_layers)
    if all(allows_heads(schedule, layer.heads, layer.kv_heads) for layer in layers):
        return schedule
    with_one_group = make_schedule(schedule.name, schedule.world, ulysses_size=schedule.ulysses_size)
    for layer in layers:
        check_heads(with_one_group, layer.heads, layer.kv_heads)
    return replace(with_one_group, layout=schedule.layout)


def _smallest(group: dist.ProcessGroup, size: int) -> int:
    """Returns the smallest of all ranks' sizes. Hosts may differ in size, but all ranks must choose one schedule."""
    sizes = [size] * dist.get_world_size(group)
    dist.all_gather_object(sizes, size, group=group)
    return min(sizes)


def kernel_spec(
    config: AttentionConfig, head_dim: int, capability: tuple[int, int], value_dim: int | None = None
) -> KernelSpec:
    """Returns the requirements of a kernel, on a device of this CUDA compute capability."""
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
        value_dim=value_dim,
    )


def schedule_request(config: AttentionConfig, world: int, shape: AttentionShape, transport: str) -> ScheduleRequest:
    """Returns the conditions for choosing a schedule. `transport` is a name without suffixes."""
    takes_all = config.recurrent_schedule == HEADS and config.schedule != AUTO  # and a layout is set
    return ScheduleRequest(
        world=world,
        shape=shape,
        transport=transport,
        requested=ScheduleChoice(config.schedule, config.ulysses_size, config.head_groups),
        gpus_per_host=config.gpus_per_host or world,
        keep_gathered=config.keep_gathered,
        packed=config.packed,
        windows=config.windows,
        carries_states=config.carries_states and not takes_all,
        slices_heads=config.layers_slice_heads,
    )


@cache
def one_rank_context() -> SequenceContext:
    """Returns a context of one rank without a process group, for tracing layers on fake tensors."""
    ring = make_schedule("ring", 1)
    sequence = traced_group(ring.layout)
    context = SequenceContext(sequence, ring, kernels=None)  # type: ignore[arg-type]
    _CONTEXTS[context.name] = context
    return context


def area_balance(context: SequenceContext, documents: Documents) -> float:
    """Returns the mean attention area of a rank over the largest, for one packed sequence."""
    return balance(packed_schedule(context.schedule, documents.nodes))


def release(context: SequenceContext) -> None:
    """Drops a context and frees the memory of its transport. Attention must not use it afterwards.

    A context that a deep copy of the model uses too is kept.
    """
    if not context.forward_pass.shared:
        _CONTEXTS.pop(context.name, None)
        release_group(context.sequence)


def find(name: str) -> SequenceContext:
    """Returns the context with this name. Raises KeyError after `release`."""
    return _CONTEXTS[name]
