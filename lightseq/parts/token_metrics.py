"""Log-probabilities, entropies and hits of all tokens, for trainers, over chunks of logits."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightseq.kernels.fused.launches import fused_kernels
from lightseq.parts.loss import (
    CHUNK_TOKENS,
    HeadGradients,
    cast_bias,
    chunks,
    common_value,
    cross_entropy_in_place,
    log_prob_gradients,
    save_gradients,
    scaled_gradients,
)
from lightseq.utils.logit_transform import UNCHANGED, LogitTransform
from lightseq.utils.tensors import IGNORE_INDEX


class TokenMetrics(NamedTuple):
    """Values of every token, shaped as the labels, float32 (float64 for float64 inputs); 0 without a target."""

    log_probs: Tensor  # log p(label), with gradients
    entropy: Tensor  # entropy of the predicted distribution, in nats; with gradients, unless the factors are equal
    hits: Tensor  # 1 if the label is the most probable token, and the first of equals


def token_metrics(
    hidden: Tensor, weight: Tensor, labels: Tensor, transform: LogitTransform = UNCHANGED, bias: Tensor | None = None,
    equal_factors: bool = False, chunk_tokens: int = CHUNK_TOKENS,
) -> TokenMetrics:  # fmt: skip
    """Returns log-probabilities and entropies with gradients, and hits of all tokens, as trainers read them.

    Takes the arguments of `cross_entropy_sum`. `equal_factors` promises that the loss weighs the log-probabilities of
    all tokens with a target equally, as a mean does. Then the forward pass computes the gradients too, which saves the
    fourth matrix product of `token_log_probs`. A loss that breaks the promise gets NaN gradients.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # see token_log_probs
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return token_metrics(
                hidden.to(dtype),
                weight.to(dtype),
                labels,
                transform,
                cast_bias(bias, dtype),
                equal_factors,
                chunk_tokens,
            )
    equal = equal_factors and torch.is_grad_enabled()
    rows = hidden.reshape(-1, hidden.shape[-1])
    return TokenMetrics(*_TokenMetrics.apply(rows, weight, bias, labels.contiguous(), chunk_tokens, transform, equal))


class _TokenMetrics(torch.autograd.Function):
    """Log-probabilities, entropies and hits; with `equal`, gradients are computed in the forward pass."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def, override]
        ctx,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels: Tensor,
        chunk_tokens: int,
        transform: LogitTransform,
        equal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = hidden_ND.new_zeros((3, *labels.shape), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        values_N, labels_N = values.view(3, -1), labels.view(-1)
        gradients = HeadGradients(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad[:3] if equal else (False,) * 3)
        for chunk in chunks(len(hidden_ND), chunk_tokens):
            logits = F.linear(hidden_ND[chunk], weight_VD, bias_V)
            _token_metrics_(logits, labels_N[chunk], values_N[:, chunk], bool(gradients), transform)
            gradients.add(chunk, logits)
            del logits  # before the next chunk's are allocated
        ctx.equal, ctx.chunk_tokens, ctx.transform = equal, chunk_tokens, transform
        if equal:
            save_gradients(ctx, gradients, weight_VD, bias_V, labels)
        else:
            ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels)
        log_probs, entropy, hits = (x.clone() for x in values)  # FSDP2 warns about views
        ctx.mark_non_differentiable(*((entropy, hits) if equal else (hits,)))
        ctx.set_materialize_grads(False)
        return log_probs, entropy, hits

    @staticmethod
    @once_differentiable
    def backward(ctx, of_log_probs: Tensor | None, of_entropy: Tensor | None, _):  # type: ignore[no-untyped-def, override]
        if of_entropy is not None:
            gradients = _entropy_gradients(ctx, of_log_probs, of_entropy)
        elif of_log_probs is None:
            return (None,) * 7
        elif ctx.equal:
            labels = ctx.saved_tensors[-1]
            gradients = scaled_gradients(ctx, -common_value(of_log_probs, labels != IGNORE_INDEX))
        else:
            gradients = log_prob_gradients(ctx, of_log_probs)
        return *gradients, None, None, None, None


def _entropy_gradients(ctx, of_log_probs: Tensor | None, of_entropy: Tensor) -> list[Tensor | None]:  # type: ignore[no-untyped-def]
    """Backpropagates log-probabilities and entropies together. Recomputes the logits.

    With H = -sum p log p, dH / dlogit = -p (log p + H).
    """
    hidden_ND, weight_VD, bias_V, labels = ctx.saved_tensors
    labels_N, entropy_N = labels.view(-1), of_entropy.reshape(-1, 1)
    log_probs_N = torch.zeros_like(entropy_N) if of_log_probs is None else of_log_probs.reshape(-1, 1)
    gradients = HeadGradients(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad[:3])
    for chunk in chunks(len(hidden_ND), ctx.chunk_tokens):
        logits = F.linear(hidden_ND[chunk], weight_VD, bias_V)
        valid, target = labels_N[chunk] != IGNORE_INDEX, labels_N[chunk].clamp_min(0).unsqueeze(-1)
        wide = ctx.transform.logits(logits.to(entropy_N.dtype))
        log_p = wide.log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        gradient = log_p.add_(entropy).mul_(-entropy_N[chunk]).sub_(log_probs_N[chunk]).mul_(p)
        gradient.scatter_add_(-1, target, log_probs_N[chunk])
        gradient *= ctx.transform.slope(wide)
        gradients.add(chunk, gradient.masked_fill_(~valid.unsqueeze(-1), 0.0).to(logits.dtype))
    return gradients.in_dtypes()


def _token_metrics_(
    logits_NV: Tensor, labels_N: Tensor, values_3N: Tensor, with_gradient: bool, transform: LogitTransform
) -> None:
    """Writes log p(label), entropy and hit of every row into `values_3N`, and gradients as `cross_entropy_in_place`."""
    log_probs, entropy, hits = values_3N
    if fused := fused_kernels(logits_NV, "cross_entropy"):
        losses = fused.cross_entropy_(
            logits_NV, labels_N, IGNORE_INDEX, with_gradient, transform, metrics=(entropy, hits)
        )
        torch.neg(losses, out=log_probs)
        return
    wide = transform.logits(logits_NV.to(entropy.dtype))
    valid, target = labels_N != IGNORE_INDEX, labels_N.clamp_min(0)
    log_p = wide.log_softmax(-1)
    entropy.copy_(torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0.0))
    hits.copy_(valid & (wide.argmax(-1) == target))
    torch.neg(cross_entropy_in_place(logits_NV, labels_N, with_gradient, transform), out=log_probs)


def entropy_of_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Computes the entropies of `token_metrics` from logits (..., V) that exist whole."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_p = wide.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).masked_fill(labels == IGNORE_INDEX, 0.0)
