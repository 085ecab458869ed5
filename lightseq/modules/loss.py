"""Cross entropy of a language model head over chunks of tokens, so that the logits never exist whole."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightseq.kernels.launches import fused_kernels
from lightseq.kernels.products import add_product

IGNORE_INDEX = -100  # label of a token without a target, as in torch
CHUNK_TOKENS = 2048  # 128256 logits of 2048 tokens are half a GiB in bfloat16


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None, scale: float = 1.0
) -> Tensor:
    """Returns the sum of -log p(label) over the valid labels, a float32 scalar (float64 for float64 inputs).

    hidden (..., D), weight (V, D) of the head, labels (...) already shifted, IGNORE_INDEX without a target; logits are
    the head's product times `scale`. The sum over no valid label is 0, with zero gradients. The caller divides the sum.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # the products with preallocated outputs do not cast
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return cross_entropy_sum(hidden.to(dtype), weight.to(dtype), labels, chunk_tokens, scale)
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    rows = hidden.reshape(-1, hidden.shape[-1])
    size = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    return _ChunkedCrossEntropy.apply(rows, weight, labels.reshape(-1), size, with_gradient, scale)


def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None, temperature: float = 1.0
) -> Tensor:
    """Returns log p(label) of every token, 0 without a target, with gradients, for logits divided by `temperature`.

    Shaped as the labels, float32 (float64 for float64 inputs); arguments are those of `cross_entropy_sum`. Use that
    for a plain sum: here the backward pass computes the logits of each chunk again.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # the backward pass runs without autocast, and must see the same logits
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return token_log_probs(hidden.to(dtype), weight.to(dtype), labels, chunk_tokens, temperature)
    rows = hidden.reshape(-1, hidden.shape[-1])
    size = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    return _TokenLogProbs.apply(rows, weight, labels.contiguous(), size, 1 / temperature)


class TokenMetrics(NamedTuple):
    """Values of every token, shaped as the labels, float32 (float64 for float64 inputs); 0 without a target."""

    log_probs: Tensor  # log p(label), with gradients
    entropy: Tensor  # of the predicted distribution, in nats
    hits: Tensor  # 1 if the label is the most probable token, and the first of equals


def token_metrics(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0, equal_factors: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenMetrics:  # fmt: skip
    """Returns log-probabilities with gradients, entropies and hits of all tokens, as trainers log them.

    Arguments are those of `cross_entropy_sum`. `equal_factors` promises that the loss weighs the log-probabilities of
    all tokens with a target equally, as a mean does. Then the forward pass computes the gradients too, which saves the
    fourth matrix product of `token_log_probs`. A loss that breaks the promise gets NaN gradients.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # see token_log_probs
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return token_metrics(hidden.to(dtype), weight.to(dtype), labels, scale, equal_factors, chunk_tokens)
    equal = equal_factors and torch.is_grad_enabled()
    rows = hidden.reshape(-1, hidden.shape[-1])
    return TokenMetrics(*_TokenMetrics.apply(rows, weight, labels.contiguous(), chunk_tokens, scale, equal))


def chunks(tokens: int, size: int) -> Iterator[slice]:
    """Yields the rows of each chunk; the last may reach past the end."""
    return (slice(start, start + size) for start in range(0, tokens, size))


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Returns -log p(label) of every token, 0 without a target, without gradients: the terms of `cross_entropy_sum`.

    Shaped as the labels, float32 (float64 for float64 inputs).
    """
    return losses_and_hits(hidden, weight, labels, scale, chunk_tokens)[0]


@torch.no_grad()
def losses_and_hits(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Returns `token_losses`, and 1 for every token whose label is the most probable one, stacked in this order."""
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    both = []
    for chunk in chunks(len(rows), chunk_tokens):
        logits = F.linear(rows[chunk], weight)
        hits = logits.argmax(-1) == targets[chunk]  # never for IGNORE_INDEX, which is negative
        losses = _cross_entropy_(logits, targets[chunk], with_gradient=False, scale=scale)
        both.append(torch.stack([losses, hits.to(losses.dtype)]))
    return torch.cat(both, dim=1).view(2, *labels.shape)


