"""Distributed causal attention as one operator, which autograd, checkpointing and torch.compile see as a whole.

Shape suffixes: B batch, S local sequence, H query heads, K key/value heads, D head dim, E head dim of values.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lightseq.attention.context import SequenceContext, find
from lightseq.attention.executor import Executor
from lightseq.attention.gathered import Gathered, gathered_elements
from lightseq.attention.input_checks import check_shapes, compare_shapes
from lightseq.kernels.attention.base import Saved
from lightseq.kernels.attention.tile_kernel_choice import with_softcap
from lightseq.schedule.documents import packed_schedule
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.reach import Reach
from lightseq.schedule.table import Schedule
from lightseq.sequence.documents import Documents, nodes_of
from lightseq.utils.checkpoint_context import operator_wrapper, reuse_or_compute
from lightseq.utils.logit_transform import LogitTransform

LONG_FLOPS = 1e15  # one to two seconds of attention on one rank


def attention(
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    context: SequenceContext,
    scale: float | LogitTransform | None = None,
    documents: Documents | None = None,
    reach: Reach | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes causal attention of the local queries over the whole sequence, which is split over the group's ranks.

    Every rank of the group passes its part in the context's layout; K divides H. Returns out (B, S, H, D) in q's dtype
    and the log-sum-exp of the scaled scores (B, H, S), at least float32 and without a gradient. `scale` defaults to D
    ** -0.5; a `LogitTransform` also caps the scores, before the mask (Gemma 2). With `documents` the parts are in their
    layout, and no query sees a key of another document. `reach` limits the keys that a query sees to a window or a
    chunk. `sinks` (H,) are logits that every softmax of a head has besides its keys, without a value (gpt-oss,
    StreamingLLM, arXiv 2309.17453); the log-sum-exp includes them. Values may have another dimension than keys; out has
    theirs. Raises ValueError for shapes that do not fit
    together, and for a schedule without windows or a kernel without caps.
    """
    check_shapes(q_BSHD, k_BSKD, v_BSKD, context, documents)
    q, k, v = map(_last_dim_contiguous, (q_BSHD, k_BSKD, v_BSKD))
    call = _attention if _is_watched(q) else _Attention.apply
    boundaries = None if documents is None else documents.boundaries
    out, lse, _ = call(q, k, v, boundaries, sinks, _options(context, scale, reach, q))
    return out, lse


