"""What a kernel is, and how every tile mask is brought down to the two cases that kernels know: full and causal.

Shape suffixes: B batch, S query tokens, T key tokens, H query heads, K key/value heads, D head dim.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lightseq.kernels.merge import merge_into
from lightseq.schedule.table import Mask


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel is asked to run on. `capability` is the CUDA compute capability, (0, 0) on CPU."""

    device_type: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    deterministic: bool = False
    packed: bool = False  # most tiles hold several documents


GradientRoom = tuple[Tensor | None, Tensor | None, Tensor | None]  # for dq, dk, dv


class Kernel(Protocol):
    """Computes one tile.

    out has q's shape and dtype; lse is (B, H, S) in float32 (float64 for float64 inputs), natural logarithm, of the
    scaled scores. The backward takes the *global* out and lse of its queries, whatever part of the keys it is given.
    `into` is memory, of any strides, that a kernel may write its result to; it returns that same tensor if it did.
    """

    @property
    def name(self) -> str: ...

    @property
    def causal_alignment(self) -> Literal["bottom_right", "square"]:
        """square: causal masks only where there are as many keys as queries."""
        ...

    @property
    def needs_out(self) -> bool:
        """False: less must travel with queries. Its backward also takes dout in the place of out, and then a complex64
        lse (B, H, S) that `row_terms` made: the log-sum-exp, and what out would have been needed for."""
        ...

    def why_not(self, spec: KernelSpec) -> str | None:
        """None if it can run here, otherwise the reason in a few words."""
        ...

    def forward(
        self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, causal: bool, scale: float, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, dout_BSHD: Tensor, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, out_BSHD: Tensor, lse_BHS: Tensor,
        causal: bool, scale: float, into: GradientRoom = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


def gradient_room(into: GradientRoom, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Memory for the gradients: what was given, else new."""
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if given is None else given
        for given, x in zip(into, inputs, strict=True)
    ]


def forward_dense(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one tile under any mask. Rows that see no key have out 0 and lse -inf.

    `into` is memory that out may be written to; whether it was, one sees from the tensor that is returned.
    """
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


def backward_dense(
    kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, scale: float,
    into: GradientRoom = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of one tile under any mask, from the global out and lse. `into` as in `forward_dense`."""
    if mask is Mask.FULL:
        return kernel.backward(dout, q, k, v, out, lse, False, scale, into)
    if mask is Mask.STRICT:
        return _backward_strict(kernel, dout, q, k, v, out, lse, scale)
    before = k.shape[1] - q.shape[1]
    if before == 0 or kernel.causal_alignment == "bottom_right":
        return kernel.backward(dout, q, k, v, out, lse, True, scale, into)
    dq, dk, dv = gradient_room(into, (q, k, v))
    of_queries = []
    for keys, causal in ((slice(before), False), (slice(before, None), True)):
        room = (None, dk[:, keys], dv[:, keys])
        made = kernel.backward(dout, q, k[:, keys], v[:, keys], out, lse, causal, scale, room)
        of_queries.append(made[0])
        for x, gradient in zip(room[1:], made[1:], strict=True):
            if x is not gradient:
                x.copy_(gradient)
    return torch.add(*of_queries, out=dq), dk, dv  # each rounded by its kernel, their sum once more


# A strict tile is the causal tile of all queries but the first against all keys but the last.


def _forward_strict(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    assert q.shape[1] == k.shape[1], "a strict tile is square"
    batch, length, heads, _ = q.shape
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full((batch, heads, length), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    if length > 1:
        out[:, 1:], lse[:, :, 1:] = kernel.forward(q[:, 1:], k[:, :-1], v[:, :-1], True, scale)
    return out, lse


def _backward_strict(
    kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if q.shape[1] > 1:
        dq[:, 1:], dk[:, :-1], dv[:, :-1] = kernel.backward(
            dout[:, 1:], q[:, 1:], k[:, :-1], v[:, :-1], out[:, 1:], lse[:, :, 1:], True, scale
        )
    return dq, dk, dv