@torch.no_grad()
def likeliest_tokens(hidden: Tensor, weight: Tensor, labels: Tensor, _scale: float = 1.0) -> Tensor:
    """Returns the most probable next token of every row with a label, 0 for others; meant for few labels.

    A positive scale of the logits changes nothing.
    """
    found = torch.zeros_like(labels)
    marked = labels != IGNORE_INDEX
    found[marked] = F.linear(hidden[marked], weight).argmax(-1)
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
        scale: float,
    ) -> Tensor:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        total = hidden_ND.new_zeros((), dtype=wide)
        dhidden = torch.empty_like(hidden_ND) if with_gradient and ctx.needs_input_grad[0] else None
        # The sum over chunks stays in float32.
        dweight = torch.zeros_like(weight_VD, dtype=wide) if with_gradient and ctx.needs_input_grad[1] else None
        for chunk in chunks(len(hidden_ND), chunk_tokens):
            logits = F.linear(hidden_ND[chunk], weight_VD)
            total += _cross_entropy_(logits, labels_N[chunk], with_gradient, scale).sum()
            if dhidden is not None:
                torch.mm(logits, weight_VD, out=dhidden[chunk])
            if dweight is not None:
                add_product(dweight, logits.T, hidden_ND[chunk])
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx, dloss: Tensor):  # type: ignore[no-untyped-def, override]
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = _scaled(dhidden, dloss, dhidden.dtype)
        if dweight is not None:
            dweight = _scaled(dweight, dloss, ctx.weight_dtype)
        return dhidden, dweight, None, None, None, None


class _TokenMetrics(torch.autograd.Function):
    """Log-probabilities, entropies and hits; with `equal`, gradients are computed in the forward pass."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def, override]
        ctx,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        scale: float,
        equal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        values = hidden_ND.new_zeros((3, *labels.shape), dtype=wide)
        values_N, labels_N = values.view(3, -1), labels.view(-1)
        dhidden = torch.empty_like(hidden_ND) if equal and ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight_VD, dtype=wide) if equal and ctx.needs_input_grad[1] else None
        for chunk in chunks(len(hidden_ND), chunk_tokens):
            logits = F.linear(hidden_ND[chunk], weight_VD)
            with_gradient = dhidden is not None or dweight is not None
            _token_metrics_(logits, labels_N[chunk], values_N[:, chunk], with_gradient, scale)
            if dhidden is not None:
                torch.mm(logits, weight_VD, out=dhidden[chunk])
            if dweight is not None:
                add_product(dweight, logits.T, hidden_ND[chunk])
        inputs = (None, weight_VD) if equal else (hidden_ND, weight_VD)
        ctx.save_for_backward(*inputs, labels, dhidden, dweight)
        ctx.chunk_tokens, ctx.scale, ctx.equal = chunk_tokens, scale, equal
        log_probs, entropy, hits = (x.clone() for x in values)  # not views, of which FSDP2 warns
        ctx.mark_non_differentiable(entropy, hits)
        ctx.set_materialize_grads(False)
        return log_probs, entropy, hits

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor | None, *_):  # type: ignore[no-untyped-def, override]
        if upstream is None:
            return (None,) * 6
        hidden_ND, weight_VD, labels, dhidden, dweight = ctx.saved_tensors
        if ctx.equal:
            factor = -_common_value(upstream, labels != IGNORE_INDEX)
            dhidden = None if dhidden is None else _scaled(dhidden, factor, dhidden.dtype)
            dweight = None if dweight is None else _scaled(dweight, factor, weight_VD.dtype)
            return dhidden, dweight, None, None, None, None
        return *_log_prob_gradients(ctx, hidden_ND, weight_VD, labels, upstream), None, None, None, None


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
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, labels)
        ctx.chunk_tokens, ctx.scale = chunk_tokens, scale
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        log_probs = hidden_ND.new_zeros(labels.shape, dtype=wide)  # not a view, which FSDP2 warns of
        labels_N, log_probs_N = labels.view(-1), log_probs.view(-1)
        for chunk in chunks(len(hidden_ND), chunk_tokens):
            logits = F.linear(hidden_ND[chunk], weight_VD)
            log_probs_N[chunk] -= _cross_entropy_(logits, labels_N[chunk], with_gradient=False, scale=scale)
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def, override]
        hidden_ND, weight_VD, labels = ctx.saved_tensors
        return *_log_prob_gradients(ctx, hidden_ND, weight_VD, labels, upstream), None, None, None


def _log_prob_gradients(  # type: ignore[no-untyped-def]
    ctx, hidden_ND: Tensor, weight_VD: Tensor, labels: Tensor, upstream: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of log-probabilities whose own are `upstream`, from logits that are computed again."""
    labels_N = labels.view(-1)
    factors_N = upstream.neg().reshape(-1).contiguous()  # for gradients of losses, which are -log p
    dhidden = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
    dweight = torch.zeros_like(weight_VD, dtype=factors_N.dtype) if ctx.needs_input_grad[1] else None
    for chunk in chunks(len(hidden_ND), ctx.chunk_tokens):
        logits = F.linear(hidden_ND[chunk], weight_VD)
        _cross_entropy_(logits, labels_N[chunk], True, ctx.scale, factors_N[chunk])
        if dhidden is not None:
            torch.mm(logits, weight_VD, out=dhidden[chunk])
        if dweight is not None:
            add_product(dweight, logits.T, hidden_ND[chunk])
    return dhidden, None if dweight is None else dweight.to(weight_VD.dtype)


