"""Merge of attention outputs over different keys."""

import torch
from einops import rearrange
from torch import Tensor

from lightseq.kernels.fused.launches import fused_kernels


def merge(out_BSHD: Tensor, lse_BHS: Tensor, other_out_BSHD: Tensor, other_lse_BHS: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two outputs into the softmax over the union of their keys, in the sigmoid form, which cannot overflow.

    The result has the precision of `out` and `lse` (float32 while partial results accumulate). Rows of either that saw
    no key (lse -inf, out 0) change nothing.
    """
    weight = torch.sigmoid(other_lse_BHS - lse_BHS).masked_fill(other_lse_BHS == -torch.inf, 0)
    out = torch.lerp(out_BSHD, other_out_BSHD.to(out_BSHD.dtype), rearrange(weight, "b h s -> b s h 1"))
    return out, torch.logaddexp(lse_BHS, other_lse_BHS)


def merge_into(out_BSHD: Tensor, lse_BHS: Tensor, part_BSHD: Tensor, part_lse_BHS: Tensor) -> None:
    """Merges a part into out and lse in place, in the precision of lse; out may have less, and is rounded once."""
    if out_BSHD.is_meta:
        return  # the planner only counts memory, and the GPU kernel allocates none
    if fused := fused_kernels(out_BSHD):
        fused.merge_into(out_BSHD, lse_BHS, part_BSHD, part_lse_BHS)
    else:
        out, lse = merge(out_BSHD.to(lse_BHS.dtype), lse_BHS, part_BSHD, part_lse_BHS)
        out_BSHD.copy_(out)
        lse_BHS.copy_(lse)
