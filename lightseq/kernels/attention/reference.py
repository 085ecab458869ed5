"""Attention in plain torch: any dtype, any device, quadratic memory. Other kernels are tested against it."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor

from lightseq.kernels.attention.base import GradientMemory, KernelSpec, Saved
from lightseq.utils.logit_transform import LogitTransform


@dataclass(frozen=True)
class ReferenceKernel:
    softcap: float | None = None
    name: ClassVar[str] = "reference"
    causal_alignment: ClassVar[Literal["bottom_right"]] = "bottom_right"
    has_windows: ClassVar[bool] = True

    def with_softcap(self, softcap: float) -> "ReferenceKernel":
        return replace(self, softcap=softcap)

    def why_unavailable(self, spec: KernelSpec) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        scores = _masked(self._scores(q, k, scale), causal, window)
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
        scores = self._scores(q, k, scale)
        slope = LogitTransform(scale, self.softcap).slope(scores)
        p = torch.exp(_masked(scores, causal, window) - lse.unsqueeze(-1))
        dv = torch.einsum("bhst,bshd->bthd", p, dout.to(wide))
        dp = torch.einsum("bshd,bthd->bhst", dout.to(wide), _repeat_heads(v, q).to(wide))
        delta = rearrange(reduce(dout.to(wide) * out.to(wide), "b s h d -> b h s", "sum"), "b h s -> b h s 1")
        ds = p * (dp - delta) * slope
        dq = torch.einsum("bhst,bthd->bshd", ds, _repeat_heads(k, q).to(wide))
        dk = torch.einsum("bhst,bshd->bthd", ds, q.to(wide))
        dk, dv = (reduce(x, "b t (kv g) d -> b t kv d", "sum", kv=k.shape[2]) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Returns scaled and capped scores (B, H, S, T), at least float32."""
        wide = torch.promote_types(q.dtype, torch.float32)
        products = torch.einsum("bshd,bthd->bhst", q.to(wide), _repeat_heads(k, q).to(wide))
        return LogitTransform(scale, self.softcap).logits(products)


def _masked(scores: Tensor, causal: bool, window: int | None) -> Tensor:
    if causal:
        keys, queries = scores.shape[-1], scores.shape[-2]
        visible = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
        if window is not None:
            visible = visible.triu(keys - queries - window + 1)
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return repeat(x, "b t kv d -> b t (kv g) d", g=q.shape[2] // x.shape[2])