def _common_value(x: Tensor, chosen: Tensor) -> Tensor:
    """Returns the value that all chosen elements share, NaN if they differ, 0 if none is chosen; without host waits."""
    lowest, highest = x.masked_fill(~chosen, torch.inf).amin(), x.masked_fill(~chosen, -torch.inf).amax()
    return torch.where(lowest == highest, highest, torch.nan).masked_fill(lowest == torch.inf, 0.0)


def _token_metrics_(logits_NV: Tensor, labels_N: Tensor, values_3N: Tensor, with_gradient: bool, scale: float) -> None:
    """Writes log p(label), entropy and hit of every row into `values_3N`, and logits' gradients as _cross_entropy_."""
    log_probs, entropy, hits = values_3N
    if fused := fused_kernels(logits_NV, "fused_cross_entropy"):
        losses = fused.cross_entropy_(logits_NV, labels_N, IGNORE_INDEX, with_gradient, scale, metrics=(entropy, hits))
        torch.neg(losses, out=log_probs)
        return
    wide = logits_NV.to(entropy.dtype) * scale
    valid, target = labels_N != IGNORE_INDEX, labels_N.clamp_min(0)
    log_p = wide.log_softmax(-1)
    entropy.copy_(torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0.0))
    hits.copy_(valid & (wide.argmax(-1) == target))
    torch.neg(_cross_entropy_(logits_NV, labels_N, with_gradient, scale), out=log_probs)


def _cross_entropy_(
    logits_NV: Tensor, labels_N: Tensor, with_gradient: bool, scale: float = 1.0, factors_N: Tensor | None = None
) -> Tensor:
    """Returns -log p(label) of every row for logits times `scale`, 0 without a label.

    Optionally overwrites the logits with the gradient of their row's loss, times the row's factor if there are factors.
    """
    if fused := fused_kernels(logits_NV, "fused_cross_entropy"):
        return fused.cross_entropy_(logits_NV, labels_N, IGNORE_INDEX, with_gradient, scale, factors_N)
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    wide = wide if scale == 1.0 else wide * scale  # not in place: `wide` may be the logits themselves
    valid, target = labels_N != IGNORE_INDEX, labels_N.clamp_min(0).unsqueeze(-1)
    lse = wide.logsumexp(-1, keepdim=True)
    losses = torch.where(valid, (lse - wide.gather(-1, target)).squeeze(-1), 0.0)
    if with_gradient:
        gradient = torch.exp(wide - lse).scatter_add_(-1, target, torch.full_like(lse, -1.0))
        gradient *= scale if factors_N is None else scale * factors_N.unsqueeze(-1)
        logits_NV.copy_(torch.where(valid.unsqueeze(-1), gradient, 0.0))
    return losses


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x * factor, rounded once. On a GPU a 0-dimensional factor would first be rounded to x's dtype."""
    if fused := fused_kernels(x, "fused_cross_entropy"):
        return fused.scaled(x, factor, dtype)
    return torch.mul(x, factor.reshape([1] * x.ndim), out=torch.empty_like(x, dtype=dtype))
