"""Losses of log-probabilities, such as DPO and GRPO, of sequences split across ranks. Users call them as `hf.NAME`."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from lightseq.utils import quiet_transformers  # noqa: F401  first, because the modules below import transformers

# isort: split
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.hf.agreement import BATCH_FACTS, LENGTH
from lightseq.hf.record import record_of
from lightseq.models.decoder import transformers_model
from lightseq.parts import loss
from lightseq.parts.head import ReplacedHead, head_change, known_logit_transform
from lightseq.parts.token_metrics import entropy_of_logits, token_metrics
from lightseq.sequence import sums


@overload
def token_log_probs(
    context: SequenceContext,
    model: nn.Module,
    batch: Mapping[str, Any],
    temperature: float = ...,
    with_entropy: Literal[False] = ...,
) -> Tensor: ...
@overload
def token_log_probs(
    context: SequenceContext,
    model: nn.Module,
    batch: Mapping[str, Any],
    temperature: float = ...,
    *,
    with_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def token_log_probs(
    context: SequenceContext,
    model: nn.Module,
    batch: Mapping[str, Any],
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns log p(target) of this rank's tokens, (batch, local) float32, with gradients; 0 without a target.

    `with_entropy` also returns the entropy of each predicted distribution in nats, of the same shape, with gradients.

    `batch` comes from `shard_batch`, with labels: the value of a token belongs to the token after it. Logits are
    divided by `temperature`, and never exist whole. `model` is the outermost module, as wrapped by PEFT and FSDP2;
    inside PEFT's `disable_adapter` the base model answers. A loss that is a sum over this rank's values is its share:
    losses and gradients are summed over ranks. For any other loss see `sequence_sums`.

    If the LM head is more than a linear, by an adapter or a hook for example, or the model changes its logits in an
    unknown way, then the logits of this rank's tokens exist whole, and a warning says why.

    Raises ValueError for a model that is not enabled with this context.
    """
    inner, labels = transformers_model(model), shifted_labels(batch)
    check_context(context, inner)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; give a number above 0")
    with _log_probs_for_logits(inner, labels, temperature, with_entropy):
        values = values_of_tokens(model, batch)
    return (values[..., 0], values[..., 1]) if with_entropy else values


def check_context(context: SequenceContext, model: PreTrainedModel) -> None:
    """Raises ValueError unless a model is enabled with a context."""
    if (record := record_of(model)) is None or record.context is not context:
        raise ValueError(f"{type(model).__name__} is not enabled with this context; pass the context of its hf.enable")


