"""Distributed causal attention as one operator, which autograd, checkpointing and torch.compile see as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq import executor
from lightseq.comm import BLOCKING, Transport
from lightseq.documents import balance, check_boundaries, packed_schedule, padded, padded_length
from lightseq.gathered import Gathered, gathered_bytes
from lightseq.keeping import results_of
from lightseq.kernels import KernelSpec, Selection, select
from lightseq.kernels.elided import Elided
from lightseq.layout import Layout, shard
from lightseq.mesh import disable_multicast, keep_compiled_kernels
from lightseq.schedule import SCHEDULES, Schedule, check_heads, make_schedule
from lightseq.schedule_choice import Choice, cheapest, choices
from lightseq.schedule_cost import AttentionShape, cheapest_by_count
from lightseq.schedule_time import H200_SYMMETRIC, RATES
from lightseq.transports import make_transport

LONG_FLOPS = 1e15  # of a pass of attention on one rank: a second or two


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
    keep_gathered: bool = True  # from a forward pass to its backward pass, where the schedule can

    @property
    def keeps(self) -> bool:
        return self.keep_gathered and self.schedule.can_keep

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
        return _without_repeats(self.boundaries)

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


def _without_repeats(boundaries: Tensor) -> tuple[int, ...]:
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
        keep_gathered=keep_gathered,
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


def attention(
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    context: SequenceContext,
    scale: float | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the local queries over the whole sequence that the group's ranks hold together.

    Every rank of the group passes its part in the context's layout. Returns out (B, S, H, D) in q's dtype and the
    log-sum-exp of the scaled scores (B, H, S), at least float32, through which no gradient flows. `scale` defaults to
    D ** -0.5. With `documents`, in whose layout the parts then are, no query sees a key of another document. Raises
    ValueError for shapes that do not fit together.
    """
    _check_shapes(q_BSHD, k_BSKD, v_BSKD, context, documents)
    scale = q_BSHD.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = map(_readable, (q_BSHD, k_BSKD, v_BSKD))
    out, lse, _ = _attention(q, k, v, scale, context.name, None if documents is None else documents.boundaries)
    return out, lse


def attention_backward(
    dout_BSHD: Tensor,
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    out_BSHD: Tensor,
    lse_BHS: Tensor,
    context: SequenceContext,
    scale: float | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, for who called `attention` where no gradients were recorded: of the same arguments and results."""
    scale = q_BSHD.shape[-1] ** -0.5 if scale is None else scale
    boundaries = None if documents is None else documents.boundaries
    dout, *own = map(_readable, (dout_BSHD, q_BSHD, k_BSKD, v_BSKD))
    return _attention_backward(dout, own, k_BSKD.shape[2], out_BSHD, lse_BHS, scale, context.name, boundaries)


def _readable(x: Tensor) -> Tensor:
    """As kernels read it: the gradient of a sum, say, is one number expanded."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, documents: Documents | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape != v.shape or q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k and v do not fit together: {shapes}; expected (batch, sequence, heads, head_dim)")
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"as many keys as queries are needed: {shapes}; turn the key/value cache off (use_cache=False)"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads do not divide among {k.shape[2]} key/value heads")
    check_heads(context.schedule, q.shape[2], k.shape[2])
    if documents is not None:
        _check_packed(q, context, documents)
    elif q.shape[1] % context.layout.chunks_per_rank:
        raise ValueError(
            f"{q.shape[1]} local tokens do not divide into {context.layout.chunks_per_rank} chunks; "
            "shard the padded sequence with lightseq.layout.shard"
        )


def _check_packed(q: Tensor, context: SequenceContext, documents: Documents) -> None:
    if q.shape[0] != 1:
        raise ValueError(f"{q.shape[0]} packed sequences in a batch; documents need a batch of one, so lengthen that")
    expected = context.layout.world * q.shape[1]
    if not torch.compiler.is_compiling() and int(documents.boundaries[-1]) != expected:
        raise ValueError(
            f"{q.shape[1]} local tokens on {context.layout.world} ranks are not the {int(documents.boundaries[-1])} "
            "that the documents have; shard the sequence by their layout"
        )


def _table(context: SequenceContext, documents: Tensor | None) -> Schedule:
    """The schedule, for several documents limited to them."""
    return context.schedule if documents is None else packed_schedule(context.schedule, _without_repeats(documents))


