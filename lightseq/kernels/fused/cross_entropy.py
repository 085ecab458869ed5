"""Triton kernels for cross entropy, which overwrites the logits with their gradient."""

# mypy: ignore-errors
# Triton's functions are compiled from their source and have no types that a checker could read.

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightseq.utils.logit_transform import UNCHANGED, LogitTransform

BLOCK = 8192  # logits that one program reads at once


def cross_entropy_(
    logits_NV: Tensor,
    labels_N: Tensor,
    ignore_index: int,
    with_gradient: bool,
    transform: LogitTransform = UNCHANGED,
    factors_N: Tensor | None = None,
    metrics: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Computes -log p(label) of every row (N,) for transformed logits, float32, 0 where the label is `ignore_index`.

    With the gradient, logits are overwritten with (p - onehot(label)) * slope of the transform, times the row's factor
    if there are float32 factors, and with 0 in rows without a label. `metrics` receives the entropy of every row's
    distribution, and 1 for rows whose label is the most probable one, the first of equals; both float32 (N,), 0 without
    a label.
    """
    assert logits_NV.is_contiguous() and labels_N.is_contiguous()
    rows, vocabulary = logits_NV.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    weighted = factors_N is not None
    assert not weighted or (factors_N.is_contiguous() and factors_N.dtype is torch.float32)
    entropies, hits = metrics or (losses, losses)
    assert all(x.is_contiguous() and x.dtype is torch.float32 for x in (entropies, hits))
    _cross_entropy[(rows,)](
        logits_NV, labels_N, losses, factors_N if weighted else losses, entropies, hits, ignore_index,
        transform.scale, transform.cap or 1.0, VOCABULARY=vocabulary, GRADIENT=with_gradient, WEIGHTED=weighted,
        METRICS=metrics is not None, CAPPED=transform.cap is not None, BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return losses


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x * factor in `dtype`, computed in float32. torch's own kernel for mixed dtypes takes twice as long."""
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    _scaled[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), factor, out, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def _cross_entropy(
    logits, labels, losses, factors, entropies, hits, ignore_index, scale, cap,
    VOCABULARY: tl.constexpr, GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr, METRICS: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    at = logits + row * VOCABULARY
    block = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if METRICS:
            tl.store(entropies + row, 0.0)
            tl.store(hits + row, 0.0)
        if GRADIENT:
            for start in range(0, VOCABULARY, BLOCK):
                tl.store(at + start + block, tl.zeros((BLOCK,), tl.float32), mask=start + block < VOCABULARY)
    else:
        # Load the target before the reductions: their barriers separate it from the writes below.
        target = tl.load(at + label).to(tl.float32) * scale
        if CAPPED:
            target = cap * _tanh(target / cap)
        highest = -3.0e38  # finite, because -inf minus -inf is NaN
        total = tl.zeros((BLOCK,), tl.float32)
        weighted = tl.zeros((BLOCK,), tl.float32)  # by its probability, the sum of the logits
        before = -float("inf")  # the highest logit before the label's
        for start in range(0, VOCABULARY, BLOCK):
            inside = start + block < VOCABULARY
            x = tl.load(at + start + block, mask=inside, other=-float("inf")).to(tl.float32)
            x *= scale
            if CAPPED:  # the cap would make padding finite
                x = tl.where(inside, cap * _tanh(x / cap), -float("inf"))
            higher = tl.maximum(highest, tl.max(x, 0))
            share = tl.exp(x - higher)
            if METRICS:
                weighted = weighted * tl.exp(highest - higher) + share * tl.where(inside, x, 0.0)
                before = tl.maximum(before, tl.max(tl.where(start + block < label, x, -float("inf")), 0))
            total = total * tl.exp(highest - higher) + share
            highest = higher
        exponentials = tl.sum(total, 0)
        lse = highest + tl.log(exponentials)
        tl.store(losses + row, lse - target)
        if METRICS:
            tl.store(entropies + row, lse - tl.sum(weighted, 0) / exponentials)
            tl.store(hits + row, ((target >= highest) & (target > before)).to(tl.float32))
        if GRADIENT:
            factor = scale * tl.load(factors + row) if WEIGHTED else scale
            for start in range(0, VOCABULARY, BLOCK):
                inside = start + block < VOCABULARY
                x = tl.load(at + start + block, mask=inside).to(tl.float32) * scale
                slope = factor
                if CAPPED:
                    t = _tanh(x / cap)
                    x, slope = cap * t, factor * (1 - t * t)
                gradient = (tl.exp(x - lse) - (start + block == label)) * slope
                tl.store(at + start + block, gradient, mask=inside)


@triton.jit
def _tanh(x):
    e = tl.exp(-2 * tl.abs(x))
    large = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    s = x * x
    small = x * (1 - s * (1 / 3 - s * (2 / 15 - s * (17 / 315))))  # 1 - e would lose the digits of small numbers
    return tl.where(s < 0.01, small, large)


@triton.jit
def _scaled(x, factor, out, elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    product = tl.load(x + at, mask=inside).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + at, product, mask=inside)
