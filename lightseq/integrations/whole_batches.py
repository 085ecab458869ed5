"""Whole batches in, whole results out: hooks with which a model over several ranks looks like a model on one.

Trainers compute losses, metrics and token counts of whole batches. With these hooks, every rank of a sequence group
passes the same batch, computes its share of the tokens, and gets the loss or per-token values of the whole batch.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.mixtral import modeling_mixtral
from transformers.utils import ModelOutput

from lightseq.architecture.inspection import configured_logit_transform
from lightseq.attention.context import SequenceContext
from lightseq.hf.agreement import announce_pass
from lightseq.hf.loss_checks import has_fused_loss, loss_function_of
from lightseq.hf.router_losses import share_router_loss
from lightseq.integrations.lazy_logits import with_lazy_logits, without
from lightseq.integrations.pass_head import PassHead, check_trl_head, check_trl_reads_all
from lightseq.integrations.split_inputs import SplitInputs, split_inputs
from lightseq.integrations.split_model import SplitModel, TrainerBatches
from lightseq.integrations.trl_head import CHUNKED_SUMS, has_chunked_head, trl_head_of
from lightseq.models.decoder import text_config
from lightseq.parts.changes import Changes
from lightseq.parts.head import ReplacedHead, head_change, known_logit_transform
from lightseq.parts.router_replay import ROUTED_EXPERTS
from lightseq.parts.token_metrics import TokenMetrics
from lightseq.utils.tensors import IGNORE_INDEX

PER_TOKEN = (
    "log_probs",
    "entropy",
    "log_sum_sq_probs",
    "mean_logits",
    "is_top1",
    "label_mask",
)  # outputs that TRL reads


@dataclass
class _Pass:
    """State that the hooks of one forward pass share."""

    inputs: SplitInputs
    changes: Changes  # what this pass changes in the model
    head: PassHead | None = None  # computes the loss, or TRL's token metrics, in this pass
    replaced: ReplacedHead | None = None  # the model's head, which calls it
    is_chunked: bool = False  # TRL's `loss_type="chunked_nll"` computes the loss


@dataclass
class TokenOutput(ModelOutput):
    """Results of the whole batch that TRL's trainers read, as from TRL's own fused head."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


