"""Triton kernels that copy tokens to the rows of their experts, and sum each token's rows."""

# mypy: ignore-errors
# Triton's functions are compiled from their source and have no types that a checker could read.

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of one program: 16 bytes of bfloat16 for each of its threads


def copy_to_rows(x_TH: Tensor, order_R: Tensor, end: Tensor, out_RH: Tensor) -> None:
    """Writes the token of each row before `end`, which has one element. Tensors are contiguous."""
    rows, hidden = out_RH.shape
    copies = rows // len(x_TH)
    _copy_to_rows[(rows, triton.cdiv(hidden, BLOCK))](
        x_TH, order_R, end, out_RH, hidden, copies, BLOCK=BLOCK, num_warps=4
    )


def sum_rows(x_RH: Tensor, places_R: Tensor, end: Tensor, out_TH: Tensor) -> None:
    """Writes the sum of each token's rows before `end`, in float32 and in the order of the token's choices."""
    tokens, hidden = out_TH.shape
    copies = len(places_R) // tokens
    grid = (tokens, triton.cdiv(hidden, BLOCK))
    _sum_rows[grid](x_RH, places_R, end, out_TH, hidden, COPIES=copies, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _copy_to_rows(x, order, end, out, hidden, copies, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(end):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < hidden
        token = tl.load(order + row) // copies
        tl.store(out + row * hidden + at, tl.load(x + token * hidden + at, mask=inside), mask=inside)


@triton.jit
def _sum_rows(x, places, end, out, hidden, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    stop = tl.load(end)
    total = tl.zeros([BLOCK], tl.float32)
    for copy in tl.static_range(COPIES):
        row = tl.load(places + token * COPIES + copy)
        total += tl.load(x + row * hidden + at, mask=inside & (row < stop), other=0.0).to(tl.float32)
    tl.store(out + token * hidden + at, total, mask=inside)
