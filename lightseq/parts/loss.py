"""Cross entropy of a language model head over chunks of tokens, so that the logits never exist whole."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightseq.kernels.fused.launches import fused_kernels
from lightseq.kernels.fused.products import add_product
from lightseq.utils.logit_transform import UNCHANGED, LogitTransform
from lightseq.utils.tensors import IGNORE_INDEX

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
    return _ChunkedCrossEntropy.apply(rows, weight, bias, labels.reshape(-1), size, with_gradient, transform)


def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None, temperature: float = 1.0,
    transform: LogitTransform = UNCHANGED, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns log p(label) of every token, 0 without a target, with gradients, for logits divided by `temperature`.

    Shaped as the labels, float32 (float64 for float64 inputs); arguments as in `cross_entropy_sum`. Use that
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
    return _TokenLogProbs.apply(rows, weight, bias, labels.contiguous(), size, transform.with_temperature(temperature))


def log_probs_of_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns what `token_log_probs` does, of logits (..., V) that exist whole."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2) / temperature
    return -F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none").view(labels.shape)


def entropy_of_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the entropies of `token_metrics`, of logits (..., V) that exist whole."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_p = wide.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).masked_fill(labels == IGNORE_INDEX, 0.0)


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


class TokenMetrics(NamedTuple):
    """Values of every token, shaped as the labels, float32 (float64 for float64 inputs); 0 without a target."""

    log_probs: Tensor  # log p(label), with gradients
    entropy: Tensor  # of the predicted distribution, in nats; with gradients, unless the factors are equal
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
                hidden.to(dtype), weight.to(dtype), labels, transform, _cast(bias, dtype), equal_factors, chunk_tokens
            )
    equal = equal_factors and torch.is_grad_enabled()
    rows = hidden.reshape(-1, hidden.shape[-1])
    return TokenMetrics(*_TokenMetrics.apply(rows, weight, bias, labels.contiguous(), chunk_tokens, transform, equal))


def chunks(tokens: int, size: int) -> Iterator[slice]:
    """Yields the rows of each chunk; the last may reach past the end."""
    return (slice(start, start + size) for start in range(0, tokens, size))


@torch.no_grad()
def losses_and_hits(
    hidden: Tensor, weight: Tensor, labels: Tensor, transform: LogitTransform = UNCHANGED, bias: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:  # fmt: skip
    """Returns -log p(label) of every token, and 1 if the label is the most probable one, stacked in this order.

    Both are 0 without a target. -log p(label) are the terms of `cross_entropy_sum`, without gradients. Shaped as the
    labels, float32 (float64 for float64 inputs).
    """
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    both = []
    for chunk in chunks(len(rows), chunk_tokens):
        logits = F.linear(rows[chunk], weight, bias)
        hits = logits.argmax(-1) == targets[chunk]  # never for IGNORE_INDEX, which is negative
        losses = _cross_entropy_(logits, targets[chunk], with_gradient=False, transform=transform)
        both.append(torch.stack([losses, hits.to(losses.dtype)]))
    return torch.cat(both, dim=1).view(2, *labels.shape)


class HeadGradients:
    """Gradients of a head's input, weight and bias, summed in float32 over chunks of logits; None where not wanted."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wanted: Sequence[bool]) -> None:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden_ND) if wanted[0] else None
        self.weight = torch.zeros_like(weight_VD, dtype=wide) if wanted[1] else None
        self.bias = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and wanted[2] else None
        self._hidden_ND, self._weight_VD, self._bias_V = hidden_ND, weight_VD, bias_V

    def __bool__(self) -> bool:
        return any(x is not None for x in (self.hidden, self.weight, self.bias))

    def add(self, chunk: slice, dlogits: Tensor) -> None:
        """Adds what a chunk of rows contributes, given the gradients of its logits."""
        if self.hidden is not None:
            torch.mm(dlogits, self._weight_VD, out=self.hidden[chunk])
        if self.weight is not None:
            add_product(self.weight, dlogits.T, self._hidden_ND[chunk])
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)

    def in_dtypes(self) -> list[Tensor | None]:
        """Returns the gradients of input, weight and bias, in the dtypes of what they belong to."""
        weight = None if self.weight is None else self.weight.to(self._weight_VD.dtype)
        bias = None if self.bias is None or self._bias_V is None else self.bias.to(self._bias_V.dtype)
        return [self.hidden, weight, bias]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy that computes the gradients in the forward pass, while a chunk's logits exist.

    The backward pass scales them. A chunk takes three matrix products; recomputing the logits would take four.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def, override]
        ctx,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        chunk_tokens: int,
        with_gradient: bool,
        transform: LogitTransform,
    ) -> Tensor:
        total = hidden_ND.new_zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        wanted = ctx.needs_input_grad[:3] if with_gradient else (False,) * 3
        gradients = HeadGradients(hidden_ND, weight_VD, bias_V, wanted)
        for chunk in chunks(len(hidden_ND), chunk_tokens):
            logits = F.linear(hidden_ND[chunk], weight_VD, bias_V)
            total += _cross_entropy_(logits, labels_N[chunk], with_gradient, transform).sum()
            gradients.add(chunk, logits)
            del logits  # before the next chunk's are allocated
        _save(ctx, gradients, weight_VD, bias_V)
        return total

    @staticmethod
    def backward(ctx, dloss: Tensor):  # type: ignore[no-untyped-def, override]
        return *_scaled_gradients(ctx, dloss), None, None, None, None


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
            _save(ctx, gradients, weight_VD, bias_V, labels)
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
            gradients = _scaled_gradients(ctx, -common_value(of_log_probs, labels != IGNORE_INDEX))
        else:
            gradients = _log_prob_gradients(ctx, of_log_probs)
        return *gradients, None, None, None, None


