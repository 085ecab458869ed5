"""Triton kernels for act(gate) * up, the product in a gated MLP, and its gradients.

Both activations are gate * sigmoid(z): z is the gate for SiLU, and a cubic polynomial of it for GELU by tanh.
"""

# mypy: ignore-errors
# Triton's functions are compiled from their source and have no types that a checker could read.

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a row in one program


def act_mul(gate: Tensor, up: Tensor, out: Tensor, tanh_gelu: bool) -> None:
    """Writes act(gate) * up to out, computed in float32. The activation is GELU by tanh, or else SiLU.

    Tensors are matrices of one shape and dtype with contiguous rows, which may lie apart; out may be gate.
    """
    rows, columns = _shape((gate, up, out))
    grid = (rows, triton.cdiv(columns, BLOCK))
    strides = [x.stride(0) for x in (gate, up, out)]
    _forward[grid](gate, up, out, *strides, columns, TANH_GELU=tanh_gelu, BLOCK=BLOCK, num_warps=8)


def act_mul_backward(gate: Tensor, up: Tensor, dact: Tensor, dgate: Tensor, dup: Tensor, tanh_gelu: bool) -> None:
    """Writes the gradients of gate and up, and overwrites dact, the gradient of the product, with the product.

    dgate and dup may be gate and up. Rows may lie apart, as in `act_mul`.
    """
    rows, columns = _shape((gate, up, dact, dgate, dup))
    grid = (rows, triton.cdiv(columns, BLOCK))
    strides = [x.stride(0) for x in (gate, up, dact, dgate, dup)]
    _backward[grid](gate, up, dact, dgate, dup, *strides, columns, TANH_GELU=tanh_gelu, BLOCK=BLOCK, num_warps=8)


def _shape(tensors: tuple[Tensor, ...]) -> tuple[int, int]:
    assert all(x.ndim == 2 and x.stride(1) == 1 for x in tensors)
    rows, columns = tensors[0].shape
    return rows, columns


@triton.jit
def _sigmoid_and_slope(g, TANH_GELU: tl.constexpr):
    """Returns sigmoid(z), and g times its derivative by g.

    GELU by tanh has z = 2 sqrt(2 / pi) (g + 0.044715 g^3), because (1 + tanh(x)) / 2 = sigmoid(2 x).
    """
    if TANH_GELU:
        SCALE: tl.constexpr = 1.5957691216057308  # 2 sqrt(2 / pi)
        s = tl.sigmoid(SCALE * g * (1 + 0.044715 * g * g))
        return s, g * s * (1 - s) * SCALE * (1 + 3 * 0.044715 * g * g)
    s = tl.sigmoid(g)
    return s, g * s * (1 - s)


@triton.jit
def _forward(gate, up, out, gate_row, up_row, out_row, columns, TANH_GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    g = tl.load(gate + row * gate_row + at, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=inside).to(tl.float32)
    s, _ = _sigmoid_and_slope(g, TANH_GELU)
    tl.store(out + row * out_row + at, g * s * u, mask=inside)


@triton.jit
def _backward(
    gate,
    up,
    dact,
    dgate,
    dup,
    gate_row,
    up_row,
    dact_row,
    dgate_row,
    dup_row,
    columns,
    TANH_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    g = tl.load(gate + row * gate_row + at, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=inside).to(tl.float32)
    d = tl.load(dact + row * dact_row + at, mask=inside).to(tl.float32)
    s, slope = _sigmoid_and_slope(g, TANH_GELU)
    tl.store(dgate + row * dgate_row + at, d * u * (s + slope), mask=inside)
    tl.store(dup + row * dup_row + at, d * g * s, mask=inside)
    tl.store(dact + row * dact_row + at, g * s * u, mask=inside)
