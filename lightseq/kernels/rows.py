"""What a backward pass has to know of every row of queries, where out does not come along.

Shape suffixes: B batch, S queries, H heads, D head dim.
"""

import torch
from torch import Tensor

from lightseq.kernels.launches import fused_kernels


def row_terms(dout_BSHD: Tensor, out_BSHD: Tensor, lse_BHS: Tensor) -> Tensor:
    """(B, H, S), complex: the log-sum-exp, and how much sum(dout * dout) over D is above sum(dout * out).

    Backward passes of attention want out for the second sum alone (FlashAttention-2, arXiv 2307.08691, algorithm 2). A
    kernel that is given dout in its place, and what that is too much, comes to the same; of what travels with a query,
    a third is spared.
    """
    if fused := fused_kernels(dout_BSHD, "fused_rows"):
        return fused.row_terms(dout_BSHD, out_BSHD, lse_BHS)
    above = torch.empty_like(lse_BHS)
    for head in range(lse_BHS.shape[1]):  # one by one: what is wide never exists whole
        dout, out = (x[:, :, head].to(lse_BHS.dtype) for x in (dout_BSHD, out_BSHD))
        above[:, head] = (dout * (dout - out)).sum(-1)
    return torch.complex(lse_BHS, above)
