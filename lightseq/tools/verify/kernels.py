"""Comparison of an attention kernel with plain attention in float64.

Shape suffixes: B batch, S query tokens, T key tokens, H query heads, K key/value heads, D head dim.
"""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from lightseq.kernels.attention.base import Kernel, KernelSpec, Saved
from lightseq.kernels.attention.tile import backward_tile, forward_tile
from lightseq.schedule.table import Mask
from lightseq.tools.verify.report import Row, all_gather_object, relative_error, result_row
from lightseq.utils.formatting import first_line

EXACT: Final = 1e-5  # allowed relative L2 error in float32; in half precision, twice the error of plain attention
BATCH, REST = 2, 56  # sequences; keys of earlier tiles


class Case(NamedTuple):
    mask: Mask
    queries: int
    keys: int

    def __str__(self) -> str:
        return f"{self.mask.value} {self.queries}x{self.keys}"


CASES: Final = (
    Case(Mask.FULL, 136, 136), Case(Mask.FULL, 72, 200), Case(Mask.CAUSAL, 200, 200), Case(Mask.CAUSAL, 72, 200),
    Case(Mask.CAUSAL, 64, 192), Case(Mask.STRICT, 136, 136),
)  # fmt: skip
NAMES: Final = ("out", "lse", "dq", "dk", "dv")


class Error(NamedTuple):
    """Relative L2 error of one result."""

    what: str
    found: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.what} off by {self.found:.1e}, {self.allowed:.1e} allowed"


def kernel_row(kernel: Kernel, spec: KernelSpec, shared: int, device: torch.device) -> Row:
    """Returns the row of a kernel: its largest error on any rank. `shared`: query heads per key/value head."""
    mine = max((error for case in CASES for error in _errors(kernel, case, spec, shared, device)), key=_share)
    everyone = all_gather_object(mine)
    wrong = [f"{error} (rank {rank})" for rank, error in enumerate(everyone) if not error.found <= error.allowed]
    worst = max(everyone, key=_share)
    return result_row(
        f"kernel {kernel.name}", wrong, f"worst: {worst}", {"errors_and_allowed": {worst.what: worst[1:]}}
    )


def _share(error: Error) -> float:
    """Returns an error over what is allowed."""
    return error.found / error.allowed if math.isfinite(error.found) else math.inf


def _errors(kernel: Kernel, case: Case, spec: KernelSpec, shared: int, device: torch.device) -> list[Error]:
    """Returns the error of each result, for random inputs with two key/value heads.

    The forward pass computes the tile alone; the backward pass takes out and lse over all keys.
    """
    g, scale = torch.Generator().manual_seed(case.queries + case.keys), spec.head_dim**-0.5

    def random(tokens: int, heads: int, dim: int) -> Tensor:
        shape = (BATCH, tokens, heads, dim)
        return torch.randn(shape, generator=g, dtype=torch.float64).to(device, spec.dtype)

    dim, value_dim = spec.head_dim, spec.value_dim or spec.head_dim
    q, dout = (random(case.queries, 2 * shared, size) for size in (dim, value_dim))
    k, v, rest_k, rest_v = (random(tokens, 2, size) for tokens in (case.keys, REST) for size in (dim, value_dim))
    inputs = (q, k, v, rest_k, rest_v, dout)
    results, (out, lse) = _by_definition(case.mask, scale, *(x.double() for x in inputs))
    plain, _ = _by_definition(case.mask, scale, *inputs)
    try:
        tile = forward_tile(kernel, q, k, v, case.mask, scale)
        saved = Saved(q, k, v, out.to(spec.dtype), lse.float())
        grads = backward_tile(kernel, dout, saved, case.mask, scale)
    except Exception as error:  # kernels of other packages may raise anything
        return [Error(f"{case}: {type(error).__name__}: {first_line(error)}", math.inf, EXACT)]
    found = zip(NAMES, (*tile, *grads), results, plain, strict=True)
    return [Error(f"{case} {name}", _error(a, b), max(EXACT, 2 * _error(c, b))) for name, a, b, c in found]


def _by_definition(
    mask: Mask, scale: float, q: Tensor, k: Tensor, v: Tensor, rest_k: Tensor, rest_v: Tensor, dout: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Computes attention with plain operations and autograd, independent of all kernel code.

    Returns out, lse, dq, dk and dv of the tile, and out and lse over all keys.
    """
    groups = q.shape[2] // k.shape[2]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        keys, values, rest_k, rest_v = (x.repeat_interleave(groups, 2) for x in (*leaves[1:], rest_k, rest_v))
        tile = torch.einsum("bshd,bthd->bhst", leaves[0], keys) * scale
        offset = {Mask.FULL: k.shape[1], Mask.CAUSAL: 0, Mask.STRICT: -1}[mask] + k.shape[1] - q.shape[1]
        seen = torch.ones(tile.shape[-2:], dtype=torch.bool, device=q.device).tril(offset)
        tile = tile.masked_fill(~seen, -torch.inf)
        others = torch.einsum("bshd,bthd->bhst", q, rest_k) * scale  # their gradients belong to other tiles
        scores = torch.cat([others, tile], -1)
        whole = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), torch.cat([rest_v, values], 1))
        dq, dk, dv = torch.autograd.grad(whole, leaves, dout)
    out = torch.einsum("bhst,bthd->bshd", tile.softmax(-1).nan_to_num(0.0), values)
    return (out.detach(), tile.logsumexp(-1).detach(), dq, dk, dv), (whole.detach(), scores.logsumexp(-1).detach())


def _error(got: Tensor, want: Tensor) -> float:
    """Returns the relative L2 error, or infinity if infinite values (the lse of rows without keys) do not match."""
    if not torch.equal(got.isinf(), want.isinf()):
        return float("inf")
    return relative_error(
        got.nan_to_num(posinf=0.0, neginf=0.0, nan=float("nan")), want.nan_to_num(posinf=0.0, neginf=0.0)
    )
