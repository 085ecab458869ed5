"""A Triton kernel for what the backward pass of attention has to know of every row of queries."""

# mypy: ignore-errors
# Triton's functions are compiled from their source and have no types that a checker could read.

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightseq.kernels.launches import Launch, alignments

ROWS = 32  # of one program


def row_terms(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """As `lightseq.kernels.rows.row_terms`; the sum in float32."""
    assert dout.stride(3) == out.stride(3) == 1 and lse.is_contiguous()
    terms = torch.empty(lse.shape, dtype=torch.complex64, device=lse.device)
    tensors = (dout, out, lse, torch.view_as_real(terms))
    steps = (*dout.stride()[:3], *out.stride()[:3])
    _launch(dout.device, dout.shape, steps, dout.dtype, alignments(tensors))(*tensors)
    return terms


@lru_cache(maxsize=64)
def _launch(
    device: torch.device, shape: torch.Size, steps: tuple[int, ...], dtype: torch.dtype, aligned: tuple[bool, ...]
) -> Launch:
    """For tensors that are alike in all of this."""
    batch, length, heads, dim = shape
    grid = (triton.cdiv(length, ROWS), heads, batch)
    constants = {"ROWS": ROWS, "COLUMNS": triton.next_power_of_2(dim)}
    return Launch(_row_terms, grid, (length, heads, dim, *steps), constants, num_warps=4)


@triton.jit
def _row_terms(
    dout, out, lse, terms, length, heads, dim, dout_b, dout_s, dout_h, out_b, out_s, out_h,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (row < length)[:, None] & (column < dim)[None, :]
    far = row.to(tl.int64)[:, None]
    d = tl.load(dout + batch * dout_b + head * dout_h + far * dout_s + column[None, :], mask=inside, other=0.0)
    o = tl.load(out + batch * out_b + head * out_h + far * out_s + column[None, :], mask=inside, other=0.0)
    d, o = d.to(tl.float32), o.to(tl.float32)
    above = tl.sum(d * (d - o), axis=1)
    at = (batch * heads + head) * length + row
    tl.store(terms + 2 * at, tl.load(lse + at, mask=row < length), mask=row < length)
    tl.store(terms + 2 * at + 1, above, mask=row < length)
