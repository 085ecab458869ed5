"""Depthwise causal convolutions of the fragments of a sequence.

Shape suffixes: B batch, S local sequence, F fragments, L tokens of a fragment, C channels, W taps.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from lightseq.kernels.fused.launches import HAS_TRITON

MAX_TAPS: Final = 8  # of the Triton kernels, which keep as many rows in registers
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def convolve(
    x_BSC: Tensor, before_BFWC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, inside_S: Tensor | None, silu: bool
) -> Tensor:
    """Returns the convolution (B, S, C) of fragments with the W - 1 tokens before each of them.

    `inside_S` counts the tokens (int32) of each token's document that lie before it; taps see no other tokens. Products
    are summed in float32 or wider. With `silu` the sums go through SiLU.
    """
    has_kernel = HAS_TRITON and x_BSC.is_cuda and x_BSC.dtype in DTYPES and weight_CW.shape[1] <= MAX_TAPS
    run = convolve_fused if has_kernel else convolve_torch
    return run(x_BSC, before_BFWC, weight_CW, bias_C, inside_S, silu)


def convolve_torch(
    x_BSC: Tensor, before_BFWC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, inside_S: Tensor | None, silu: bool
) -> Tensor:
    """Computes `convolve` with torch's operators, for any device and dtype."""
    fragments, taps = before_BFWC.shape[1], weight_CW.shape[1]
    tokens = x_BSC.shape[1] // fragments
    x_BFLC = torch.cat([before_BFWC, x_BSC.unflatten(1, (fragments, -1))], 2)
    if inside_S is None and not x_BSC.is_cuda:
        columns = x_BFLC.flatten(0, 1).transpose(1, 2).to(weight_CW.dtype)
        out = F.conv1d(columns, weight_CW.unsqueeze(1), bias_C, groups=weight_CW.shape[0])
        out = out.transpose(1, 2).reshape(x_BSC.shape).to(x_BSC.dtype)
        return F.silu(out) if silu else out
    wide = torch.promote_types(x_BSC.dtype, torch.float32)
    total = None
    for tap in range(taps):
        part = x_BFLC[:, :, tap : tap + tokens].to(wide) * weight_CW[:, tap].to(wide)
        if inside_S is not None and tap < taps - 1:
            part = part * (inside_S.unflatten(0, (fragments, -1)) >= taps - 1 - tap)[..., None]
        total = part if total is None else total + part
    assert total is not None
    if bias_C is not None:
        total = total + bias_C.to(wide)
    out = total.flatten(1, 2).to(x_BSC.dtype)
    return F.silu(out) if silu else out


# ---- operator of the kernels -----------------------------------------------------------------------------------------


@torch.library.custom_op("lightseq::convolve", mutates_args=())
def convolve_fused(
    x_BSC: Tensor, before_BFWC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, inside_S: Tensor | None, silu: bool
) -> Tensor:
    """Computes `convolve` with Triton kernels. The backward pass computes the sums before SiLU again."""
    from lightseq.kernels.fused import convolution as fused

    return fused.convolve(x_BSC.contiguous(), before_BFWC.contiguous(), weight_CW, bias_C, inside_S, silu)


@convolve_fused.register_fake
def _(
    x_BSC: Tensor, before_BFWC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, inside_S: Tensor | None, silu: bool
) -> Tensor:
    return x_BSC.new_empty(x_BSC.shape)


@torch.library.custom_op("lightseq::convolve_backward", mutates_args=())
def _convolve_backward(
    dout_BSC: Tensor,
    x_BSC: Tensor,
    before_BFWC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    inside_S: Tensor | None,
    silu: bool,
) -> list[Tensor]:
    """Returns the gradients of x, before, weight and, if it is given, bias."""
    from lightseq.kernels.fused import convolution as fused

    dx_BSC, dbefore_BFWC, dweight_CW, dbias_C = fused.convolve_backward(
        dout_BSC.contiguous(), x_BSC.contiguous(), before_BFWC.contiguous(), weight_CW, bias_C, inside_S, silu
    )
    gradients = [dx_BSC, dbefore_BFWC, torch.empty_like(weight_CW).copy_(dweight_CW)]
    return gradients if bias_C is None else [*gradients, torch.empty_like(bias_C).copy_(dbias_C)]


@_convolve_backward.register_fake
def _(
    dout_BSC: Tensor,
    x_BSC: Tensor,
    before_BFWC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    inside_S: Tensor | None,
    silu: bool,
) -> list[Tensor]:
    gradients = [x_BSC.new_empty(x_BSC.shape), before_BFWC.new_empty(before_BFWC.shape), torch.empty_like(weight_CW)]
    return gradients if bias_C is None else [*gradients, torch.empty_like(bias_C)]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dout_BSC: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _convolve_backward(dout_BSC, *ctx.saved_tensors, ctx.silu)
    return (*gradients, *([None] * (6 - len(gradients))))


convolve_fused.register_autograd(_backward, setup_context=_setup_context)
