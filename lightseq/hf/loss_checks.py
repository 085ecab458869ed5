"""Checks of the labels and the loss of an enabled model, whose loss is a share of the whole batch's."""

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from lightseq.attention.context import SequenceContext
from lightseq.models.decoder import transformers_model
from lightseq.parts.head import tensor_version
from lightseq.parts.loss import log_probs_of_logits


@torch.compiler.disable
def check_labels(context: SequenceContext, model: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for labels that the model would shift inside a shard. Prepares the loss function's check."""
    state = context.forward_pass
    if state.outermost is not model:  # the wrapper around the model was checked
        return
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    if labels is not None and shifted is None:
        raise ValueError("labels without shift_labels would lose targets at the shard's border; use shard_batch")
    if labels is None and shifted is not None:
        raise ValueError(
            "shift_labels without labels: Trainer's label_smoothing_factor and compute_loss_func would shift labels "
            "a second time; leave them out. For your own loss, remove shift_labels from the batch before the model call"
        )
    state.loss, state.router_losses = None, 0
    inner = transformers_model(model)
    if not _is_checked(inner.loss_function):  # new, or replaced by the user
        inner.loss_function = partial(_sharded_loss, context, type(inner).__name__, inner.loss_function)


def _sharded_loss(
    context: SequenceContext, model_name: str, loss_function: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Calls the model's loss function. Raises ValueError without shifted labels or the whole batch's divisor."""
    for name in ("shift_labels", "num_items_in_batch"):
        if kwargs.get(name) is None:
            raise ValueError(
                f"the loss of a shard needs {name}, which {model_name} did not get or does not pass to its "
                "loss; pass all that shard_batch returns, or use another model"
            )
    weights = context.forward_pass.loss_weights
    if weights is None:
        loss = loss_function(*args, **kwargs)
    else:
        loss = _weighted_loss(weights, loss_function, *args, **kwargs)
    _record_loss(context, loss)
    return loss


def _weighted_loss(weights: Tensor, loss_function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Computes the weighted loss of `hf.shard_rows` instead of the mean. Raises ValueError for unusual losses."""
    if unwrap(loss_function) is not ForCausalLMLoss:
        raise ValueError(f"hf.shard_rows needs the loss ForCausalLMLoss, not {loss_function}; use hf.token_log_probs")
    logits = kwargs["logits"] if "logits" in kwargs else args[0]
    log_probs = log_probs_of_logits(logits, kwargs["shift_labels"])
    return -(weights.to(log_probs.dtype) * log_probs).sum() / kwargs["num_items_in_batch"]


@torch.compiler.disable
def _record_loss(context: SequenceContext, loss: Tensor) -> None:
    context.forward_pass.loss = (loss, tensor_version(loss))


@torch.compiler.disable
def check_loss(context: SequenceContext, model: nn.Module, _args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Raises ValueError unless a loss is the loss function's result, with or without the router loss."""
    state = context.forward_pass
    if state.outermost is not model:
        return
    noted, state.loss = state.loss, None
    if kwargs.get("labels") is None:
        return
    returned = output[0] if isinstance(output, tuple) else output.loss
    if noted is None and has_fused_loss(model):
        if state.loss_weights is not None:
            raise ValueError("Liger's fused loss takes no weights; pass fused_linear_cross_entropy=False to Liger")
        return  # the fused loss takes shift_labels and num_items_in_batch itself
    # Models add the share of the router loss in place.
    if noted is None or returned is not noted[0] or tensor_version(returned) - noted[1] not in (0, state.router_losses):
        raise ValueError(
            f"{type(model).__name__} returns a loss that is not its loss function's result, such as one with a penalty "
            "added; turn that term off, or use another model"
        )


def has_fused_loss(model: nn.Module) -> bool:
    """Returns whether Liger replaced the forward pass with one that computes the loss without logits."""
    return unwrap(transformers_model(model).forward).__module__.startswith("liger_kernel")


def loss_function_of(model: PreTrainedModel) -> Callable[..., Tensor]:
    """Returns the model's own loss function, without the checks around it."""
    function: Any = model.loss_function
    own: Callable[..., Tensor] = function.args[-1] if _is_checked(function) else function
    return own


def restore_loss_function(model: PreTrainedModel) -> None:
    """Gives a model its own loss function, without the checks around it."""
    before = loss_function_of(model)
    if model.loss_function is not before:
        del model._loss_function
        if model.loss_function is not before:  # not the default of the model's class
            model.loss_function = before


def _is_checked(loss_function: Any) -> bool:
    return getattr(loss_function, "func", None) is _sharded_loss
