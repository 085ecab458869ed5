"""Attention in plain torch: any dtype, any device, quadratic memory. Other kernels are tested against it."""

from typing import Literal

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor

from lightseq.kernels.base import GradientMemory, KernelSpec, Saved


class ReferenceKernel:
    name = "reference"
    causal_alignment: Literal["bottom_right"] = "bottom_right"
    has_windows = True

    def why_not(self, spec: KernelSpec) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        scores = _scores(q, k, causal, scale, window)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse.unsqueeze(-1))
        v_BTHD = _repeat_heads(v, q).to(p.dtype)
        return torch.einsum("bhst,bthd->bshd", p, v_BTHD).to(q.dtype), lse

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, out, lse = saved
        wide = lse.dtype
        p = torch.exp(_scores(q, k, causal, scale, window) - lse.unsqueeze(-1))
        dv = torch.einsum("bhst,bshd->bthd", p, dout.to(wide))
        dp = torch.einsum("bshd,bthd->bhst", dout.to(wide), _repeat_heads(v, q).to(wide))
        delta = rearrange(reduce(dout.to(wide) * out.to(wide), "b s h d -> b h s", "sum"), "b h s -> b h s 1")
        ds = p * (dp - delta) * scale
        dq = torch.einsum("bhst,bthd->bshd", ds, _repeat_heads(k, q).to(wide))
        dk = torch.einsum("bhst,bshd->bthd", ds, q.to(wide))
        dk, dv = (reduce(x, "b t (kv g) d -> b t kv d", "sum", kv=k.shape[2]) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, window: int | None) -> Tensor:
    """Returns scaled, masked scores (B, H, S, T), at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bshd,bthd->bhst", q.to(wide), _repeat_heads(k, q).to(wide)) * scale
    if causal:
        keys, queries = scores.shape[-1], scores.shape[-2]
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if window is not None:
            visible = visible.triu(keys - queries - window + 1)
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return repeat(x, "b t kv d -> b t (kv g) d", g=q.shape[2] // x.shape[2])
