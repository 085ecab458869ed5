"""Divergence of a student's next-token distributions from a teacher's, over chunks of tokens and the whole vocabulary.

Neither model's logits exist whole, in the forward or in the backward pass.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightseq.config.objectives import DIVERGENCES
from lightseq.kernels.fused.products import write_product
from lightseq.parts.loss import HeadGradients, chunks, common_value, scaled
from lightseq.utils.logit_transform import UNCHANGED, LogitTransform
from lightseq.utils.tensors import IGNORE_INDEX

CHUNK_TOKENS = 512  # about six float32 tensors of 512 x 151936 logits are 1.8 GiB


class HeadInput(NamedTuple):
    """Hidden states of a model's tokens, and its LM head."""

    hidden: Tensor  # (..., D)
    weight: Tensor  # (V, D)
    bias: Tensor | None = None  # (V,)
    transform: LogitTransform = UNCHANGED  # makes logits of the head's result


@dataclass(frozen=True)
class Divergence:
    """A divergence of two distributions, p of the student and q of the teacher.

    `forward` is KL(q, p), `reverse` is KL(p, q), and `jsd` is beta KL(q, m) + (1 - beta) KL(p, m) for the mixture
    m = beta q + (1 - beta) p (GKD, arXiv 2306.13649). TRL calls the first two beta 0 and 1.
    """

    kind: str = "forward"
    beta: float = 0.5  # weight of the teacher in `jsd`
    temperature: float = 1.0  # divides the logits of both models

    def __post_init__(self) -> None:
        if self.kind not in DIVERGENCES:
            raise ValueError(f"divergence {self.kind!r} is unknown; choose one of {', '.join(DIVERGENCES)}")
        if not 0 < self.beta < 1:
            raise ValueError(f"beta is {self.beta}; give a number above 0 and below 1, or another divergence than jsd")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; give a number above 0")

    def of(self, log_p_CV: Tensor, log_q_CV: Tensor) -> Tensor:
        """Returns the divergence of every row. Overwrites both inputs, `log_p_CV` with its gradient by the logits."""
        if self.kind == "forward":
            q = log_q_CV.exp()
            values = log_q_CV.sub_(log_p_CV).mul_(q).sum(-1)
            log_p_CV.exp_().sub_(q)
            return values
        if self.kind == "reverse":
            return _kl_(log_p_CV, log_q_CV)
        log_m = torch.logaddexp(log_p_CV + math.log(1 - self.beta), log_q_CV + math.log(self.beta))
        values = (log_q_CV.exp() * log_q_CV.sub_(log_m)).sum(-1)
        values = self.beta * values + (1 - self.beta) * _kl_(log_p_CV, log_m)
        log_p_CV *= 1 - self.beta
        return values


class TokenDivergence(NamedTuple):
    """Values of every token, shaped as the labels, float32 (float64 for float64 inputs); 0 without a target."""

    divergence: Tensor  # with gradients of the student
    student_log_probs: Tensor  # log p(label), at temperature 1, without gradients
    teacher_log_probs: Tensor
    student_entropy: Tensor | None  # in nats, at the divergence's temperature, without gradients; if asked for


def token_divergence(
    student: HeadInput, teacher: HeadInput, labels: Tensor, divergence: Divergence = Divergence(),
    equal_factors: bool = False, with_entropy: bool = False, chunk_tokens: int | None = None,
) -> TokenDivergence:  # fmt: skip
    """Returns the divergence of the student from the teacher at every token with a target, over the whole vocabulary.

    Labels (...) are already shifted, IGNORE_INDEX without a target. The teacher gets no gradient. `equal_factors` is
    the promise of `parts.token_metrics`. With it, or if the student's head is frozen, the forward pass computes
    the gradients, and nothing of the teacher is saved. Otherwise the backward pass computes both models' logits again.

    Raises ValueError for vocabularies of different sizes.
    """
    sizes = len(student.weight), len(teacher.weight)
    if sizes[0] != sizes[1]:
        raise ValueError(f"the student has {sizes[0]} logits a token, but the teacher {sizes[1]}; give one vocabulary")
    device = student.hidden.device.type
    if torch.is_autocast_enabled(device):  # see parts.loss.token_log_probs
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            both = _cast(student, dtype), _cast(teacher, dtype)
            return token_divergence(*both, labels, divergence, equal_factors, with_entropy, chunk_tokens)
    *tensors, transform = student
    trains_head = any(x is not None and x.requires_grad for x in tensors[1:])
    trains = torch.is_grad_enabled() and (trains_head or student.hidden.requires_grad)
    options = _Options(
        divergence=divergence,
        teacher=teacher._replace(hidden=_rows(teacher.hidden)),
        transform=transform,
        chunk_tokens=CHUNK_TOKENS if chunk_tokens is None else chunk_tokens,
        gradients_in_forward=trains and (equal_factors or not trains_head),
        with_entropy=with_entropy,
    )
    values, of_student, of_teacher, *entropy = _TokenDivergence.apply(
        _rows(student.hidden), student.weight, student.bias, labels.contiguous(), options
    )
    return TokenDivergence(values, of_student, of_teacher, entropy[0] if with_entropy else None)


@dataclass(frozen=True)
class _Options:
    """Arguments of a divergence that get no gradients."""

    divergence: Divergence
    teacher: HeadInput  # hidden (N, D)
    transform: LogitTransform  # the student's
    chunk_tokens: int
    gradients_in_forward: bool
    with_entropy: bool


