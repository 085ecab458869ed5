"""Cross entropy of a language model head over chunks of tokens, so that the logits never exist whole."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightseq.kernels.launches import fused_kernels
from lightseq.kernels.logit_transform import UNCHANGED, LogitTransform
from lightseq.kernels.products import add_product

IGNORE_INDEX = -100  # label of a token without a target, as in torch
CHUNK_TOKENS = 2048  # 128256 logits of 2048 tokens are half a GiB in bfloat16


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None,
    transform: LogitTransform = UNCHANGED, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the sum of -log p(label) over the valid labels, a float32 scalar (float64 for float64 inputs).

    hidden (..., D), weight (V, D) and bias (V,) of the head, labels (...) already shifted, IGNORE_INDEX without a
    target; `transform` makes logits of the head's result. The sum over no valid label is 0, with zero gradients. The
    caller divides the sum.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # the products with preallocated outputs do not cast
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return cross_entropy_sum(
                hidden.to(dtype), weight.to(dtype), labels, chunk_tokens, transform, _cast(bias, dtype)
            )
    trained = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    with_gradient = torch.is_grad_enabled() and trained
    rows = hidden.reshape(-1, hidden.shape[-1])
    size = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    return _ChunkedCrossEntropy.apply(rows, weight, labels.reshape(-1), size, with_gradient, transform, bias)


def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None, temperature: float = 1.0,
    transform: LogitTransform = UNCHANGED, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns log p(label) of every token, 0 without a target, with gradients, for logits divided by `temperature`.

    Shaped as the labels, float32 (float64 for float64 inputs); arguments are those of `cross_entropy_sum`. Use that
    for a plain sum: here the backward pass computes the logits of each chunk again.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # the backward pass runs without autocast, and must see the same logits
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return token_log_probs(
                hidden.to(dtype), weight.to(dtype), labels, chunk_tokens, temperature, transform, _cast(bias, dtype)
            )
    rows = hidden.reshape(-1, hidden.shape[-1])
    size = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    return _TokenLogProbs.apply(rows, weight, labels.contiguous(), size, transform.over(temperature), bias)


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def chunks(tokens: int, size: int) -> Iterator[slice]:
    """Yields the rows of each chunk; the last may reach past the end."""
    return (slice(start, start + size) for start in range(0, tokens, size))


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, transform: LogitTransform = UNCHANGED, bias: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:  # fmt: skip
    """Returns -log p(label) of every token, 0 without a target, without gradients: the terms of `cross_entropy_sum`.

    Shaped as the labels, float32 (float64 for float64 inputs).
    """
    return losses_and_hits(hidden, weight, labels, transform, bias, chunk_tokens)[0]


@torch.no_grad()
def losses_and_hits(
    hidden: Tensor, weight: Tensor, labels: Tensor, transform: LogitTransform = UNCHANGED, bias: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:  # fmt: skip
    """Returns `token_losses`, and 1 for every token whose label is the most probable one, stacked in this order."""
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    both = []
    for chunk in chunks(len(rows), chunk_tokens):
        logits = F.linear(rows[chunk], weight, bias)
        hits = logits.argmax(-1) == targets[chunk]  # never for IGNORE_INDEX, which is negative
        losses = _cross_entropy_(logits, targets[chunk], with_gradient=False, transform=transform)
        both.append(torch.stack([losses, hits.to(losses.dtype)]))
    return torch.cat(both, dim=1).view(2, *labels.shape)


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor, weight: Tensor, labels: Tensor, _transform: LogitTransform = UNCHANGED, bias: Tensor | None = None
) -> Tensor:
    """Returns the most probable next token of every row with a label, 0 for others; meant for few labels.

    Transforms rise with the product, and so change nothing.
    """
    found = torch.zeros_like(labels)
    marked = labels != IGNORE_INDEX
    found[marked] = F.linear(hidden[marked], weight, bias).argmax(-1)
    return found


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy that computes the gradients in the forward pass, while a chunk's logits exist.

    The backward pass scales them. A chunk takes three matrix products; recomputing the logits would take four.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def, override]
        ctx,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk_tokens: int,
        with_gradient: bool,
        transform: LogitTransform,
        bias_V: Tensor | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        total = hidden_ND.new_zeros((), dtype=wide)
        dhidden = torch.empty_like(hidden_ND) if with_gradient and ctx.needs_input_grad[0] else None
        # The sum over chunks stays in float32.
        dweight = torch.zeros_like(weight_VD, dtype=wide) if with_gradient and ctx.needs_input_grad[1] else None
        dbias = None
        if with_gradient and bias_V is not None and ctx.needs_input_grad[6]:
            dbias = torch.zeros_like(bias_V, dtype=wide)
        for chunk in chunks(len(hidden_ND), chunk_tokens):
            logits = F.linear(hidden_ND[chunk], weight_VD, bias_V)
            total += _cross_entropy_(logits, labels_N[chunk], with_gradient, transform).sum()
            if dhidden is not None:
                torch.mm(logits, weight_VD, out=dhidden[chunk])
            if dweight is not None:
                add_product(dweight, logits.T, hidden_ND[chunk])
            if dbias is not None:
                dbias += logits.sum(0, dtype=wide)
        ctx.save_for_backward(dhidden, dweight, dbias)
        ctx.weight_dtype, ctx.bias_dtype = weight_VD.dtype, None if bias_V is None else bias_V.dtype
        return total

    @staticmethod
    def backward(ctx, dloss: Tensor):  # type: ignore[no-untyped-def, override]
        dhidden, dweight, dbias = ctx.saved_tensors
        if dhidden is not None:
            dhidden = _scaled(dhidden, dloss, dhidden.dtype)
        if dweight is not None:
            dweight = _scaled(dweight, dloss, ctx.weight_dtype)
        if dbias is not None:
            dbias = _scaled(dbias, dloss, ctx.bias_dtype)
        return dhidden, dweight, None, None, None, None, dbias


class _TokenLogProbs(torch.autograd.Function):
    """Log-probabilities whose gradient depends on the upstream gradient of every token.

    That is known in the backward pass only, so a chunk takes four matrix products.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def, override]
        ctx,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        transform: LogitTransform,
        bias_V: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, labels, bias_V)
        ctx.chunk_tokens, ctx.transform = chunk_tokens, transform
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        log_probs = hidden_ND.new_zeros(labels.shape, dtype=wide)  # not a view, which FSDP2 warns of
        labels_N, log_probs_N = labels.view(-1), log_probs.view(-1)
        for chunk in chunks(len(hidden_ND), chunk_tokens):
            logits = F.linear(hidden_ND[chunk], weight_VD, bias_V)
            log_probs_N[chunk] -= _cross_entropy_(logits, labels_N[chunk], with_gradient=False, transform=transform)
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def, override]
        hidden_ND, weight_VD, labels, bias_V = ctx.saved_tensors
        labels_N = labels.view(-1)
        factors_N = upstream.neg().reshape(-1).contiguous()  # for gradients of losses, which are -log p
        dhidden = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight_VD, dtype=factors_N.dtype) if ctx.needs_input_grad[1] else None
        dbias = torch.zeros_like(bias_V, dtype=factors_N.dtype) if ctx.needs_input_grad[5] else None
        for chunk in chunks(len(hidden_ND), ctx.chunk_tokens):
            logits = F.linear(hidden_ND[chunk], weight_VD, bias_V)
            _cross_entropy_(logits, labels_N[chunk], True, ctx.transform, factors_N[chunk])
            if dhidden is not None:
                torch.mm(logits, weight_VD, out=dhidden[chunk])
            if dweight is not None:
                add_product(dweight, logits.T, hidden_ND[chunk])
            if dbias is not None:
                dbias += logits.sum(0, dtype=dbias.dtype)
        if dweight is not None:
            dweight = dweight.to(weight_VD.dtype)
        if dbias is not None:
            dbias = dbias.to(bias_V.dtype)
        return dhidden, dweight, None, None, None, dbias


