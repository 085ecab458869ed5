"""Triton kernels for the product in a gated MLP, silu(gate) * up, and its gradients, in the place of their inputs."""

# mypy: ignore-errors
# Triton's functions are compiled from their source and have no types that a checker could read.

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of one program


def silu_mul_(gate: Tensor, up: Tensor) -> None:
    """gate becomes silu(gate) * up, computed in float32. Contiguous tensors of one shape and dtype."""
    assert gate.is_contiguous() and up.is_contiguous()
    _forward[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, gate.numel(), BLOCK=BLOCK, num_warps=8)


def silu_mul_backward_(gate: Tensor, up: Tensor, dact: Tensor) -> None:
    """gate and up become their gradients; dact, the gradient of the product, becomes the product."""
    assert gate.is_contiguous() and up.is_contiguous() and dact.is_contiguous()
    _backward[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, dact, gate.numel(), BLOCK=BLOCK, num_warps=8)


@triton.jit
def _forward(gate, up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    tl.store(gate + at, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _backward(gate, up, dact, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(dact + at, mask=inside).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(gate + at, d * u * s * (1 + g * (1 - s)), mask=inside)
    tl.store(up + at, d * g * s, mask=inside)
    tl.store(dact + at, g * s * u, mask=inside)