def _agree_on_shapes(context: SequenceContext, q: Tensor, k: Tensor, documents: Tensor | None) -> None:
    """Raises ValueError on every rank if they differ, for else some would wait for ever. Asks once a shape."""
    shape = (*q.shape, k.shape[2], int(documents is not None))
    if shape in context.shapes or context.transport.name == "none":  # which waits for nobody
        return
    mine = (shape, None if documents is None else _without_repeats(documents))
    everyone = [mine] * context.schedule.world
    dist.all_gather_object(everyone, mine, group=context.group)
    if len({theirs for theirs, _ in everyone}) > 1:
        found = ", ".join(f"rank {rank} {x[0]} x {x[1]} tokens" for rank, (x, _) in enumerate(everyone))
        raise ValueError(f"the ranks pass different shapes to attention: {found}; shard one padded sequence for all")
    if len({boundaries for _, boundaries in everyone}) > 1:
        raise ValueError("the ranks pass different documents to attention; pack the same sequence on all of them")
    context.shapes.add(shape)


def _advance(context: SequenceContext, q: Tensor) -> None:
    """Counts a pass. The host waits for one that takes seconds, which costs the GPU nothing that could be measured.

    Otherwise it runs ahead until the queue of launches is full (about a thousand), and then waits at the next launch.
    Some of torch's hold the interpreter there, those of compiled kernels among them: for as long as attention takes no
    signal would be seen and no beat sent, and others would take the rank for dead.
    """
    context.progress.passes += 1
    batch, tokens, heads, dim = q.shape
    if q.is_cuda and 2 * batch * tokens**2 * context.schedule.world * heads * dim >= LONG_FLOPS:
        torch.cuda.current_stream().synchronize()


@torch.library.custom_op("lightseq::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, context: str, documents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out, its log-sum-exp, and what was gathered: bytes for the backward pass alone, none where it is not kept."""
    c = _CONTEXTS[context]

    def compute() -> tuple[Tensor, Tensor, Tensor]:
        _agree_on_shapes(c, q, k, documents)
        table, kernel = _table(c, documents), c.selection.kernel
        kept = Gathered(_room_to_keep(c, q, k), k.shape[2])
        out, lse = executor.attention_forward(
            q, k, v, table, c.rank, kernel, c.transport, scale, kept if c.keeps else None
        )
        _advance(c, q)
        return out, lse, kept.memory

    out, lse, kept = results_of(compute)
    return out, lse, kept


def _room_to_keep(context: SequenceContext, q: Tensor, k: Tensor) -> Tensor:
    size = gathered_bytes(context.schedule, q, k.shape[2]) if context.keeps else 0
    return q.new_empty(size, dtype=torch.uint8)


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: float, context: str, documents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse, _room_to_keep(_CONTEXTS[context], q, k)


@torch.library.custom_op("lightseq::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, tensors: Sequence[Tensor], kv_heads: int, out: Tensor, lse: Tensor, scale: float, context: str,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`tensors`: the rank's own q, k and v, or alone what the forward pass gathered."""
    c = _CONTEXTS[context]
    table, kernel = _table(c, documents), c.selection.kernel
    own: tuple[Tensor, Tensor, Tensor] | Gathered
    if len(tensors) == 1:
        table, own = table.keeping, Gathered(tensors[0], kv_heads)
    else:
        own = (tensors[0], tensors[1], tensors[2])
    gradients = executor.attention_backward(dout, own, out, lse, table, c.rank, kernel, c.transport, scale)
    _advance(c, dout)
    return gradients


@_attention_backward.register_fake
def _(
    dout: Tensor, tensors: Sequence[Tensor], kv_heads: int, out: Tensor, lse: Tensor, scale: float, context: str,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_keys = (*dout.shape[:2], kv_heads, dout.shape[3])
    return dout.new_empty(dout.shape), dout.new_empty(of_keys), dout.new_empty(of_keys)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, ctx.scale, ctx.context, documents = inputs
    out, lse, kept = output
    ctx.kv_heads = k.shape[2]
    ctx.save_for_backward(documents, out, lse, *((kept,) if _CONTEXTS[ctx.context].keeps else (q, k, v)))
    ctx.set_materialize_grads(False)


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None, _dkept: None):  # type: ignore[no-untyped-def]
    if dlse is not None:
        raise ValueError("no gradient flows through the log-sum-exp; detach it")
    assert dout is not None, "autograd calls the backward only where some gradient arrives"
    documents, out, lse, *tensors = ctx.saved_tensors
    gradients = _attention_backward(_readable(dout), tensors, ctx.kv_heads, out, lse, ctx.scale, ctx.context, documents)
    return (*gradients, None, None, None)


_attention.register_autograd(_backward, setup_context=_setup_context)

ATTENTION_OP = torch.ops.lightseq.attention.default  # what a checkpointing policy names
