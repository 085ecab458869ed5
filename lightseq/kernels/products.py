"""Matrix products accumulated in a wider dtype than that of their factors."""

import torch
from torch import Tensor


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to total, without rounding the product to the factors' dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
