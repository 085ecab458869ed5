"""Cross entropy of a language model head over fixed-size chunks of tokens: the logits never exist whole."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightseq.data import IGNORE_INDEX

CHUNK_TOKENS = 2048  # 128256 logits of 2048 tokens are 1 GiB in float32


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Sum of -log p(label) over the valid labels, a float32 scalar (float64 for float64 inputs).

    hidden (..., D), weight (V, D) of the head, labels (...) already shifted, IGNORE_INDEX where there is no target. The
    sum over no valid label is 0, with zero gradients. Whatever divides it, and any upstream gradient, comes after.
    """
    return _ChunkedCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), chunk_tokens)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Forward keeps one number a token; backward makes the logits again, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_tokens: int) -> Tensor:  # type: ignore[no-untyped-def, override]
        total = hidden_ND.new_zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        lse_N = hidden_ND.new_empty(len(hidden_ND), dtype=total.dtype)
        for h, labels, lse in _chunks(chunk_tokens, hidden_ND, labels_N, lse_N):
            logits = F.linear(h, weight_VD).to(total.dtype)
            lse.copy_(logits.logsumexp(-1))
            target = logits.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
            total += torch.where(labels == IGNORE_INDEX, 0.0, lse - target).sum()
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, lse_N)
        ctx.chunk_tokens = chunk_tokens
        return total

    @staticmethod
    def backward(ctx, dloss: Tensor):  # type: ignore[no-untyped-def, override]
        hidden_ND, weight_VD, labels_N, lse_N = ctx.saved_tensors
        dhidden = torch.empty_like(hidden_ND)
        dweight = torch.zeros_like(weight_VD, dtype=dloss.dtype)  # sums over chunks stay in float32
        for h, labels, lse, dh in _chunks(ctx.chunk_tokens, hidden_ND, labels_N, lse_N, dhidden):
            dlogits = torch.exp(F.linear(h, weight_VD).to(dloss.dtype) - lse.unsqueeze(-1))
            dlogits[torch.arange(len(h), device=h.device), labels.clamp_min(0)] -= 1.0
            dlogits *= torch.where(labels == IGNORE_INDEX, 0.0, dloss).unsqueeze(-1)
            narrow = dlogits.to(h.dtype)
            torch.mm(narrow, weight_VD, out=dh)
            dweight += narrow.T @ h
        return dhidden, dweight.to(weight_VD.dtype), None, None


def _chunks(size: int, *tensors: Tensor) -> zip:
    return zip(*(x.split(size) for x in tensors), strict=True)
