"""Matrix products in a wider dtype than their factors', also of batches."""

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


def batched_product(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """Returns a @ b of every batch in float32 or wider."""
    dtype = torch.promote_types(a_BMK.dtype, torch.float32)
    if a_BMK.dtype == dtype:
        return torch.bmm(a_BMK, b_BKN)
    if a_BMK.is_cuda:
        return torch.bmm(a_BMK, b_BKN, out_dtype=dtype)
    return torch.bmm(a_BMK.to(dtype), b_BKN.to(dtype))


def add_batched_product(total_BMN: Tensor, a_BMK: Tensor, b_BKN: Tensor) -> None:
    """Adds a @ b of every batch to total, without rounding the products to the factors' dtype."""
    if a_BMK.dtype == total_BMN.dtype:
        total_BMN.baddbmm_(a_BMK, b_BKN)
    elif a_BMK.is_cuda:
        torch.baddbmm(total_BMN, a_BMK, b_BKN, out_dtype=total_BMN.dtype, out=total_BMN)
    else:
        total_BMN.baddbmm_(a_BMK.to(total_BMN.dtype), b_BKN.to(total_BMN.dtype))
