"""Computation of a tile under any mask, or segments, with any kernel.

Every mask is reduced to the two that kernels have, full and causal. Segments are computed in one varlen call if the
kernel has one, else one by one. If the kernel has no windows, the reference kernel computes them in blocks of queries.

Shape suffixes: B batch (1 with segments), S query tokens, T key tokens, H query heads, K key/value heads, D head dim,
E head dim of values.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightseq.kernels.attention.base import GradientMemory, Kernel, Saved, gradient_memory
from lightseq.kernels.attention.lse_merge import merge_into
from lightseq.kernels.attention.reference import ReferenceKernel
from lightseq.kernels.attention.segment_calls import DeviceCall, Lengths, calls_on
from lightseq.schedule.segments import Segments
from lightseq.schedule.table import Mask

REFERENCE = ReferenceKernel()
MIN_BLOCK_QUERIES = 64  # in a block of a window that the reference kernel computes


def forward_tile(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Segments, scale: float, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of one tile. Rows that see no key have out 0 and lse -inf.

    `into` is memory that out may be written to; if it is, that tensor is returned.
    """
    if isinstance(mask, Segments):
        return _forward_segments(kernel, q, k, v, mask, scale, into)
    if mask is Mask.FULL:
        return kernel.forward(q, k, v, False, scale, into)
    if mask is Mask.STRICT:
        return _forward_strict(kernel, q, k, v, scale)
    before = k.shape[1] - q.shape[1]
    assert before >= 0, "a causal tile has at least as many keys as queries"
    if before == 0 or kernel.causal_alignment == "bottom_right":
        return kernel.forward(q, k, v, True, scale, into)
    out, lse = kernel.forward(q, k[:, :before], v[:, :before], False, scale)
    diagonal_out, diagonal_lse = kernel.forward(q, k[:, before:], v[:, before:], True, scale)
    merged = out.to(lse.dtype)
    merge_into(merged, lse, diagonal_out, diagonal_lse)
    return merged.to(q.dtype) if into is None else into.copy_(merged), lse