class WholeBatches(SplitModel):
    """The hooks of one enabled model with an LM head.

    They replace the model's outputs: `loss` covers the whole batch, and per-token values of TRL's fused head, like
    logits, are in the order of the whole batch. With labels the loss is computed in chunks, and logits exist only
    if they are read, which every rank must do. Gradients are right where the reduction over all ranks averages them, as
    DDP and FSDP do: gradients of a rank's tokens are multiplied by the ranks of its group.
    """

    def __init__(self, model: nn.Module, context: SequenceContext) -> None:
        super().__init__(model, context)
        self._outermost = model  # without the wrappers of DDP and FSDP
        self._unread: Callable[[], Tensor] | None = None  # gathers this pass's logits
        self._is_inside = False  # the outermost module's forward pass runs
        self._ending: RemovableHandle | None = None  # hook of the outermost module that ran last
        self._batches = TrainerBatches()
        self._configured_logit_transform = configured_logit_transform(self.model.config)  # None: not a known model
        self._pass: _Pass | None = None
        for hook in (
            self.model.register_forward_pre_hook(self._shard, with_kwargs=True, prepend=True),
            self.model.register_forward_pre_hook(self._pass_labels_to_trl, with_kwargs=True),
            self.model.register_forward_hook(self._gather, with_kwargs=True, always_call=True),
        ):
            self._changes.add_hook(hook)
        self._changes.call_later(self._stop_ending)
        self.watch(model)

    def configure(self, batches: TrainerBatches) -> None:
        """Sets the properties of a trainer's batches and loss."""
        self._batches = batches

    @property
    def shares_prefixes(self) -> bool:
        return self._batches.shares_prefixes

    def watch(self, outermost: nn.Module) -> None:
        """Adds logits to outputs of a module around the model, such as DDP; outputs inside it have none.

        Wrappers look at all tensors of an output, which would gather the logits of every pass.
        """
        self._changes.add_hook(outermost.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True))

    # ---- before the model --------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _shard(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Replaces a whole batch by this rank's shard."""
        if len(args) > 1:
            raise ValueError(f"{len(args)} positional arguments; pass all but the first by keyword")
        kwargs = {**({"input_ids": args[0]} if args else {}), **kwargs}
        reads_tokens = bool(kwargs.get("fused_lm_head"))  # and not logits
        packs_rows = self._batches.packs_rows and reads_tokens
        if packs_rows and (routes := self.next_routes(len(kwargs["input_ids"]))) is not None:
            kwargs[ROUTED_EXPERTS] = routes
        local = split_inputs(
            self.context,
            self.model.config,
            kwargs,
            pad_to=self._batches.pad_to,
            keeps_targets=self._batches.keeps_targets,
            packs_rows=packs_rows,
            shares_prefixes=self._batches.shares_prefixes and reads_tokens,
        )
        self._pass = this = _Pass(local, Changes())
        inputs = {**local.options, **local.batch}
        if local.labels is None:
            return (), inputs
        if inputs.get("fused_lm_head"):
            check_trl_reads_all(self.model, self._configured_logit_transform)
            share_router_loss(vars(modeling_mixtral))  # TRL's fused head calls Mixtral's function
            asked = trl_head_of(self.model)
            head = (
                self._pass_head(local.labels, asked.temperature)
                if self._batches.own_head and asked is not None
                else None
            )
            if head is not None:
                del inputs["fused_lm_head"]
                self._replace_head(
                    this, head, partial(head.token_log_probs, equal_factors=self._batches.weighs_tokens_equally)
                )
            return (), inputs
        if has_chunked_head(self.model):
            check_trl_reads_all(self.model, self._configured_logit_transform)
            this.is_chunked = True
            return (), inputs
        usual = loss_function_of(self.model) is ForCausalLMLoss and not has_fused_loss(self.model)
        if usual and (head := self._pass_head(local.labels)) is not None:
            self._replace_head(this, head, head.loss_sum)
            if not local.has_router_loss:
                return (), inputs
            self._replace_loss_function(this)  # the model adds its router loss to the result
        labels = {"labels": local.labels, "shift_labels": local.labels, "num_items_in_batch": local.nonzero_divisor}
        return (), inputs | labels

    def _pass_head(self, labels: Tensor, temperature: float = 1.0) -> PassHead | None:
        """Returns the head that computes the loss of this pass in place of the logits; None if the model needs them."""
        if self._configured_logit_transform is None:
            return None
        transform = known_logit_transform(self.model)
        if transform is not None:
            return PassHead(self.model, transform.with_temperature(temperature), labels)
        if (change := head_change(self.model)) and self.context.rank == 0:
            warnings.warn(f"{change}, so the logits of a rank's tokens exist whole", stacklevel=2)
        return None

    def _replace_head(self, this: _Pass, head: PassHead, compute: Callable[..., Tensor]) -> None:
        this.head, this.replaced = head, ReplacedHead(self.model.get_output_embeddings(), compute)
        this.changes.call_later(this.replaced.restore)

    def _replace_loss_function(self, this: _Pass) -> None:
        """Makes the model's loss function return this rank's share of the loss, which the head computes."""

        def share(*_args: Any, **_kwargs: Any) -> Tensor:
            assert this.replaced is not None and this.inputs.nonzero_divisor is not None
            return this.replaced.result() / this.inputs.nonzero_divisor

        this.changes.restore_later(self.model, "_loss_function")
        self.model.loss_function = share

    @torch.compiler.disable
    def _pass_labels_to_trl(
        self, _model: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Gives TRL's head the shifted labels, after the checks, which know only a model's own loss."""
        assert self._pass is not None
        if not kwargs.get("fused_lm_head") and not self._pass.is_chunked:
            return None
        local = self._pass.inputs
        if local.labels is None:
            raise ValueError("TRL's fused head needs labels")
        return args, kwargs | {"shift_labels": local.labels, "num_items_in_batch": local.nonzero_divisor}

    # ---- after the model ---------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _gather(self, _model: nn.Module, _args: tuple, _kwargs: dict[str, Any], output: Any) -> Any:
        """Replaces a shard's results by the whole batch's. After an exception, `output` is None."""
        this, self._pass = self._pass, None
        if this is None:
            return output
        inputs, head, replaced = this.inputs, this.head, this.replaced
        this.changes.undo()
        if output is None:
            return None
        output = self._with_router_loss(output)
        if getattr(output, "log_probs", None) is not None:
            return self._gather_per_token(output, inputs)
        if this.is_chunked:
            return self._sum_chunked(output, inputs)
        if head is not None and replaced is not None:
            if head.metrics is not None:
                return self._gather_metrics(replaced.result(), head.metrics, output, inputs)
            assert inputs.nonzero_divisor is not None
            share = output.loss if inputs.has_router_loss else replaced.result() / inputs.nonzero_divisor
            return self._with_logits_later(output, self._loss(share, inputs), partial(self._logits, head, inputs))
        if inputs.labels is None:
            output.logits = self._in_order(output.logits, inputs)
            return output
        loss = self._loss(output.loss, inputs)
        if output.logits is None:
            output.loss = loss
            return output
        return self._with_logits_later(output, loss, partial(self._in_order, output.logits, inputs))

    def _with_router_loss(self, output: ModelOutput) -> ModelOutput:
        """Returns an output with the router loss of the whole batch, without logits of the routers."""
        if isinstance(share := getattr(output, "aux_loss", None), Tensor):
            output.aux_loss = self.sum(share)
        return output if getattr(output, "router_logits", None) is None else without(output, "router_logits")

    def _with_logits_later(self, output: ModelOutput, loss: Tensor, gather: Callable[[], Tensor]) -> ModelOutput:
        output = without(output, "logits")
        output.loss = loss
        if not self._is_inside:  # a module inside the outermost one was called
            return with_lazy_logits(output, gather)
        self._unread = gather
        return output

    @torch.compiler.disable
    def _begin(self, outermost: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_inside:
            return
        self._is_inside = True
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.ndim == 2:  # before DDP communicates
            announce_pass(self.context, (ids.shape[0], ids.shape[1]), outermost.training)
        self._stop_ending()  # registered anew in every pass, so that it runs after hooks that wrappers added
        self._ending = outermost.register_forward_hook(self._end, always_call=True)

    def _stop_ending(self) -> None:
        if self._ending is not None:
            self._ending.remove()

    @torch.compiler.disable
    def _end(self, _outermost: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        gather, self._unread, self._is_inside = self._unread, None, False
        self.context.forward_pass.announced = False
        return output if gather is None or not isinstance(output, ModelOutput) else with_lazy_logits(output, gather)

    def _logits(self, head: PassHead, inputs: SplitInputs) -> Tensor:
        """Computes logits of the whole batch."""
        assert self.context.forward_pass.roll_call is not None
        self.context.forward_pass.roll_call.make("reads logits", is_training_step=False)
        return self._in_order(head.logits(self._outermost), inputs)

    def _gather_per_token(self, output: Any, inputs: SplitInputs) -> Any:
        """Returns the output of TRL's fused head with the values of the whole batch."""
        check_trl_head(self.model)
        for name in PER_TOKEN:  # one by one, so that values which no loss reads get no gradient
            local = getattr(output, name, None)
            if local is None:
                continue
            whole = self._in_order(local.float(), inputs).to(local.dtype)
            setattr(output, name, whole[:, :-1] if inputs.shifted_here else whole)  # nothing follows the last token
        if output.loss is not None:
            output.loss = self.sum(output.loss)
        return output

    def _gather_metrics(
        self, log_probs: Tensor, metrics: TokenMetrics, output: Any, inputs: SplitInputs
    ) -> TokenOutput:
        """Returns the outputs of TRL's fused head, from token metrics (batch, local) of this rank."""
        assert inputs.labels is not None and inputs.nonzero_divisor is not None
        mask = (inputs.labels != IGNORE_INDEX).to(log_probs.dtype)
        # Separate outputs, so that entropies get no gradient if no loss reads them.
        values = self._in_order(torch.stack([log_probs, metrics.hits, mask], -1), inputs)
        entropy = self._in_order(metrics.entropy, inputs)
        if inputs.shifted_here:  # nothing follows the last token
            values, entropy = values[:, :-1], entropy[:, :-1]
        log_probs, (hits, mask) = values[..., 0], values[..., 1:].detach().unbind(-1)
        loss = -log_probs.sum() / inputs.nonzero_divisor
        if (router_loss := getattr(output, "aux_loss", None)) is not None:
            loss = loss + getattr(text_config(self.model.config), "router_aux_loss_coef", 0.0) * router_loss
        return TokenOutput(loss, log_probs, entropy, hits.bool(), mask.bool(), router_loss)

    def _sum_chunked(self, output: Any, inputs: SplitInputs) -> Any:
        """Returns the output of TRL's `loss_type="chunked_nll"` with the loss and the counts of the whole batch."""
        check_trl_head(self.model)
        output.loss = self._loss(output.loss, inputs)
        counts = torch.stack([getattr(output, name).detach().double() for name in CHUNKED_SUMS])
        for name, count in zip(CHUNKED_SUMS, self.sum(counts), strict=True):
            setattr(output, name, count)
        return output

    def _loss(self, share: Tensor, inputs: SplitInputs) -> Tensor:
        """Returns the loss of the whole batch.

        Without a target, gradients are zero. The loss then is NaN, as on one process, if the caller counted the targets
        (`num_items_in_batch`), else 0.
        """
        loss = self.sum(share)
        return loss if inputs.divisor is None else loss.masked_fill(inputs.divisor == 0, torch.nan)
