"""Copies of tokens in the rows of their experts, and sums of each token's rows.

Rows from `ends_E[-1]` on belong to experts of other ranks. They are neither written nor read.
Shape suffixes: T tokens, R rows (copies of tokens, sorted by expert), E experts, H hidden.
"""

import torch
from torch import Tensor

from lightseq.kernels.fused.launches import fused_kernels


@torch.library.custom_op("lightseq::copy_to_rows", mutates_args=())
def copy_to_rows(x_TH: Tensor, order_R: Tensor, ends_E: Tensor) -> Tensor:
    """Returns the token of each row (R, H). `order_R` has each row's copy, counted by token and then by choice."""
    fused = fused_kernels(x_TH, "token_rows")
    if fused is None:
        return x_TH[order_R // (len(order_R) // len(x_TH))]
    out_RH = x_TH.new_empty(len(order_R), x_TH.shape[1])
    fused.copy_to_rows(x_TH.contiguous(), order_R, ends_E[-1:], out_RH)
    return out_RH


@copy_to_rows.register_fake
def _(x_TH: Tensor, order_R: Tensor, ends_E: Tensor) -> Tensor:
    return x_TH.new_empty(len(order_R), x_TH.shape[1])


@torch.library.custom_op("lightseq::sum_rows", mutates_args=())
def sum_rows(x_RH: Tensor, places_R: Tensor, ends_E: Tensor, tokens: int) -> Tensor:
    """Returns the sum of each token's rows (T, H), in float32. `places_R` has the row of each copy."""
    fused = fused_kernels(x_RH, "token_rows")
    if fused is None:
        copies = torch.where((places_R < ends_E[-1])[:, None], x_RH[places_R], 0)
        wide = torch.promote_types(x_RH.dtype, torch.float32)
        return copies.view(tokens, -1, x_RH.shape[1]).sum(1, dtype=wide).to(x_RH.dtype)
    out_TH = x_RH.new_empty(tokens, x_RH.shape[1])
    fused.sum_rows(x_RH.contiguous(), places_R, ends_E[-1:], out_TH)
    return out_TH


@sum_rows.register_fake
def _(x_RH: Tensor, places_R: Tensor, ends_E: Tensor, tokens: int) -> Tensor:
    return x_RH.new_empty(tokens, x_RH.shape[1])
