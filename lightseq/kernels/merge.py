"""Joins attention outputs over different keys into one."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def merge(out_BSHD: Tensor, lse_BHS: Tensor, other_out_BSHD: Tensor, other_lse_BHS: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the union of two sets of keys, in the sigmoid form: no exponential of an lse can overflow.

    `out` and `lse` decide the precision (float32 where partial results accumulate); every row of `lse` must be finite.
    A row of `other` that saw no key (lse -inf, out 0) changes nothing.
    """
    weight = rearrange(torch.sigmoid(other_lse_BHS - lse_BHS), "b h s -> b s h 1")
    out = torch.lerp(out_BSHD, other_out_BSHD.to(out_BSHD.dtype), weight)
    return out, lse_BHS - F.logsigmoid(lse_BHS - other_lse_BHS)


def merge_into(out_BSHD: Tensor, lse_BHS: Tensor, part_BSHD: Tensor, part_lse_BHS: Tensor) -> None:
    """`merge` in place."""
    if fused := fused_kernels(out_BSHD):
        fused.merge_into(out_BSHD, lse_BHS, part_BSHD, part_lse_BHS)
    else:
        out, lse = merge(out_BSHD, lse_BHS, part_BSHD, part_lse_BHS)
        out_BSHD.copy_(out)
        lse_BHS.copy_(lse)


def add_into(totals: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], fresh: bool) -> None:
    """To every total adds the sum of its parts, in float32 or wider. `fresh`: the totals hold nothing yet.

    Totals have one shape, (B, S, N, D) or (B, N, S), dtype and strides among them, and so have parts but for strides.
    """
    if fused := fused_kernels(totals[0]):
        fused.add_into(totals, parts, fresh)
        return
    for total, pieces in zip(totals, parts, strict=True):
        wide = torch.promote_types(total.dtype, torch.float32)
        terms = [x.to(wide) for x in ([] if fresh else [total]) + list(pieces)]
        total.copy_(sum(terms[1:], start=terms[0]))


def copy_all(dst: Sequence[Tensor], src: Sequence[Tensor]) -> None:
    """dst[i].copy_(src[i]) for tensors of one shape, and one dtype and strides on either side."""
    if fused := fused_kernels(dst[0]):
        fused.add_into(dst, [[x] for x in src], fresh=True)
        return
    for x, y in zip(dst, src, strict=True):
        x.copy_(y)


def fused_kernels(x: Tensor) -> ModuleType | None:
    """The Triton versions of the two above, one pass over memory each, where they can run."""
    if not x.is_cuda or x.dtype is torch.float64 or find_spec("triton") is None:
        return None
    return import_module("lightseq.kernels.fused")
