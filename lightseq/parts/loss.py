"""Cross entropy of a language model head over chunks of tokens, so that the logits never exist whole."""

from collections.abc import Iterator, Sequence

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
    transform: LogitTransform = UNCHANGED, bias: Tensor | None = None, factors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the sum of -log p(label) over the valid labels, a float32 scalar (float64 for float64 inputs).

    hidden (..., D), weight (V, D) and bias (V,) of the head, labels (...) already shifted, IGNORE_INDEX without a
    target; `transform` makes logits of the head's result. `factors` (...), of any sign, multiply the terms of the sum.
    The sum over no valid label is 0, with zero gradients. The caller divides the sum.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # the products with preallocated outputs do not cast
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return cross_entropy_sum(
                hidden.to(dtype), weight.to(dtype), labels, chunk_tokens, transform, cast_bias(bias, dtype), factors
            )
    trained = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    with_gradient = torch.is_grad_enabled() and trained
    rows = hidden.reshape(-1, hidden.shape[-1])
    size = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    if factors is not None:
        factors = factors.to(torch.promote_types(hidden.dtype, torch.float32)).reshape(-1)
    return _ChunkedCrossEntropy.apply(rows, weight, bias, labels.reshape(-1), size, with_gradient, transform, factors)


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
                hidden.to(dtype), weight.to(dtype), labels, chunk_tokens, temperature, transform, cast_bias(bias, dtype)
            )
    rows = hidden.reshape(-1, hidden.shape[-1])
    size = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    return _TokenLogProbs.apply(rows, weight, bias, labels.contiguous(), size, transform.with_temperature(temperature))


def log_probs_of_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Does the same as `token_log_probs` for logits (..., V) that exist whole."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2) / temperature
    return -F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none").view(labels.shape)


def cast_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


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
        losses = cross_entropy_in_place(logits, targets[chunk], with_gradient=False, transform=transform)
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
        """Adds the contribution of a chunk of rows, given the gradients of its logits."""
        if self.hidden is not None:
            torch.mm(dlogits, self._weight_VD, out=self.hidden[chunk])
        if self.weight is not None:
            add_product(self.weight, dlogits.T, self._hidden_ND[chunk])
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)

    def in_dtypes(self) -> list[Tensor | None]:
        """Casts the gradients of input, weight and bias to the dtypes of their tensors."""
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
        factors_N: Tensor | None,
    ) -> Tensor:
        total = hidden_ND.new_zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
        wanted = ctx.needs_input_grad[:3] if with_gradient else (False,) * 3
        gradients = HeadGradients(hidden_ND, weight_VD, bias_V, wanted)
        for chunk in chunks(len(hidden_ND), chunk_tokens):
            logits = F.linear(hidden_ND[chunk], weight_VD, bias_V)
            factors = None if factors_N is None else factors_N[chunk]
            losses = cross_entropy_in_place(logits, labels_N[chunk], with_gradient, transform, factors)
            total += losses.sum() if factors is None else (losses * factors).sum()
            gradients.add(chunk, logits)
            del logits  # before the next chunk's are allocated
        save_gradients(ctx, gradients, weight_VD, bias_V)
        return total

    @staticmethod
    def backward(ctx, dloss: Tensor):  # type: ignore[no-untyped-def, override]
        return *scaled_gradients(ctx, dloss), None, None, None, None, None


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
            log_probs_N[chunk] -= cross_entropy_in_place(
                logits, labels_N[chunk], with_gradient=False, transform=transform
            )
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[no-untyped-def, override]
        return *log_prob_gradients(ctx, upstream), None, None, None


def save_gradients(ctx, gradients: HeadGradients, weight_VD: Tensor, bias_V: Tensor | None, *others: Tensor) -> None:  # type: ignore[no-untyped-def]
    """Saves gradients for `scaled_gradients`, followed by other tensors."""
    ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias, *others)
    ctx.gradient_dtypes = (None, weight_VD.dtype, None if bias_V is None else bias_V.dtype)


def scaled_gradients(ctx, factor: Tensor) -> list[Tensor | None]:  # type: ignore[no-untyped-def]
    """Scales the saved gradients, and casts them to the dtypes of their tensors."""
    pairs = zip(ctx.saved_tensors[:3], ctx.gradient_dtypes, strict=True)
    return [None if x is None else scaled(x, factor, dtype or x.dtype) for x, dtype in pairs]


def log_prob_gradients(ctx, upstream: Tensor) -> list[Tensor | None]:  # type: ignore[no-untyped-def]
    """Backpropagates `upstream`, the gradients of log-probabilities. Recomputes the logits."""
    hidden_ND, weight_VD, bias_V, labels = ctx.saved_tensors
    labels_N, factors_N = labels.view(-1), upstream.neg().reshape(-1).contiguous()  # factors of losses, -log p
    gradients = HeadGradients(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad[:3])
    for chunk in chunks(len(hidden_ND), ctx.chunk_tokens):
        logits = F.linear(hidden_ND[chunk], weight_VD, bias_V)
        cross_entropy_in_place(logits, labels_N[chunk], True, ctx.transform, factors_N[chunk])
        gradients.add(chunk, logits)
    return gradients.in_dtypes()


def common_value(x: Tensor, chosen: Tensor) -> Tensor:
    """Returns the value that all chosen elements share, NaN if they differ, 0 if none is chosen; without host waits."""
    lowest, highest = x.masked_fill(~chosen, torch.inf).amin(), x.masked_fill(~chosen, -torch.inf).amax()
    return torch.where(lowest == highest, highest, torch.nan).masked_fill(lowest == torch.inf, 0.0)


def cross_entropy_in_place(
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
