"""Depthwise causal convolutions of the fragments of a sequence.

Shape suffixes: B batch, S local sequence, F fragments, L tokens of a fragment, C channels, W taps.
"""

from types import ModuleType
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from lightseq.kernels.fused.launches import fused_kernels

MAX_TAPS: Final = 8  # the Triton kernels keep as many rows in registers


def convolve(
    x_BSC: Tensor, before_BFWC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, inside_S: Tensor | None, silu: bool
) -> Tensor:
    """Returns the convolution (B, S, C) of fragments with the W - 1 tokens before each of them.

    `inside_S` counts the tokens (int32) of each token's document that lie before it; taps see no other tokens. Products
    are summed in float32 or wider. With `silu` the sums go through SiLU.
    """
    fused = _kernels(x_BSC, weight_CW)
    if fused is None:
        return convolve_torch(x_BSC, before_BFWC, weight_CW, bias_C, inside_S, silu)
    out: Tensor = fused.convolve(x_BSC.contiguous(), before_BFWC.contiguous(), weight_CW, bias_C, inside_S, silu)
    return out


def convolve_backward(
    dout_BSC: Tensor,
    x_BSC: Tensor,
    before_BFWC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    inside_S: Tensor | None,
    silu: bool,
) -> list[Tensor]:
    """Returns the gradients of x, before, weight and, if it is given, bias. Computes the sums before SiLU again."""
    fused = _kernels(x_BSC, weight_CW)
    if fused is None:
        return gradients_torch(dout_BSC, x_BSC, before_BFWC, weight_CW, bias_C, inside_S, silu)
    tensors = (x.contiguous() for x in (dout_BSC, x_BSC, before_BFWC))
    made = fused.convolve_backward(*tensors, weight_CW, bias_C, inside_S, silu)
    given = (x_BSC, before_BFWC, weight_CW, *(() if bias_C is None else (bias_C,)))
    return [gradient.to(x.dtype).contiguous() for gradient, x in zip(made, given, strict=False)]


def _kernels(x_BSC: Tensor, weight_CW: Tensor) -> ModuleType | None:
    """Returns the module of Triton kernels, or None if they cannot run.

    In float32 their fast exponential and long sums have more than twice the error of torch's operators.
    """
    fits = x_BSC.dtype is not torch.float32 and weight_CW.shape[1] <= MAX_TAPS
    return fused_kernels(x_BSC, "convolution_kernels") if fits else None


def convolve_torch(
    x_BSC: Tensor, before_BFWC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, inside_S: Tensor | None, silu: bool
) -> Tensor:
    """Computes `convolve` with torch's operators, for any device and dtype."""
    fragments, taps = before_BFWC.shape[1], weight_CW.shape[1]
    tokens = x_BSC.shape[1] // fragments
    x_BFLC = torch.cat([before_BFWC, x_BSC.unflatten(1, (fragments, -1))], 2)
    wide = torch.promote_types(x_BSC.dtype, torch.float32)
    if inside_S is None and not x_BSC.is_cuda:
        columns, weight_C1W = x_BFLC.flatten(0, 1).transpose(1, 2).to(wide), weight_CW.unsqueeze(1).to(wide)
        bias = None if bias_C is None else bias_C.to(wide)
        out = F.conv1d(columns, weight_C1W, bias, groups=len(weight_CW))
        out = out.transpose(1, 2).reshape(x_BSC.shape).to(x_BSC.dtype).contiguous()
        return F.silu(out) if silu else out
    total = None
    for tap in range(taps):
        part = x_BFLC[:, :, tap : tap + tokens].to(wide) * weight_CW[:, tap].to(wide)
        if inside_S is not None and tap < taps - 1:
            inside_FL = inside_S.unflatten(0, (fragments, -1))
            part = part.masked_fill((inside_FL < taps - 1 - tap)[..., None], 0)
        total = part if total is None else total + part
    assert total is not None
    if bias_C is not None:
        total = total + bias_C.to(wide)
    out = total.flatten(1, 2).to(x_BSC.dtype)
    return F.silu(out) if silu else out


def gradients_torch(
    dout_BSC: Tensor,
    x_BSC: Tensor,
    before_BFWC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    inside_S: Tensor | None,
    silu: bool,
) -> list[Tensor]:
    """Computes `convolve_backward` with torch's operators, for any device and dtype."""

    def forward(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return convolve_torch(x, before, weight, bias, inside_S, silu)

    given = (x_BSC, before_BFWC, weight_CW, *(() if bias_C is None else (bias_C,)))
    return [gradient.contiguous() for gradient in torch.func.vjp(forward, *given)[1](dout_BSC)]
