"""Matrix products in a wider dtype than their factors'."""

import torch
from torch import Tensor


def write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Writes a @ b to out, without rounding the product to the factors' dtype."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to total, without rounding the product to the factors' dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
