"""Divergence of a student from a frozen teacher, both split across the same ranks. Users call it as `hf.divergence`."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightseq.utils import quiet_transformers  # noqa: F401  first, because the modules below import transformers

# isort: split
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.hf.log_probs import check_context, computing_in_head, shifted_labels, values_of_tokens, without_labels
from lightseq.hf.record import record_of
from lightseq.models.decoder import text_config, transformers_model
from lightseq.parts.divergence import Divergence, HeadInput, token_divergence
from lightseq.parts.head import head_change, known_logit_transform
from lightseq.parts.router_loss import asks_for_router_logits
from lightseq.utils.logit_transform import LogitTransform


def divergence(
    context: SequenceContext, student: nn.Module, teacher: nn.Module, batch: Mapping[str, Any],
    kind: str = "forward", temperature: float = 1.0, beta: float = 0.5,
) -> Tensor:  # fmt: skip
    """Returns the divergence of the student's next token from the teacher's at this rank's tokens, with gradients.

    The result is (batch, local) float32, over the whole vocabulary, and 0 without a target. `kind` is `forward` for
    KL(teacher, student), `reverse` for KL(student, teacher), or `jsd`, which `beta` weighs (`parts.divergence`).
    `temperature` divides the logits, which never exist whole. `batch` and the use of the values are as in
    `token_log_probs`.

    The student is enabled with `context`, the teacher by `enable_beside`, or by `enable` with a context of the same
    layout. The teacher runs first and without gradients. If its head's weight is gathered for its forward pass only, as
    under FSDP2, then a copy of it lives until the student's head has run, and until the backward pass if the student's
    head trains.

    Raises ValueError for vocabularies of different sizes, for a head that is more than a linear, and for a teacher in
    training mode.
    """
    labels, measure = shifted_labels(batch), Divergence(kind, beta, temperature)
    inner, other = transformers_model(student), transformers_model(teacher)
    check_context(context, inner)
    _check_teacher(context, other)
    check_vocabularies(inner, other)
    transforms = [_transform(model, role) for model, role in ((inner, "student"), (other, "teacher"))]
    found = _run_teacher(teacher, other, batch, transforms[1])

    @torch.compiler.disable
    def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return token_divergence(HeadInput(hidden, weight, bias, transforms[0]), found, labels, measure).divergence

    with computing_in_head(inner, compute):
        return values_of_tokens(student, batch)


def check_vocabularies(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raises ValueError if the models have vocabularies of different sizes."""
    ours, theirs = (text_config(model.config).vocab_size for model in (student, teacher))
    if ours != theirs:
        raise ValueError(
            f"the student has a vocabulary of {ours} tokens, but the teacher one of {theirs}; distill from a teacher "
            "with the student's tokenizer and as many rows in its LM head"
        )


def _check_teacher(context: SequenceContext, teacher: PreTrainedModel) -> None:
    """Raises ValueError unless the teacher's and the student's inputs are split in the same way."""
    name, record = type(teacher).__name__, record_of(teacher)
    if record is None:
        raise ValueError(f"the teacher ({name}) is not enabled; call hf.enable_beside(teacher, context)")
    own, ours = (
        (x.layout, x.balances_documents, dist.get_process_group_ranks(x.process_group))
        for x in (record.context.sequence, context.sequence)
    )
    if own != ours:
        raise ValueError(
            f"the teacher ({name}) is enabled with {record.context.schedule}, but the student with {context.schedule}; "
            "call hf.enable_beside(teacher, context)"
        )
    if teacher.training:
        raise ValueError(f"the teacher ({name}) is in training mode; call teacher.eval()")


def _transform(model: PreTrainedModel, role: str) -> LogitTransform:
    """Returns the function that makes a model's logits. Raises ValueError for a head that is more than a linear."""
    if (known := known_logit_transform(model)) is None:
        change = head_change(model) or f"{type(model).__name__} makes its logits in an unknown way"
        raise ValueError(f"{role}: {change}; hf.divergence needs a linear LM head, such as one without an adapter")
    return known


@torch.no_grad()
def _run_teacher(
    teacher: nn.Module, inner: PreTrainedModel, batch: Mapping[str, Any], transform: LogitTransform
) -> HeadInput:
    """Runs the teacher up to its head. Returns the input and weights of the head."""
    head: Any = inner.get_output_embeddings()
    before, found = (head.weight, head.weight.numel()), list[HeadInput]()

    @torch.compiler.disable
    def take(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        stays = weight is before[0] and weight.numel() == before[1]  # else it is gathered for this pass only
        if not stays:
            weight, bias = weight.clone(), None if bias is None else bias.clone()
        found.append(HeadInput(hidden.detach(), weight, bias, transform))
        return hidden.new_zeros(hidden.shape[:-1], dtype=torch.float32)

    options = {"output_router_logits": False} if asks_for_router_logits(inner.config, {}) else {}
    with computing_in_head(inner, take):
        teacher(**without_labels(batch), **options)
    return found[-1]
