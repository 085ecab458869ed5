"""Softmax over blocks of scores, forward and backward: one fused pass over a block on a GPU, torch elsewhere.

Shape suffixes: K key/value heads, R rows (queries of all heads that share the keys), T keys of a block.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightseq.kernels.fused.launches import fused_kernels


class BlockMask(NamedTuple):
    """Causal mask of a block, with or without a window. Row r holds query r % `queries`.

    Query i sees the keys up to index i + `last`, its own, and only the last `window` of them.
    """

    queries: int
    last: int
    window: int | None

    def visible(self, rows: int, keys: int, device: torch.device) -> Tensor:
        """Returns which keys (R, T) the rows see."""
        own = torch.arange(rows, device=device).remainder(self.queries).unsqueeze(1) + self.last
        key = torch.arange(keys, device=device)
        seen = key <= own
        return seen if self.window is None else seen & (key > own - self.window)


@dataclass
class SoftmaxState:
    """Running maximum and sum of each row (K, R), and the factor by which earlier results shrink after a new block."""

    maxima: Tensor
    sums: Tensor
    rescale: Tensor

    @classmethod
    def empty(cls, q_KRD: Tensor) -> "SoftmaxState":
        """Returns the state of rows that have seen no key yet."""
        wide = torch.promote_types(q_KRD.dtype, torch.float32)
        maxima = torch.full(q_KRD.shape[:2], -torch.inf, dtype=wide, device=q_KRD.device)
        return cls(maxima, torch.zeros_like(maxima), torch.zeros_like(maxima))

    def add(self, scores_KRT: Tensor, scale: float, mask: BlockMask | None, dtype: torch.dtype) -> Tensor:
        """Adds a block of scores, before their scale. Returns its weights (K, R, T): exponentials against the maximum.

        The weights are not divided by the sums.
        """
        weights = torch.empty(scores_KRT.shape, dtype=dtype, device=scores_KRT.device)
        if fused := fused_kernels(scores_KRT, "score_block_kernels"):
            fused.softmax_block(scores_KRT, scale, mask, self, weights)
            return weights
        scores = _masked(scores_KRT * scale, mask)
        maxima = torch.maximum(self.maxima, scores.amax(-1))
        reached = maxima.masked_fill(maxima == -torch.inf, 0)  # rows that have seen no key yet
        exponentials = torch.exp(scores - reached.unsqueeze(-1))
        self.rescale = torch.exp(self.maxima - reached)
        self.sums = self.sums * self.rescale + exponentials.sum(-1)
        self.maxima = maxima
        return weights.copy_(exponentials)

    def lse(self) -> Tensor:
        """Returns the log-sum-exp of each row's scaled scores (K, R)."""
        return self.maxima + torch.log(self.sums)


def gradients(
    scores_KRT: Tensor,
    slopes_KRT: Tensor,
    lse_KR: Tensor,
    delta_KR: Tensor,
    scale: float,
    mask: BlockMask | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns the weights of a block, and the gradient of its scores before their scale.

    `slopes` are the products of the result's gradient with the values; `delta` those with the result itself. `lse` is
    over the keys of all blocks.
    """
    weights, dscores = (torch.empty(scores_KRT.shape, dtype=dtype, device=scores_KRT.device) for _ in range(2))
    if fused := fused_kernels(scores_KRT, "score_block_kernels"):
        fused.gradient_block(scores_KRT, slopes_KRT, lse_KR, delta_KR, scale, mask, weights, dscores)
        return weights, dscores
    p = torch.exp(_masked(scores_KRT * scale, mask) - lse_KR.unsqueeze(-1))
    dscores.copy_(p * (slopes_KRT - delta_KR.unsqueeze(-1)) * scale)
    return weights.copy_(p), dscores


def _masked(scores: Tensor, mask: BlockMask | None) -> Tensor:
    if mask is None:
        return scores
    _, rows, keys = scores.shape
    return scores.masked_fill(~mask.visible(rows, keys, scores.device), -torch.inf)
