"""Whole batches in, whole results out: hooks with which a model over several ranks looks like a model on one.

Trainers compute losses, metrics and token counts of whole batches. With these hooks, every rank of a sequence group
passes the same batch, computes its share of the tokens, and gets the loss or per-token values of the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from lightseq import hf
from lightseq.attention.context import SequenceContext
from lightseq.data.input_checks import has_fused_loss, loss_function_of, transformers_model
from lightseq.models.architecture import inspect_architecture
from lightseq.modules.loss import cross_entropy_sum

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")  # of TRL's outputs
# What collators of packed documents add; `cu_seq_lens_q` has all that is needed.
PACKING = ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
REFUSED = {
    "inputs_embeds": "pass input_ids",
    "output_hidden_states": "each rank has only those of its tokens",
    "logits_to_keep": "a rank cannot tell which of its logits these are",
}


@dataclass
class _Pass:
    """What the hooks of one forward pass tell each other."""

    batch: dict[str, Any]
    labels: Tensor | None  # of this rank, shifted
    divisor: Tensor | None  # of the loss
    shifted_here: bool  # then per-token values have none for the last token, as in TRL
    head_forward: Callable[..., Tensor] | None = None  # replaced for this pass


class WholeBatches:
    """The hooks of one enabled model.

    Outputs replace those of the model: `loss` is that of the whole batch, per-token values of TRL's fused head are in
    the order of the whole batch, and logits are whole if there are no labels, as a custom loss needs them, or if
    `keep_logits` is set; otherwise logits never exist, because the loss is computed in chunks. Gradients are right
    where the reduction over all ranks averages them, as DDP and FSDP do: those of a rank's tokens are multiplied by the
    ranks of its group.
    """

    def __init__(self, model: nn.Module, context: SequenceContext) -> None:
        self.model, self.context = transformers_model(model), context
        self.keep_logits = False
        self._ranks = context.layout.world
        self._plain_logits = _has_plain_logits(self.model)
        self._pass: _Pass | None = None
        self._hooks = [
            self.model.register_forward_pre_hook(self._shard, with_kwargs=True, prepend=True),
            self.model.register_forward_pre_hook(self._pass_labels_to_trl, with_kwargs=True),
            self.model.register_forward_hook(self._gather, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # ---- before the model --------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _shard(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Replaces a whole batch by this rank's shard."""
        kwargs = dict(zip(("input_ids",), args, strict=False)) | kwargs
        for name, reason in REFUSED.items():
            if kwargs.get(name) is not None and kwargs[name] is not False and not _is_zero(kwargs[name]):
                raise ValueError(f"{name} is not supported over several ranks: {reason}")
        for name in PACKING:
            kwargs.pop(name, None)
        labels, shift_labels = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        batch = hf.shard_batch(
            self.context,
            kwargs.pop("input_ids"),
            labels,
            kwargs.pop("attention_mask", None),
            kwargs.pop("cu_seq_lens_q", None),
            kwargs.pop("position_ids", None),
            shift_labels=shift_labels,
        )
        local = batch.pop("shift_labels", None)
        batch.pop("labels", None)
        given, counted = kwargs.pop("num_items_in_batch", None), batch.pop("num_items_in_batch", None)
        divisor = counted if given is None else torch.as_tensor(given, device=batch["input_ids"].device)
        self._pass = _Pass(batch, local, divisor, shift_labels is None)
        inputs = {**kwargs, **batch}
        if local is None or kwargs.get("fused_lm_head"):
            return (), inputs
        if self._loss_in_chunks():
            head: Any = self.model.get_output_embeddings()
            self._pass.head_forward = head.forward
            head.forward = partial(_loss_of_head, head, local)
            return (), inputs
        return (), inputs | {"labels": local, "shift_labels": local, "num_items_in_batch": _at_least_one(divisor)}

    def _loss_in_chunks(self) -> bool:
        """Returns whether the loss is the usual one of a plain head, and nobody reads the logits."""
        head = self.model.get_output_embeddings()
        usual = loss_function_of(self.model) is ForCausalLMLoss
        plain = isinstance(head, nn.Linear) and head.bias is None and self._plain_logits
        return usual and plain and not self.keep_logits and not has_fused_loss(self.model)

    @torch.compiler.disable
    def _pass_labels_to_trl(
        self, _model: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Gives TRL's fused head the shifted labels, after the checks, which know only a model's own loss."""
        if not kwargs.get("fused_lm_head"):
            return None
        assert self._pass is not None
        if self._pass.labels is None:
            raise ValueError("TRL's fused head needs labels")
        return args, kwargs | {
            "shift_labels": self._pass.labels,
            "num_items_in_batch": _at_least_one(self._pass.divisor),
        }

    # ---- after the model ---------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _gather(self, _model: nn.Module, _args: tuple, _kwargs: dict[str, Any], output: Any) -> Any:
        """Replaces the results of a shard by those of the whole batch. After an exception, `output` is None."""
        this, self._pass = self._pass, None
        if this is None:
            return output
        if this.head_forward is not None:
            head: Any = self.model.get_output_embeddings()
            head.forward = this.head_forward
        if output is None:
            return None
        if getattr(output, "log_probs", None) is not None:
            return self._gather_per_token(output, this)
        if this.head_forward is not None:
            output.loss, output.logits = self._loss(output.logits / _at_least_one(this.divisor), this), None
            return output
        if this.labels is not None:
            output.loss = self._loss(output.loss, this)
        if this.labels is None or self.keep_logits:
            output.logits = self._in_order(output.logits, this)
        else:
            output.logits = None
        return output

    def _gather_per_token(self, output: Any, this: _Pass) -> Any:
        names = [name for name in PER_TOKEN if getattr(output, name, None) is not None]
        local = torch.stack([getattr(output, name).float() for name in names], dim=-1)
        whole = self._in_order(local, this)
        if this.shifted_here:
            whole = whole[:, :-1]
        for name, values in zip(names, whole.unbind(-1), strict=True):
            dtype = getattr(output, name).dtype
            setattr(output, name, values.bool() if dtype is torch.bool else values)
        if output.loss is not None:
            output.loss = self._sum(output.loss)
        return output

    def _in_order(self, values: Tensor, this: _Pass) -> Tensor:
        return hf.gather_tokens(self.context, values, this.batch, gradient_factor=self._ranks)

    def _loss(self, share: Tensor, this: _Pass) -> Tensor:
        """Returns the loss of the whole batch. Without a target it is NaN, as on one process, with zero gradients."""
        loss = self._sum(share)
        return loss if this.divisor is None else loss.masked_fill(this.divisor == 0, torch.nan)

    def _sum(self, share: Tensor) -> Tensor:
        return hf.sum_over_ranks(self.context, share, gradient_factor=self._ranks)


def _has_plain_logits(model: PreTrainedModel) -> bool:
    """Returns whether the logits are the head's product, neither scaled nor capped, as far as the model is known."""
    try:
        inspect_architecture(model.config)
    except ValueError:
        return False
    return True


def _loss_of_head(head: nn.Linear, labels: Tensor, hidden: Tensor) -> Tensor:
    return cross_entropy_sum(hidden, head.weight, labels)


def _at_least_one(divisor: Tensor | None) -> Tensor | None:
    """Returns a divisor that leaves gradients finite where there is nothing to divide."""
    return None if divisor is None else divisor.clamp_min(1)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0
