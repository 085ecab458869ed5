"""Triton kernels for silu(gate) * up, the product in a gated MLP, and its gradients."""

# mypy: ignore-errors
# Triton's functions are compiled from their source and have no types that a checker could read.

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of one program


def silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Writes silu(gate) * up to out, computed in float32.

    Tensors are contiguous and of one shape and dtype; out may be gate.
    """
    assert gate.is_contiguous() and up.is_contiguous() and out.is_contiguous()
    _forward[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK, num_warps=8)


def silu_mul_backward(gate: Tensor, up: Tensor, dact: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Writes the gradients of gate and up, and overwrites dact, the gradient of the product, with the product.

    dgate and dup may be gate and up.
    """
    assert all(x.is_contiguous() for x in (gate, up, dact, dgate, dup))
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    _backward[grid](gate, up, dact, dgate, dup, gate.numel(), BLOCK=BLOCK, num_warps=8)


@triton.jit
def _forward(gate, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    tl.store(out + at, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _backward(gate, up, dact, dgate, dup, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(dact + at, mask=inside).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dgate + at, d * u * s * (1 + g * (1 - s)), mask=inside)
    tl.store(dup + at, d * g * s, mask=inside)
    tl.store(dact + at, g * s * u, mask=inside)