def values_of_tokens(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Runs the model and returns the values that replace its logits. Raises ValueError if they are rounded."""
    output = model(**without_labels(batch))  # the whole model, because FSDP2 gathers the head's weight in its hooks
    values: Tensor = output[0] if isinstance(output, tuple) else output.logits
    if _is_rounded(values):
        raise ValueError(f"the model's output is cast to {values.dtype}; set output_dtype of FSDP2 to float32")
    return values


def sequence_sums(context: SequenceContext, values: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Returns the sums of per-token values over the targets of whole sequences: (batch,), or (documents,) if packed.

    A batch of `shard_rows` has a sum for each row: (rows,).

    The sums are the same on every rank. Every rank must compute the same loss and call `backward`; parameter gradients,
    summed over ranks, then count the loss once, as on one process. Do not sum this loss over ranks. A rank may add its
    share of a loss that is a sum over tokens; only such shares are summed for display. `values` are (batch, local),
    such as log-probabilities, or ones to count targets.
    """
    own = sums.sum_of_targets(values, shifted_labels(batch), batch.get("documents"), context.rank)
    return sum_over_ranks(context, own)


def gather_tokens(
    context: SequenceContext, values: Tensor, batch: Mapping[str, Any], gradient_factor: float = 1.0
) -> Tensor:
    """Returns per-token values (batch, local, ...) of all ranks in the order of the whole batch (batch, length, ...).

    The log-probability at position t belongs to token t + 1. Every rank gets the same tensor. A loss computed from it
    has the contract of `sequence_sums`: the same whole loss on every rank, not summed over ranks. `sum_over_ranks`
    explains `gradient_factor`.
    """
    whole = gather_padded_tokens(context, values, batch, gradient_factor)
    return whole[:, : int(batch[BATCH_FACTS][LENGTH])]  # on GPUs the host waits for the length


def gather_padded_tokens(
    context: SequenceContext, values: Tensor, batch: Mapping[str, Any], gradient_factor: float = 1.0
) -> Tensor:
    """Does the same as `gather_tokens`, but includes the padding and does not wait for the device."""
    documents = batch.get("documents")
    layout = context.layout if documents is None else documents.layout
    padded = values.shape[1] * layout.world
    positions = layout.positions_on(values.device, context.rank, padded)
    whole = values.new_zeros(len(values), padded, *values.shape[2:]).index_copy(1, positions, values)
    return sum_over_ranks(context, whole, gradient_factor)


def sum_over_ranks(context: SequenceContext, x: Tensor, gradient_factor: float = 1.0) -> Tensor:
    """Returns the sum of a tensor over the ranks that share a sequence, for a loss that all of them compute.

    Parameter gradients, summed over ranks, count the loss once, as on one process, also in DDP and FSDP2, for which the
    model scales its gradients. Where something else averages gradients over ranks, pass the ranks of the sequence as
    `gradient_factor`, which multiplies the gradient.
    """
    if gradient_factor != 1 and context.forward_pass.gradient_factor != 1:
        raise ValueError(
            f"gradient_factor={gradient_factor} would scale gradients twice, because the model is in DDP or FSDP2 and "
            "scales them itself; leave it out"
        )
    return sums.sum_over_ranks(context.group, x, gradient_factor)


def _is_rounded(values: Tensor) -> bool:
    return torch.finfo(values.dtype).bits < 32


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the inputs of a model that computes no loss."""
    return {key: x for key, x in batch.items() if key not in ("labels", "shift_labels", "num_items_in_batch")}


def shifted_labels(batch: Mapping[str, Any]) -> Tensor:
    """Returns the labels of this rank's tokens. Raises ValueError if the batch has none."""
    labels = batch.get("shift_labels")
    if not isinstance(labels, Tensor):
        raise ValueError("the batch has no shift_labels; pass labels to shard_batch, and all that it returns on")
    return labels


@contextmanager
def _log_probs_for_logits(
    model: PreTrainedModel, labels: Tensor, temperature: float, with_entropy: bool
) -> Iterator[None]:
    """Makes the model's head return the labels' log-probabilities instead of logits.

    With entropies, the two are stacked in the last dimension. If the head is more than a linear and a known function,
    the model computes its logits, and they are converted.
    """
    if (transform := known_logit_transform(model)) is not None:

        def log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if with_entropy:
                metrics = token_metrics(hidden, weight, labels, transform.with_temperature(temperature), bias)
                return torch.stack([metrics.log_probs, metrics.entropy], -1)
            return loss.token_log_probs(hidden, weight, labels, temperature=temperature, transform=transform, bias=bias)

        with computing_in_head(model, log_probs):
            yield
        return
    change = head_change(model) or f"{type(model).__name__} makes its logits in an unknown way"
    warnings.warn(f"{change}, so the logits of a rank's tokens exist whole", stacklevel=5)

    def return_log_probs(_model: nn.Module, _args: tuple, output: Any) -> Any:
        logits = output[0] if isinstance(output, tuple) else output.logits
        log_probs = loss.log_probs_of_logits(logits, labels, temperature)
        if with_entropy:
            log_probs = torch.stack([log_probs, entropy_of_logits(logits, labels, temperature)], -1)
        return _with_logits(output, log_probs)

    hook = model.register_forward_hook(return_log_probs)  # after the user's hooks, which may change the logits
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def computing_in_head(
    model: PreTrainedModel, compute: Callable[[Tensor, Tensor, Tensor | None], Tensor]
) -> Iterator[None]:
    """Makes the model's linear head return `compute(hidden, weight, bias)` instead of logits."""
    replaced = ReplacedHead(model.get_output_embeddings(), compute)
    hook = model.register_forward_hook(  # before FSDP's, which may cast the output
        lambda _model, _args, output: _with_logits(output, replaced.result()), prepend=True
    )
    try:
        yield
    finally:
        hook.remove()
        replaced.restore()


def _with_logits(output: Any, logits: Tensor) -> Any:
    """Returns a model's output with other logits."""
    if isinstance(output, tuple):
        return (logits, *output[1:])
    output.logits = logits
    return output
