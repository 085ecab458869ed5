"""Triton kernels of `score_blocks.py`: a program reads a row of scores once and writes its weights."""

# mypy: ignore-errors
# Triton's functions are compiled from their source and have no types that a checker could read.

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from lightseq.kernels.fused.score_blocks import BlockMask, SoftmaxState

ALL_KEYS = 2**30  # window of rows that see all keys before their own


def softmax_block(
    scores: Tensor, scale: float, mask: "BlockMask | None", state: "SoftmaxState", weights: Tensor
) -> None:
    """Writes the weights of a block of scores (K, R, T), and updates the state in place."""
    assert scores.is_contiguous() and weights.is_contiguous()
    rows, columns = scores.shape[0] * scores.shape[1], scores.shape[2]
    _softmax[(rows,)](
        scores, weights, state.maxima, state.sums, state.rescale, scale, columns, *_mask_arguments(mask, scores),
        MASKED=mask is not None, BLOCK=triton.next_power_of_2(columns), num_warps=4,
    )  # fmt: skip


def gradient_block(
    scores: Tensor, slopes: Tensor, lse: Tensor, delta: Tensor, scale: float, mask: "BlockMask | None",
    weights: Tensor, dscores: Tensor,
) -> None:  # fmt: skip
    """Writes the weights of a block and the gradient of its scores; all tensors are contiguous."""
    lse, delta = lse.contiguous(), delta.contiguous()
    assert all(x.is_contiguous() for x in (scores, slopes, weights, dscores))
    rows, columns = scores.shape[0] * scores.shape[1], scores.shape[2]
    _gradient[(rows,)](
        scores, slopes, lse, delta, weights, dscores, scale, columns, *_mask_arguments(mask, scores),
        MASKED=mask is not None, BLOCK=triton.next_power_of_2(columns), num_warps=4,
    )  # fmt: skip


def _mask_arguments(mask: "BlockMask | None", scores: Tensor) -> tuple[int, int, int, int]:
    rows = scores.shape[1]
    if mask is None:
        return rows, rows, 0, ALL_KEYS
    return rows, mask.queries, mask.last, ALL_KEYS if mask.window is None else mask.window


@triton.jit
def _softmax(
    scores, weights, maxima, sums, rescale, scale, columns, rows, queries, last, window,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    seen = inside
    if MASKED:
        own = (tl.program_id(0) % rows) % queries + last
        seen = inside & (column <= own) & (column > own - window)
    s = tl.load(scores + row * columns + column, mask=inside, other=0.0) * scale
    s = tl.where(seen, s, float("-inf"))
    before = tl.load(maxima + row)
    now = tl.maximum(before, tl.max(s, 0))
    reached = tl.where(now == float("-inf"), 0.0, now)
    p = tl.exp(s - reached)
    shrinks = tl.exp(before - reached)
    tl.store(maxima + row, now)
    tl.store(rescale + row, shrinks)
    tl.store(sums + row, tl.load(sums + row) * shrinks + tl.sum(p, 0))
    tl.store(weights + row * columns + column, p, mask=inside)


@triton.jit
def _gradient(
    scores, slopes, lse, delta, weights, dscores, scale, columns, rows, queries, last, window,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    seen = inside
    if MASKED:
        own = (tl.program_id(0) % rows) % queries + last
        seen = inside & (column <= own) & (column > own - window)
    at = row * columns + column
    s = tl.load(scores + at, mask=inside, other=0.0) * scale
    p = tl.where(seen, tl.exp(s - tl.load(lse + row)), 0.0)
    d = tl.load(slopes + at, mask=inside, other=0.0)
    tl.store(weights + at, p, mask=inside)
    tl.store(dscores + at, p * (d - tl.load(delta + row)) * scale, mask=inside)
