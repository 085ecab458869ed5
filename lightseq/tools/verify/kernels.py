"""Comparison of every attention kernel that can run with plain attention in float64.

Shape suffixes: B batch, S query tokens, T key tokens, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from lightseq.kernels.attention.base import Kernel, KernelSpec, Saved
from lightseq.kernels.attention.registry import KERNELS
from lightseq.kernels.attention.tile import backward_tile, forward_tile
from lightseq.schedule.table import Mask
from lightseq.tools.verify.report import SKIP, Row, all_gather_object, relative_error, result_row
from lightseq.utils.formatting import first_line

EXACT: Final = 1e-5  # allowed relative L2 error in float32; in half precision, twice that of plain attention
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


def kernel_rows(spec: KernelSpec, heads: int, kv_heads: int, device: torch.device) -> list[Row]:
    """Returns a row for every kernel that can run on some rank, and one for every reason why others cannot."""
    shared = heads // kv_heads
    wants = {case: _reference(case, spec, shared, device) for case in CASES}
    rows, reasons = [], dict[str, list[str]]()
    for name, registered in KERNELS.items():
        kernel = registered.make(spec)
        reason = kernel.why_unavailable(spec)
        if reason is not None:
            reasons.setdefault(reason, []).append(name)
        everyone = all_gather_object({} if reason is not None else _errors(kernel, wants))
        if any(everyone):
            rows.append(_row(name, everyone))
    return rows + [Row("kernels", SKIP, f"{', '.join(names)}: {reason}") for reason, names in reasons.items()]


def _row(name: str, everyone: Sequence[Mapping[str, tuple[float, float]]]) -> Row:
    """Returns the row of a kernel: the largest error over all ranks, relative to the allowed error."""
    worst, where = -1.0, ""
    wrong: dict[str, tuple[float, float, list[int]]] = {}
    for rank, errors in enumerate(everyone):
        for what, (error, allowed) in errors.items():
            if not error <= allowed:  # also fails NaN
                before, _, ranks = wrong.get(what, (0.0, 0.0, []))
                wrong[what] = (max(before, error), allowed, [*ranks, rank])
            elif error / allowed > worst:
                worst, where = error / allowed, f"{what} off by {error:.1e}, {allowed:.1e} allowed"
    lines = [
        f"{what} off by {error:.1e}, {allowed:.1e} allowed (rank {', '.join(map(str, ranks))})"
        for what, (error, allowed, ranks) in sorted(wrong.items(), key=lambda item: -item[1][0])
    ]
    missing = [f"cannot run on rank {rank}" for rank, errors in enumerate(everyone) if not errors]
    figures = {"errors_and_allowed": everyone[0]}
    return result_row(f"kernel {name}", lines + missing, f"worst: {where}", figures)


class _Reference(NamedTuple):
    """Inputs in the kernel's dtype, results in float64, and allowed errors."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, dout
    whole: tuple[Tensor, Tensor]  # out and lse over all keys, for the backward pass
    results: tuple[Tensor, ...]  # as in NAMES; forward of the tile only, backward over all keys
    allowed: tuple[float, ...]
    scale: float


def _reference(case: Case, spec: KernelSpec, shared: int, device: torch.device) -> _Reference:
    """Draws inputs with two key/value heads and the model's number of query heads for each."""
    g = torch.Generator().manual_seed(case.queries + case.keys)
    dim, scale = spec.head_dim, spec.head_dim**-0.5

    def random(tokens: int, heads: int) -> Tensor:
        shape = (BATCH, tokens, heads, dim)
        return torch.randn(shape, generator=g, dtype=torch.float64).to(device, spec.dtype)

    q, dout = random(case.queries, 2 * shared), random(case.queries, 2 * shared)
    k, v, rest_k, rest_v = (random(tokens, 2) for tokens in (case.keys, case.keys, REST, REST))
    wide = [x.double() for x in (q, k, v, rest_k, rest_v, dout)]
    results, whole = _by_definition(case.mask, scale, *wide)
    plain, _ = _by_definition(case.mask, scale, q, k, v, rest_k, rest_v, dout)
    allowed = tuple(max(EXACT, 2 * _error(a, b)) for a, b in zip(plain, results, strict=True))
    out, lse = whole
    return _Reference((q, k, v, dout), (out.to(spec.dtype), lse.float()), results, allowed, scale)


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


def _errors(kernel: Kernel, wants: Mapping[Case, _Reference]) -> dict[str, tuple[float, float]]:
    """Returns error and allowed error by case and result. A kernel that raises has an infinite error."""
    errors: dict[str, tuple[float, float]] = {}
    for case, want in wants.items():
        q, k, v, dout = want.inputs
        try:
            made = forward_tile(kernel, q, k, v, case.mask, want.scale)
            grads = backward_tile(kernel, dout, Saved(q, k, v, *want.whole), case.mask, want.scale)
            found = [_error(a, b) for a, b in zip((*made, *grads), want.results, strict=True)]
        except Exception as error:  # kernels of other packages may raise anything
            errors[f"{case}: {type(error).__name__}: {first_line(error)}"] = (float("inf"), 0.0)
            continue
        errors |= {f"{case} {n}": (e, a) for n, e, a in zip(NAMES, found, want.allowed, strict=True)}
    return errors


def _error(got: Tensor, want: Tensor) -> float:
    """Returns the relative L2 error, or infinity if infinite values (the lse of rows without keys) do not match."""
    if not torch.equal(got.isinf(), want.isinf()):
        return float("inf")
    return relative_error(
        got.nan_to_num(posinf=0.0, neginf=0.0, nan=float("nan")), want.nan_to_num(posinf=0.0, neginf=0.0)
    )
