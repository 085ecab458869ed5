"""Computes a tile under any mask or segments with any kernel: in one call of variable lengths where the kernel has one.

Shape suffixes: S query tokens, T key tokens, H query heads, K key/value heads, D head dim. Segments want a batch of 1.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lightseq.kernels.base import GradientRoom, Kernel, backward_dense, forward_dense, gradient_room
from lightseq.schedule.segments import KEYS, ROWS, Round, Segments
from lightseq.schedule.table import Mask


class Lengths(NamedTuple):
    """Segments side by side as flash kernels take them: where each begins, and the end (int32, on the device)."""

    q: Tensor
    k: Tensor
    longest_q: int
    longest_k: int


@runtime_checkable
class VarlenKernel(Protocol):
    """A kernel that computes segments side by side in one call, causal masks aligned bottom-right in each."""

    def forward_varlen(
        self,
        q_SHD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        lengths: Lengths,
        causal: bool,
        scale: float,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """out (S, H, D) and lse (H, S)."""
        ...

    def backward_varlen(
        self, dout_SHD: Tensor, q_SHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_SHD: Tensor, lse_HS: Tensor,
        lengths: Lengths, causal: bool, scale: float, into: GradientRoom = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


def forward_tile(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Segments, scale: float, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one tile. Rows that see no key have out 0 and lse -inf.

    `into` is memory that out may be written to; whether it was, one sees from the tensor that is returned.
    """
    if isinstance(mask, Mask):
        return forward_dense(kernel, q, k, v, mask, scale, into)
    parts = _parts(mask, q.device)
    if len(parts) == 1 and parts[0].is_all(q):
        return _forward(kernel, q, parts[0].keys(k), parts[0].keys(v), parts[0], scale, into)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format) if into is None else into.zero_()
    lse = q.new_full((1, q.shape[2], q.shape[1]), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for part in parts:
        made, made_lse = _forward(kernel, part.queries(q), part.keys(k), part.keys(v), part, scale)
        out[:, part.q], lse[:, :, part.q] = made, made_lse
    return out, lse


def backward_tile(
    kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask | Segments,
    scale: float, into: GradientRoom = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of one tile, from the global out and lse. `into` as in `forward_tile`."""
    if isinstance(mask, Mask):
        return backward_dense(kernel, dout, q, k, v, out, lse, mask, scale, into)
    dq, dk, dv = gradient_room(into, (q, k, v))
    parts = _parts(mask, q.device)
    part, rows, keys = parts[0], parts[0].q, parts[0].k
    if len(parts) == 1 and isinstance(rows, slice) and isinstance(keys, slice):
        room = part.queries(dq), part.keys(dk), part.keys(dv)
        made = _backward(kernel, dout, q, k, v, out, lse, part, scale, room)
        for x, here in ((dq, rows), (dk, keys), (dv, keys)):
            x[:, : here.start], x[:, here.stop :] = 0, 0
        for x, gradient in zip(room, made, strict=True):
            if x is not gradient:
                x.copy_(gradient)
        return dq, dk, dv
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]  # several parts may share keys
    for part in parts:
        made = _backward(kernel, dout, q, k, v, out, lse, part, scale, (None, None, None))
        for total, gradient, where in zip(sums, made, (part.q, part.k, part.k), strict=True):
            total[:, where] += gradient  # no place twice in one part
    for x, total in zip((dq, dk, dv), sums, strict=True):
        x.copy_(total)
    return dq, dk, dv


# ---- one round -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A round as it is on a device: which rows it takes, side by side, and how long its segments are there."""

    q: slice | Tensor
    k: slice | Tensor
    lengths: Lengths
    causal: bool
    sizes: tuple[tuple[int, int], ...]  # queries and keys of each segment

    def queries(self, x_BSHD: Tensor) -> Tensor:
        return x_BSHD[:, self.q]

    def keys(self, x_BTKD: Tensor) -> Tensor:
        return x_BTKD[:, self.k]

    def is_all(self, q: Tensor) -> bool:
        return isinstance(self.q, slice) and (self.q.start, self.q.stop) == (0, q.shape[1])


def _parts(segments: Segments, device: torch.device) -> tuple[_Part, ...]:
    """Made once for a device: every layer of a batch runs the same segments."""
    if device not in segments.known:
        segments.known[device] = tuple(_part(found, device) for found in segments.rounds)
    return segments.known[device]


def _part(found: Round, device: torch.device) -> _Part:
    def here(x: np.ndarray) -> Tensor:  # from pinned memory, so that the host does not wait for the stream
        tensor = torch.from_numpy(x)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    rows, keys = found.segments[:, ROWS], found.segments[:, KEYS]
    begins = here(np.stack([np.concatenate([[0], np.cumsum(x)]) for x in (rows, keys)]).astype(np.int32))
    q, k = (x if isinstance(x, slice) else here(x) for x in (found.queries, found.keys))
    lengths = Lengths(begins[0], begins[1], int(rows.max()), int(keys.max()))
    return _Part(q, k, lengths, found.causal, tuple(zip(rows.tolist(), keys.tolist(), strict=True)))


def _forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of the rows that a round takes, side by side already."""
    mask = Mask.CAUSAL if part.causal else Mask.FULL
    if len(part.sizes) == 1:
        return forward_dense(kernel, q, k, v, mask, scale, into)
    if isinstance(kernel, VarlenKernel):
        room = None if into is None else into[0]
        out, lse = kernel.forward_varlen(q[0], k[0], v[0], part.lengths, part.causal, scale, room)
        return (into if into is not None and out is room else out.unsqueeze(0)), lse.unsqueeze(0)
    rows, keys = zip(*part.sizes, strict=True)
    made = [
        forward_dense(kernel, *one, mask, scale)
        for one in zip(q.split(rows, 1), k.split(keys, 1), v.split(keys, 1), strict=True)
    ]
    outs, lses = zip(*made, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def _backward(
    kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: _Part,
    scale: float, into: GradientRoom,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dout, q, out, lse = part.queries(dout), part.queries(q), part.queries(out), lse[:, :, part.q]
    k, v, mask = part.keys(k), part.keys(v), Mask.CAUSAL if part.causal else Mask.FULL
    if len(part.sizes) == 1:
        return backward_dense(kernel, dout, q, k, v, out, lse, mask, scale, into)
    if isinstance(kernel, VarlenKernel):
        room_q, room_k, room_v = (None if x is None else x[0] for x in into)
        room = room_q, room_k, room_v
        made = kernel.backward_varlen(dout[0], q[0], k[0], v[0], out[0], lse[0], part.lengths, part.causal, scale, room)
        dq, dk, dv = (
            whole if whole is not None and x is there else x.unsqueeze(0)
            for x, there, whole in zip(made, room, into, strict=True)
        )
        return dq, dk, dv
    rows, keys = zip(*part.sizes, strict=True)
    per_row = zip(*(x.split(rows, 1) for x in (dout, q, out)), lse.split(rows, 2), strict=True)
    per_key = zip(k.split(keys, 1), v.split(keys, 1), strict=True)
    grads = [
        backward_dense(kernel, d_, q_, k_, v_, o_, l_, mask, scale)
        for (d_, q_, o_, l_), (k_, v_) in zip(per_row, per_key, strict=True)
    ]
    dq, dk, dv = (torch.cat(x, 1) for x in zip(*grads, strict=True))
    return dq, dk, dv