class _TokenLogProbs(torch.autograd.Function):
    """Log-probabilities whose gradient depends on the upstream gradient of every token.

    That is known in the backward pass only, so a chunk takes four matrix products.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def, override]
        ctx,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels: Tensor,
        chunk_tokens: int,
        transform: LogitTransform,
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels)
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
        return *_log_prob_gradients(ctx, upstream), None, None, None


def _save(ctx, gradients: HeadGradients, weight_VD: Tensor, bias_V: Tensor | None, *others: Tensor) -> None:  # type: ignore[no-untyped-def]
    """Saves gradients for `_scaled_gradients`, and other tensors behind them."""
    ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias, *others)
    ctx.gradient_dtypes = (None, weight_VD.dtype, None if bias_V is None else bias_V.dtype)


def _scaled_gradients(ctx, factor: Tensor) -> list[Tensor | None]:  # type: ignore[no-untyped-def]
    """Returns the saved gradients times a factor, in the dtypes of what they belong to."""
    pairs = zip(ctx.saved_tensors[:3], ctx.gradient_dtypes, strict=True)
    return [None if x is None else scaled(x, factor, dtype or x.dtype) for x, dtype in pairs]


def _log_prob_gradients(ctx, upstream: Tensor) -> list[Tensor | None]:  # type: ignore[no-untyped-def]
    """Returns the gradients of log-probabilities whose own are `upstream`, from logits that are computed again."""
    hidden_ND, weight_VD, bias_V, labels = ctx.saved_tensors
    labels_N, factors_N = labels.view(-1), upstream.neg().reshape(-1).contiguous()  # factors of losses, -log p
    gradients = HeadGradients(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad[:3])
    for chunk in chunks(len(hidden_ND), ctx.chunk_tokens):
        logits = F.linear(hidden_ND[chunk], weight_VD, bias_V)
        _cross_entropy_(logits, labels_N[chunk], True, ctx.transform, factors_N[chunk])
        gradients.add(chunk, logits)
    return gradients.in_dtypes()


def _entropy_gradients(ctx, of_log_probs: Tensor | None, of_entropy: Tensor) -> list[Tensor | None]:  # type: ignore[no-untyped-def]
    """Returns the gradients of log-probabilities and entropies together, from logits that are computed again.

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


def common_value(x: Tensor, chosen: Tensor) -> Tensor:
    """Returns the value that all chosen elements share, NaN if they differ, 0 if none is chosen; without host waits."""
    lowest, highest = x.masked_fill(~chosen, torch.inf).amin(), x.masked_fill(~chosen, -torch.inf).amax()
    return torch.where(lowest == highest, highest, torch.nan).masked_fill(lowest == torch.inf, 0.0)


def _token_metrics_(
    logits_NV: Tensor, labels_N: Tensor, values_3N: Tensor, with_gradient: bool, transform: LogitTransform
) -> None:
    """Writes log p(label), entropy and hit of every row into `values_3N`, and gradients as `_cross_entropy_` does."""
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
    torch.neg(_cross_entropy_(logits_NV, labels_N, with_gradient, transform), out=log_probs)


def _cross_entropy_(
    logits_NV: Tensor, labels_N: Tensor, with_gradient: bool, transform: LogitTransform = UNCHANGED,
    factors_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns -log p(label) of every row for transformed logits, 0 without a label.

    Optionally overwrites the logits with the gradient of their row's loss, times the row's factor if there are factors.
    """
    if fused := fused_kernels(logits_NV, "cross_entropy"):
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


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x * factor, rounded once. On a GPU a 0-dimensional factor would first be rounded to x's dtype."""
    if fused := fused_kernels(x, "cross_entropy"):
        return fused.scaled(x, factor, dtype)
    return torch.mul(x, factor.reshape([1] * x.ndim), out=torch.empty_like(x, dtype=dtype))