class _TokenDivergence(torch.autograd.Function):
    """Divergence of every token, with gradients for the student's hidden states and head."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def, override]
        ctx, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels: Tensor, options: _Options
    ) -> tuple[Tensor, ...]:
        student = HeadInput(hidden_ND, weight_VD, bias_V, options.transform)
        wide, count = torch.promote_types(hidden_ND.dtype, torch.float32), 4 if options.with_entropy else 3
        found = hidden_ND.new_zeros((count, *labels.shape), dtype=wide)
        wanted = ctx.needs_input_grad[:3] if options.gradients_in_forward else (False,) * 3
        gradients = HeadGradients(hidden_ND, weight_VD, bias_V, wanted)
        for chunk in chunks(len(hidden_ND), options.chunk_tokens):
            dlogits = _divergence_of_chunk(student, options, labels.view(-1), chunk, found.view(count, -1))
            gradients.add(chunk, dlogits)
            del dlogits  # before the next chunk's are allocated
        ctx.dtypes = weight_VD.dtype, None if bias_V is None else bias_V.dtype
        if options.gradients_in_forward:
            ctx.options = None
            ctx.save_for_backward(labels, gradients.hidden, gradients.weight, gradients.bias)
        else:
            ctx.save_for_backward(labels, hidden_ND, weight_VD, bias_V, *options.teacher[:3])
            freed: Any = None  # the context holds tensors by `save_for_backward` only
            ctx.options = replace(options, teacher=options.teacher._replace(hidden=freed, weight=freed, bias=freed))
        divergence, *others = (x.clone() for x in found)  # FSDP2 warns about views
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        return divergence, *others

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor | None, *_):  # type: ignore[no-untyped-def, override]
        if upstream is None:
            return (None,) * 5
        labels, hidden, weight, bias, *of_teacher = ctx.saved_tensors  # `of_teacher` is empty if not needed
        valid = labels != IGNORE_INDEX
        factors_N = upstream.masked_fill(~valid, 0.0).view(-1)
        if ctx.options is None:
            if hidden is not None:
                hidden = torch.mul(hidden, factors_N.unsqueeze(-1), out=torch.empty_like(hidden))
            common = common_value(upstream, valid)
            pairs = zip((weight, bias), ctx.dtypes, strict=True)
            return hidden, *(None if x is None else scaled(x, common, dtype) for x, dtype in pairs), None, None
        named = dict(zip(("hidden", "weight", "bias"), of_teacher, strict=True))
        options = replace(ctx.options, teacher=ctx.options.teacher._replace(**named))
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        student = HeadInput(hidden, weight, bias, options.transform)
        for chunk in chunks(len(hidden), options.chunk_tokens):
            dlogits = _divergence_of_chunk(student, options, labels.view(-1), chunk, factors_N=factors_N)
            gradients.add(chunk, dlogits)
            del dlogits
        pairs = zip((gradients.weight, gradients.bias), ctx.dtypes, strict=True)
        return gradients.hidden, *(None if x is None else x.to(dtype) for x, dtype in pairs), None, None


def _divergence_of_chunk(
    student: HeadInput, options: _Options, labels_N: Tensor, chunk: slice, found: Tensor | None = None,
    factors_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the gradient of a chunk's logits before their transform, in the dtype of the head.

    Each row's is that of its divergence, times its factor if there are factors. Writes the values of
    `TokenDivergence` into `found` (values, N), if it is given.
    """
    labels_C, temperature = labels_N[chunk], options.divergence.temperature
    valid, target = labels_C != IGNORE_INDEX, labels_C.clamp_min(0).unsqueeze(-1)
    both, metrics = [], []
    for model in (student, options.teacher):
        logits = model.transform.logits(_product(model, chunk))
        if temperature == 1.0 or found is not None:
            lse = logits.logsumexp(-1, keepdim=True)
            metrics.append((logits.gather(-1, target) - lse).squeeze(-1))
        if temperature != 1.0:
            logits /= temperature
            lse = logits.logsumexp(-1, keepdim=True)
        both.append((logits, lse))
    (logits, lse), (log_q, lse_q) = both
    slope = options.transform.with_temperature(temperature).slope(logits)
    log_p = logits.sub_(lse)
    if found is not None and options.with_entropy:
        metrics.append(-(log_p.exp() * log_p).sum(-1))
    values = options.divergence.of(log_p, log_q.sub_(lse_q))
    if found is not None:
        found[:, chunk] = torch.stack([values, *metrics]).masked_fill_(~valid, 0.0)
    gradient = log_p.mul_(slope) if isinstance(slope, Tensor) or slope != 1.0 else log_p
    if factors_N is not None:
        gradient *= factors_N[chunk].unsqueeze(-1)
    return gradient.masked_fill_(~valid.unsqueeze(-1), 0.0).to(student.weight.dtype)


def _product(model: HeadInput, chunk: slice) -> Tensor:
    """Returns the head's product with a chunk of hidden states, not rounded to their dtype.

    Rounded logits of two alike models would differ by more than their divergence.
    """
    rows = model.hidden[chunk]
    wide = torch.promote_types(rows.dtype, torch.float32)
    logits = torch.empty(len(rows), len(model.weight), dtype=wide, device=rows.device)
    write_product(logits, rows, model.weight.T)
    return logits if model.bias is None else logits.add_(model.bias)


def _kl_(log_p_CV: Tensor, log_q_CV: Tensor) -> Tensor:
    """Returns KL(p, q) of every row. Turns `log_p_CV` into its gradient by the logits of p, q fixed; overwrites q."""
    log_ratio = torch.sub(log_p_CV, log_q_CV, out=log_q_CV)
    p = log_p_CV.exp_()
    values = (p * log_ratio).sum(-1)
    p *= log_ratio.sub_(values.unsqueeze(-1))
    return values


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


def _cast(model: HeadInput, dtype: torch.dtype) -> HeadInput:
    bias = None if model.bias is None else model.bias.to(dtype)
    return HeadInput(model.hidden.to(dtype), model.weight.to(dtype), bias, model.transform)