def attention_backward(
    dout_BSHD: Tensor,
    saved: Saved,
    context: SequenceContext,
    scale: float | LogitTransform | None = None,
    documents: Documents | None = None,
    reach: Reach | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv, shaped as q, k and v, for a caller of `attention` without autograd.

    `saved` holds its arguments and results, of attention without sinks.
    """
    q, k, v, out, lse = saved
    boundaries = None if documents is None else documents.boundaries
    qkv = [*map(_last_dim_contiguous, (q, k, v))]
    options = _options(context, scale, reach, q)
    return _gradient_function(dout_BSHD)(
        _last_dim_contiguous(dout_BSHD), qkv, *k.shape[2:], (out, lse), boundaries, options
    )


class _Options(NamedTuple):
    """Options of one call of attention, besides its tensors."""

    context: SequenceContext
    scale: float
    softcap: float | None
    reach: Reach | None

    def executor(self, table: Schedule, dim: int, value_dim: int) -> Executor:
        """Returns the executor of a table for heads with keys of `dim` and values of `value_dim`."""
        sequence, kernel = self.context.sequence, self.context.kernels.of(dim, value_dim).kernel
        kernel = with_softcap(kernel, self.softcap)
        return Executor(table, sequence.rank, kernel, sequence.transport, self.scale)


def _options(context: SequenceContext, scale: float | LogitTransform | None, reach: Reach | None, q: Tensor) -> str:
    """Returns the options as a string that `_read_options` reads, because a custom operator takes no objects.

    Compiled graphs contain the string and torch's disk cache keeps it, so it means the same in every process.
    """
    kind, tokens = ("", "") if reach is None else (reach.kind, reach.tokens)
    if isinstance(scale, LogitTransform):
        return f"{context.name}|{scale.scale}|{scale.cap}|{kind}|{tokens}"
    return f"{context.name}|{q.shape[-1] ** -0.5 if scale is None else scale}|None|{kind}|{tokens}"


def _read_options(text: str) -> _Options:
    name, *numbers = text.split("|")
    return _Options(find(name), *_numbers(*numbers))


@cache
def _numbers(scale: str, softcap: str, kind: str, tokens: str) -> tuple[float, float | None, Reach | None]:
    reach = Reach(kind, int(tokens)) if kind else None
    return float(scale), None if softcap == "None" else float(softcap), reach


def _is_watched(x: Tensor) -> bool:
    """Returns whether a compiler, a dispatch mode (as of a checkpoint) or a profiler has to see the operator."""
    traced = type(x) is not Tensor or torch.compiler.is_compiling()
    return traced or is_in_torch_dispatch_mode() or torch.autograd._profiler_enabled()


def _last_dim_contiguous(x: Tensor) -> Tensor:
    """Returns x with a contiguous last dimension, as kernels need it; the gradient of a sum is an expanded scalar."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _table(context: SequenceContext, q: Tensor, boundaries: Tensor | None, reach: Reach | None) -> Schedule:
    """Returns the schedule, limited to the documents if there are several, and to the window or the chunks."""
    nodes = Nodes((0, q.shape[1] * context.schedule.world)) if boundaries is None else nodes_of(boundaries)
    if reach is not None and reach.tokens < nodes.length:
        return reach.limit(context.schedule, nodes, packed=boundaries is not None)
    return context.schedule if boundaries is None else packed_schedule(context.schedule, nodes)


def _advance(context: SequenceContext, q: Tensor) -> None:
    """Counts a pass, and waits for it if it takes seconds, at no measurable cost for the GPU.

    A host that runs ahead fills the launch queue (about a thousand launches) and then blocks inside a launch. Some
    launches hold the interpreter lock, so the rank would miss signals and heartbeats and look dead to the others.
    """
    context.progress.passes += 1
    batch, tokens, heads, dim = q.shape
    if q.is_cuda and 2 * batch * tokens**2 * context.schedule.world * heads * dim >= LONG_FLOPS:
        torch.cuda.current_stream().synchronize()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor | None, sinks: Tensor | None, options: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, its log-sum-exp, and gathered operands for the backward pass (empty if not kept)."""
    if torch.is_inference_mode_enabled():  # buffers made in inference mode cannot be used in training later
        with torch.inference_mode(False), torch.no_grad():
            return _forward(q, k, v, boundaries, sinks, options)
    call = _read_options(options)
    context = call.context
    context.sequence.check_documents(boundaries)
    compare_shapes(context, q, v, boundaries)
    gathered = Gathered(_gathered_memory(context, q, v), *k.shape[2:])
    executor = call.executor(_table(context, q, boundaries, call.reach), k.shape[3], v.shape[3])
    out, lse = executor.forward(q, k, v, gathered if context.keeps_gathered else None)
    if sinks is not None:
        out, lse = _with_sinks(out, lse, sinks)
    _advance(context, q)
    return out, lse, gathered.memory


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds the sinks to the denominators of finished softmaxes."""
    whole = torch.logaddexp(lse, sinks.detach().to(lse.dtype)[:, None])
    share = torch.exp(lse - whole).transpose(1, 2).unsqueeze(-1)  # (B, S, H, 1): share of the keys
    return (out * share).to(out.dtype), whole


def _sink_gradients(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient of the sinks from this rank's queries. A sink acts as a key without a value."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def _forward_in_checkpoint(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor | None, sinks: Tensor | None, options: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `_forward`, unless a checkpoint around the operator has stored its results."""
    out, lse, gathered = reuse_or_compute(partial(_forward, q, k, v, boundaries, sinks, options))
    return out, lse, gathered


def _gathered_memory(context: SequenceContext, q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(gathered_elements(context.schedule, q, v) if context.keeps_gathered else 0)


_attention = torch.library.custom_op("lightseq::attention", _forward_in_checkpoint, mutates_args=())


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor | None, sinks: Tensor | None, options: str
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, lse, _gathered_memory(_read_options(options).context, q, v)


def _gradients(
    dout: Tensor,
    tensors: Sequence[Tensor],
    kv_heads: int,
    dim: int,
    results: Sequence[Tensor],
    boundaries: Tensor | None,
    options: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv from the forward pass's `results`, out and its log-sum-exp.

    `tensors` are the rank's own q, k and v, or one tensor that the forward pass gathered. `dim` is the dimension of
    keys.
    """
    call, (out, lse) = _read_options(options), results
    table = _table(call.context, dout, boundaries, call.reach)
    qkv: tuple[Tensor, Tensor, Tensor] | Gathered
    if len(tensors) == 1:
        table, qkv = table.with_gathered_backward, Gathered(tensors[0], kv_heads, dim)
    else:
        qkv = (tensors[0], tensors[1], tensors[2])
    gradients = call.executor(table, dim, dout.shape[3]).backward(dout, qkv, out, lse)
    _advance(call.context, dout)
    return gradients


_attention_backward = torch.library.custom_op("lightseq::attention_backward", _gradients, mutates_args=())


@_attention_backward.register_fake
def _(dout: Tensor, tensors: Sequence[Tensor], kv_heads: int, dim: int, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tokens, heads, value_dim = dout.shape
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    dq, dk, dv = (dout.new_empty(*tokens, *shape) for shape in shapes)
    return dq, dk, dv


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, boundaries, sinks, ctx.options = inputs
    out, lse, gathered = output
    ctx.kv_heads, ctx.dim = k.shape[2:]
    tensors = (gathered,) if _read_options(ctx.options).context.keeps_gathered else (q, k, v)
    ctx.save_for_backward(boundaries, sinks, out, lse, *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None, _dgathered: None):  # type: ignore[no-untyped-def]
    if dlse is not None:
        raise ValueError("no gradient flows through the log-sum-exp; detach it")
    assert dout is not None, "autograd calls the backward only if a gradient arrives"
    boundaries, sinks, out, lse, *tensors = ctx.saved_tensors
    gradients = _gradient_function(dout)(
        _last_dim_contiguous(dout), tensors, ctx.kv_heads, ctx.dim, (out, lse), boundaries, ctx.options
    )
    dsinks = None if sinks is None else _sink_gradients(dout, out, lse, sinks)
    return (*gradients, None, dsinks, None)


def _gradient_function(dout: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Returns `_gradients`, or its operator if autograd or a dispatch mode must see the call."""
    # With create_graph autograd records the call, so it has to be the operator, which refuses second derivatives.
    return _attention_backward if torch.is_grad_enabled() or _is_watched(dout) else _gradients


def _no_second_backward(_ctx, *_gradients):  # type: ignore[no-untyped-def]
    raise ValueError("distributed attention has no second derivatives; leave create_graph out")


_attention_backward.register_autograd(_no_second_backward)
_attention.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """Operator that bypasses torch's dispatcher, which takes the host longer than a kernel launch."""

    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        wrapper = operator_wrapper()  # inlines `reuse_or_compute`, to save a stack frame
        output = _forward(*inputs) if wrapper is None else wrapper(partial(_forward, *inputs))
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


ATTENTION_OP = torch.ops.lightseq.attention.default  # for the policy of a selective checkpoint