def _cross_entropy_(
    logits_NV: Tensor, labels_N: Tensor, with_gradient: bool, transform: LogitTransform = UNCHANGED,
    factors_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns -log p(label) of every row for transformed logits, 0 without a label.

    Optionally overwrites the logits with the gradient of their row's loss, times the row's factor if there are factors.
    """
    if fused := fused_kernels(logits_NV, "fused_cross_entropy"):
        return fused.cross_entropy_(logits_NV, labels_N, IGNORE_INDEX, with_gradient, transform, factors_N)
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    wide = transform.logits(wide)  # not in place: `wide` may be the logits themselves
    valid, target = labels_N != IGNORE_INDEX, labels_N.clamp_min(0).unsqueeze(-1)
    lse = wide.logsumexp(-1, keepdim=True)
    losses = torch.where(valid, (lse - wide.gather(-1, target)).squeeze(-1), 0.0)
    if with_gradient:
        gradient = torch.exp(wide - lse).scatter_add_(-1, target, torch.full_like(lse, -1.0))
        gradient *= transform.slope(wide)
        if factors_N is not None:
            gradient *= factors_N.unsqueeze(-1)
        logits_NV.copy_(torch.where(valid.unsqueeze(-1), gradient, 0.0))
    return losses


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x * factor, rounded once. On a GPU a 0-dimensional factor would first be rounded to x's dtype."""
    if fused := fused_kernels(x, "fused_cross_entropy"):
        return fused.scaled(x, factor, dtype)
    return torch.mul(x, factor.reshape([1] * x.ndim), out=torch.empty_like(x, dtype=dtype))