def backward_tile(
    kernel: Kernel, dout: Tensor, saved: Saved, mask: Mask | Segments, scale: float,
    into: GradientMemory = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (dq, dk, dv) of one tile, from the global out and lse. `into` as in `forward_tile`."""
    if isinstance(mask, Segments):
        return _backward_segments(kernel, dout, saved, mask, scale, into)
    if mask is Mask.FULL:
        return kernel.backward(dout, saved, False, scale, into)
    if mask is Mask.STRICT:
        return _backward_strict(kernel, dout, saved, scale)
    before = saved.k.shape[1] - saved.q.shape[1]
    if before == 0 or kernel.causal_alignment == "bottom_right":
        return kernel.backward(dout, saved, True, scale, into)
    dq, dk, dv = gradient_memory(into, saved)
    dqs = []
    for keys, causal in ((slice(before), False), (slice(before, None), True)):
        memory = (None, dk[:, keys], dv[:, keys])
        part = saved._replace(k=saved.k[:, keys], v=saved.v[:, keys])
        made = kernel.backward(dout, part, causal, scale, memory)
        dqs.append(made[0])
        for x, gradient in zip(memory[1:], made[1:], strict=True):
            if x is not gradient:
                x.copy_(gradient)
    return torch.add(*dqs, out=dq), dk, dv  # each is rounded by its kernel, and the sum again


# ---- strict: the causal tile of all queries but the first against all keys but the last ------------------------------


def _forward_strict(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    assert q.shape[1] == k.shape[1], "a strict tile is square"
    batch, length, heads, _ = q.shape
    out = q.new_zeros(batch, length, heads, v.shape[3])
    lse = q.new_full((batch, heads, length), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    if length > 1:
        out[:, 1:], lse[:, :, 1:] = kernel.forward(q[:, 1:], k[:, :-1], v[:, :-1], True, scale)
    return out, lse


def _backward_strict(kernel: Kernel, dout: Tensor, saved: Saved, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if q.shape[1] > 1:
        inner = Saved(q[:, 1:], k[:, :-1], v[:, :-1], out[:, 1:], lse[:, :, 1:])
        dq[:, 1:], dk[:, :-1], dv[:, :-1] = kernel.backward(dout[:, 1:], inner, True, scale)
    return dq, dk, dv


# ---- segments -------------------------------------------------------------------------------------------------------


@runtime_checkable
class VarlenKernel(Protocol):
    """Interface of a kernel that computes several segments in one call, causal masks aligned bottom-right in each."""

    def forward_varlen(
        self, q_SHD: Tensor, k_TKD: Tensor, v_TKE: Tensor, lengths: Lengths, causal: bool, scale: float,
        into: Tensor | None = None, window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns out (S, H, E) and lse (H, S)."""
        ...

    def backward_varlen(
        self, dout_SHE: Tensor, saved: Saved, lengths: Lengths, causal: bool, scale: float,
        into: GradientMemory = (None, None, None), window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns dq, dk and dv; `saved` has no batch dimension: (S, H, D), (T, K, D) ... and lse (H, S)."""
        ...


def _forward_segments(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    first, *others = calls_on(segments, q.device)
    if first.has_all_queries(q):
        out, lse = _forward_call(kernel, q, k[:, first.keys], v[:, first.keys], first, scale, into)
    else:
        out = q.new_zeros(*q.shape[:3], v.shape[3]) if into is None else into.zero_()
        lse = q.new_full((1, q.shape[2], q.shape[1]), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        out[:, first.queries], lse[:, :, first.queries] = _forward_call(kernel, *first.inputs(q, k, v), first, scale)
    if not segments.shares_queries:
        for call in others:
            out[:, call.queries], lse[:, :, call.queries] = _forward_call(kernel, *call.inputs(q, k, v), call, scale)
        return out, lse
    sums = out if len(others) == 1 else out.to(lse.dtype)  # merged once, it is also rounded once
    for call in others:
        _merge_call(sums, lse, _forward_call(kernel, *call.inputs(q, k, v), call, scale), call.queries)
    if sums is not out:
        out.copy_(sums)
    return out, lse


def _merge_call(out: Tensor, lse: Tensor, part: tuple[Tensor, Tensor], queries: slice | Tensor) -> None:
    """Merges the result of a call for these queries into out and lse in place."""
    if isinstance(queries, slice):
        merge_into(out[:, queries], lse[:, :, queries], *part)
        return
    own_out, own_lse = out[:, queries], lse[:, :, queries]  # copies
    merge_into(own_out, own_lse, *part)
    out[:, queries], lse[:, :, queries] = own_out, own_lse


def _forward_call(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, call: DeviceCall, scale: float, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of one call; q, k and v hold only its queries and keys."""
    if len(call.sizes) == 1:
        return _forward_segment(kernel, q, k, v, call, scale, into)
    if isinstance(kernel, VarlenKernel):
        memory = None if into is None else into[0]
        out, lse = kernel.forward_varlen(q[0], k[0], v[0], call.lengths, call.causal, scale, memory, call.window)
        return (into if into is not None and out is memory else out.unsqueeze(0)), lse.unsqueeze(0)
    rows, keys = zip(*call.sizes, strict=True)
    made = [
        _forward_segment(kernel, *segment, call, scale)
        for segment in zip(q.split(rows, 1), k.split(keys, 1), v.split(keys, 1), strict=True)
    ]
    outs, lses = zip(*made, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def _backward_segments(
    kernel: Kernel, dout: Tensor, saved: Saved, segments: Segments, scale: float, into: GradientMemory
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = gradient_memory(into, saved)
    wide = torch.promote_types(saved.q.dtype, torch.float32)
    calls = list(calls_on(segments, saved.q.device))
    if any(call.repeats_keys for call in calls):
        sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in saved[:3]]
    else:
        _write_gradients(kernel, dout, saved, calls.pop(0), scale, gradients)
        # One more gradient is added, and rounded, once. More of them are summed in float32.
        sums = gradients if len(calls) <= 1 else [x.to(wide) for x in gradients]
    for call in calls:
        made = _backward_call(kernel, dout, saved, call, scale, (None, None, None))
        for total, gradient, where in zip(sums, made, (call.queries, call.keys, call.keys), strict=True):
            if isinstance(where, Tensor) and where is not call.queries and call.repeats_keys:
                total.index_add_(1, where, gradient.to(total.dtype))
            else:
                total[:, where] += gradient
    for x, total in zip(gradients, sums, strict=True):
        if x is not total:
            x.copy_(total)
    return gradients[0], gradients[1], gradients[2]


def _write_gradients(
    kernel: Kernel, dout: Tensor, saved: Saved, call: DeviceCall, scale: float, memory: list[Tensor]
) -> None:
    """Writes the gradients of one call, whose keys do not repeat, and zeros outside its queries and keys."""
    places = (call.queries, call.keys, call.keys)
    in_place = all(isinstance(where, slice) for where in places)
    parts = [x[:, where] if in_place else None for x, where in zip(memory, places, strict=True)]
    made = _backward_call(kernel, dout, saved, call, scale, (parts[0], parts[1], parts[2]))
    for x, where, part, gradient in zip(memory, places, parts, made, strict=True):
        if isinstance(where, slice):
            x[:, : where.start], x[:, where.stop :] = 0, 0
        else:
            x.zero_()
        if gradient is not part:
            x[:, where] = gradient


def _backward_call(
    kernel: Kernel, dout: Tensor, saved: Saved, call: DeviceCall, scale: float, into: GradientMemory
) -> tuple[Tensor, Tensor, Tensor]:
    dout, saved = dout[:, call.queries], call.select(saved)
    if len(call.sizes) == 1:
        return _backward_segment(kernel, dout, saved, call, scale, into)
    if isinstance(kernel, VarlenKernel):
        dq_, dk_, dv_ = (None if x is None else x[0] for x in into)
        memory = dq_, dk_, dv_
        one = Saved(*(x[0] for x in saved))
        made = kernel.backward_varlen(dout[0], one, call.lengths, call.causal, scale, memory, call.window)
        dq, dk, dv = (
            whole if whole is not None and x is there else x.unsqueeze(0)
            for x, there, whole in zip(made, memory, into, strict=True)
        )
        return dq, dk, dv
    rows, keys = zip(*call.sizes, strict=True)
    split = (
        saved.q.split(rows, 1), saved.k.split(keys, 1), saved.v.split(keys, 1), saved.out.split(rows, 1),
        saved.lse.split(rows, 2),
    )  # fmt: skip
    grads = [
        _backward_segment(kernel, dout_, Saved(*segment), call, scale)
        for dout_, *segment in zip(dout.split(rows, 1), *split, strict=True)
    ]
    dq, dk, dv = (torch.cat(x, 1) for x in zip(*grads, strict=True))
    return dq, dk, dv


def _forward_segment(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, call: DeviceCall, scale: float, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if call.window is None or call.window >= k.shape[1]:
        return forward_tile(kernel, q, k, v, call.mask, scale, into)
    if kernel.has_windows:
        return kernel.forward(q, k, v, True, scale, into, call.window)
    made = [
        REFERENCE.forward(q[:, rows], k[:, keys], v[:, keys], True, scale, None, call.window)
        for rows, keys in _blocks(q.shape[1], k.shape[1], call.window)
    ]
    outs, lses = zip(*made, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def _backward_segment(
    kernel: Kernel, dout: Tensor, saved: Saved, call: DeviceCall, scale: float,
    into: GradientMemory = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, out, lse = saved
    if call.window is None or call.window >= k.shape[1]:
        return backward_tile(kernel, dout, saved, call.mask, scale, into)
    if kernel.has_windows:
        return kernel.backward(dout, saved, True, scale, into, call.window)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.promote_types(k.dtype, torch.float32)
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))  # neighbouring blocks share keys
    for rows, keys in _blocks(q.shape[1], k.shape[1], call.window):
        block = Saved(q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows])
        dq[:, rows], dk_, dv_ = REFERENCE.backward(dout[:, rows], block, True, scale, (None, None, None), call.window)
        dk[:, keys] += dk_
        dv[:, keys] += dv_
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _blocks(queries: int, keys: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of queries of a window's length, and the keys that they see."""
    size, before = max(window, MIN_BLOCK_QUERIES), keys - queries
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        yield slice(start, stop), slice(max(before + start - window + 1, 0), before + stop)
