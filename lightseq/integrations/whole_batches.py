"""Whole batches in, whole results out: hooks with which a model over several ranks looks like a model on one.

Trainers compute losses, metrics and token counts of whole batches. With these hooks, every rank of a sequence group
passes the same batch, computes its share of the tokens, and gets the loss or per-token values of the whole batch.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.mixtral import modeling_mixtral
from transformers.utils import ModelOutput

from lightseq import hf
from lightseq.architecture.inspection import configured_logit_transform
from lightseq.attention.context import SequenceContext
from lightseq.hf.agreement import BATCH_FACTS, COUNTED_TOKENS, add_to_checksum, announce_pass
from lightseq.hf.image_inputs import IMAGE_INPUTS, TOKEN_TYPES
from lightseq.hf.loss_checks import has_fused_loss, loss_function_of
from lightseq.hf.record import record_of
from lightseq.hf.router_losses import share_router_loss
from lightseq.hf.shard_batch import check_right_padding, continued_positions, counted_tokens
from lightseq.integrations.lazy_logits import with_lazy_logits, without
from lightseq.memory.remat import apply_remat
from lightseq.models.decoder import decoder_layers, text_config, transformers_model
from lightseq.parts.changes import Changes
from lightseq.parts.compilation import allow_graphs_per_length
from lightseq.parts.head import ReplacedHead, head_change, known_logit_transform, tensor_version
from lightseq.parts.identity import is_known_code, product_change
from lightseq.parts.loss import TokenMetrics, cross_entropy_sum, token_metrics
from lightseq.parts.router_loss import asks_for_router_logits
from lightseq.utils.logit_transform import LogitTransform
from lightseq.utils.tensors import IGNORE_INDEX

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")  # of TRL's outputs
PER_BATCH = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", *IMAGE_INPUTS)
# What collators of packed documents add; `cu_seq_lens_q` has all that is needed.
PACKING = ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
REFUSED = {
    "past_key_values": "to generate, call lightseq.integrations.accelerate.disable(model) first",
    "use_cache": "to generate, call lightseq.integrations.accelerate.disable(model) first",
    "inputs_embeds": "pass input_ids",
    "output_hidden_states": "each rank has hidden states of its own tokens only",
    "logits_to_keep": "it counts from the end of the whole sequence; slice the gathered logits",
}
WHOLE_BATCHES = "whole_batches"  # attribute of the transformers model
CONFIGURED = ("output_hidden_states",)  # refused in the model's config, too


@dataclass(frozen=True)
class HeadInput:
    """Input of an LM head whose logits may be wanted later, and the state in which the head got it."""

    hidden: Tensor
    weight: nn.Parameter
    weight_version: int
    autocast_dtype: torch.dtype | None  # None without autocast


@dataclass
class _Pass:
    """State that the hooks of one forward pass share."""

    batch: dict[str, Any]
    labels: Tensor | None  # of this rank, shifted
    divisor: Tensor | None  # of the loss: the number of valid tokens
    shifted_here: bool  # from labels, as TRL does; per-token values then end one token earlier
    length: int  # of the batch, before padding
    head: ReplacedHead | None = None  # computes the loss, or TRL's token metrics, in this pass
    metrics: TokenMetrics | None = None  # those that the head computed
    head_input: HeadInput | None = None  # of the head that computed the loss
    # The model's own `_loss_function`, if any, where another returns the loss that the head computed.
    loss_function: tuple[Any, ...] | None = None


@dataclass
class TokenOutput(ModelOutput):
    """Results of the whole batch that TRL's SFTTrainer reads, as from its own fused head."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


class WholeBatches:
    """The hooks of one enabled model.

    They replace the model's outputs: `loss` covers the whole batch, and per-token values of TRL's fused head, like
    logits, are in the order of the whole batch. With labels the loss is computed in chunks, and logits exist only
    if they are read, which every rank must do. Gradients are right where the reduction over all ranks averages them, as
    DDP and FSDP do: gradients of a rank's tokens are multiplied by the ranks of its group.
    """

    def __init__(self, model: nn.Module, context: SequenceContext) -> None:
        self.model, self.context = transformers_model(model), context
        context.forward_pass.gradients_are_averaged_outside = True  # DDP's average is scaled here, not by the checks
        self._outermost = model  # without the wrappers of DDP and FSDP
        self._unread: Callable[[], Tensor] | None = None  # gathers this pass's logits
        self._is_inside = False  # the outermost module's forward pass runs
        self._ending: RemovableHandle | None = None  # hook of the outermost module that ran last
        self._replaces_trl_head = self._weighs_tokens_equally = self._keeps_targets = False
        self._pad_to: int | None = None
        self._ranks = context.layout.world
        self._logit_transform: LogitTransform | None = None  # of the model in the latest pass
        self._configured_logit_transform = configured_logit_transform(self.model.config)  # None: not a known model
        self._layers_are_changed = False
        self._pass: _Pass | None = None
        self._changes = Changes()
        for hook in (
            self.model.register_forward_pre_hook(self._shard, with_kwargs=True, prepend=True),
            self.model.register_forward_pre_hook(self._pass_labels_to_trl, with_kwargs=True),
            self.model.register_forward_hook(self._gather, with_kwargs=True, always_call=True),
        ):
            self._changes.add_hook(hook)
        self._changes.call_later(self._stop_ending)
        self.watch(model)
        record = record_of(model)
        assert record is not None, "its context comes from hf.enable"
        record.changes.call_later(self.remove)

    def configure(self, *, pad_to: int | None, replaces_trl_head: bool, weighs_tokens_equally: bool) -> None:
        """Sets what a trainer knows of its batches and loss.

        `pad_to`: tokens of every packed row, so that compiled layers see one length. `replaces_trl_head`: computes the
        token metrics in place of TRL's fused head, as for SFTTrainer's loss. `weighs_tokens_equally`: that loss is the
        mean over all tokens (see `modules.loss.token_metrics`). The first token of a document stays a target of the
        document before it, because trainers count targets before they call the model.
        """
        self._pad_to, self._replaces_trl_head, self._keeps_targets = pad_to, replaces_trl_head, True
        self._weighs_tokens_equally = weighs_tokens_equally

    def watch(self, outermost: nn.Module) -> None:
        """Lets outputs of a module around the model, such as DDP's, have logits; inside it they have none.

        Wrappers look at all tensors of an output, which would gather the logits of every pass.
        """
        self._changes.add_hook(outermost.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True))

    def change_layers(self, recompute: bool, compile_each: bool) -> None:
        """Lets layers recompute all but attention, and compiles each. A second call changes nothing."""
        layers: Any = decoder_layers(self.model)
        if self._layers_are_changed:
            return
        self._layers_are_changed = True
        for layer in layers:
            self._changes.restore_later(layer, "forward")
        if recompute:
            apply_remat(layers, "attention", compile_each, has_dropout=True)
        if compile_each:
            allow_graphs_per_length()
            for layer in layers:
                layer.forward = torch.compile(layer.forward)

    def remove(self) -> None:
        """Removes the hooks, and restores the layers. Disabling the model does so, too."""
        self._changes.undo()

    # ---- before the model --------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _shard(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Replaces a whole batch by this rank's shard."""
        if len(args) > 1:
            raise ValueError(f"{len(args)} positional arguments; pass all but the first by keyword")
        kwargs = {**({"input_ids": args[0]} if args else {}), **kwargs}
        for name, reason in REFUSED.items():
            if _is_set(kwargs.pop(name, None)) or (name in CONFIGURED and getattr(self.model.config, name, False)):
                raise ValueError(f"{name} is not supported over several ranks: {reason}")
        returns_dict = kwargs.get("return_dict")
        if not (self.model.config.return_dict if returns_dict is None else returns_dict):
            raise ValueError("return_dict=False is not supported over several ranks: the loss is read by its name")
        has_documents = any(kwargs.get(name) is not None for name in ("cu_seq_lens_q", "position_ids"))
        if kwargs.get("seq_idx") is not None and not has_documents:
            raise ValueError("seq_idx alone does not tell where documents begin; let the collator add position_ids")
        for name in PACKING:
            kwargs.pop(name, None)
        whole = {name: kwargs.pop(name, None) for name in PER_BATCH}
        if whole["input_ids"] is None:
            raise ValueError("input_ids are missing; pass the whole batch")
        length, shifted_here = whole["input_ids"].shape[1], whole["shift_labels"] is None
        mask = whole["attention_mask"]
        labels = whole["labels"] if shifted_here else None
        numbers_documents = check_right_padding(mask, labels, whole["shift_labels"])
        edges = kwargs.pop("cu_seq_lens_q", None)
        if mask is not None and mask.shape == whole["input_ids"].shape and not numbers_documents:
            whole["attention_mask"] = None  # is right padding without labels; another check would wait for the device
            if edges is None:
                whole["position_ids"] = continued_positions(whole["position_ids"], mask)
        if self._pad_to is not None:
            whole, edges = _padded(whole, self._pad_to), _padded_edges(edges, length, self._pad_to)
        given = kwargs.pop("num_items_in_batch", None)
        if shifted_here and whole["labels"] is not None and (self._keeps_targets or given is not None):
            # Counted already, so targets at the starts of documents stay: shard_batch would remove them.
            labels = nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
            whole |= {"labels": None, "shift_labels": labels}
        batch = hf.shard_batch(self.context, cu_seqlens=edges, **whole)
        add_to_checksum(batch[BATCH_FACTS], {"attention_mask": mask})
        has_router_loss = asks_for_router_logits(self.model.config, kwargs)
        batch.pop(COUNTED_TOKENS, None)
        if has_router_loss and (counted := self._counted_tokens(whole["input_ids"], mask, length, batch)) is not None:
            batch[COUNTED_TOKENS] = counted
        local = batch.pop("shift_labels", None)
        batch.pop("labels", None)
        counted = batch.pop("num_items_in_batch", None)
        divisor = counted if given is None else torch.as_tensor(given, device=batch["input_ids"].device)
        self._pass = _Pass(batch, local, divisor, shifted_here, length)
        inputs = {**kwargs, **batch}
        if local is None:
            return (), inputs
        if kwargs.get("fused_lm_head"):
            self._check_trl_reads_all()
            share_router_loss(vars(modeling_mixtral))  # whose function TRL's fused head calls
            if self._replaces_trl_head and self._head_can_be_replaced():
                del inputs["fused_lm_head"]
                self._replace_head(self._pass, self._token_log_probs)
            return (), inputs
        usual = loss_function_of(self.model) is ForCausalLMLoss and not has_fused_loss(self.model)
        if usual and self._head_can_be_replaced():
            self._replace_head(self._pass, self._loss_sum)
            if not has_router_loss:
                return (), inputs
            self._replace_loss_function(self._pass)  # to whose result the model adds its router loss
        return (), inputs | {"labels": local, "shift_labels": local, "num_items_in_batch": _at_least_one(divisor)}

    def _counted_tokens(
        self, input_ids: Tensor, mask: Tensor | None, length: int, batch: dict[str, Any]
    ) -> Tensor | None:
        """Returns this rank's tokens that router losses count on one process; None if all do."""
        missing = input_ids.shape[1] - length
        if missing and mask is None:
            mask = torch.ones_like(input_ids[:, :length])
        padded = mask if mask is None else nn.functional.pad(mask, (0, missing))
        return counted_tokens(self.context.sequence, input_ids, padded, batch.get("documents"))

    def _replace_loss_function(self, this: _Pass) -> None:
        """Lets the model's loss function return this rank's share of the loss, which the head computes."""

        def share(*_args: Any, **_kwargs: Any) -> Tensor:
            assert this.head is not None and this.divisor is not None
            return this.head.result() / this.divisor.clamp_min(1)

        name = "_loss_function"
        this.loss_function = (vars(self.model)[name],) if name in vars(self.model) else ()
        self.model.loss_function = share

    def _restore_loss_function(self, this: _Pass) -> None:
        if this.loss_function is None:
            return
        del self.model._loss_function
        if this.loss_function:
            self.model.loss_function = this.loss_function[0]

    def _head_can_be_replaced(self) -> bool:
        """Returns whether the loss of this pass can be computed in place of the logits, by the model as it is now."""
        if self._configured_logit_transform is None:
            return False
        self._logit_transform = known_logit_transform(self.model)
        if self._logit_transform is None and (change := head_change(self.model)) and self.context.rank == 0:
            warnings.warn(f"{change}, so the logits of a rank's tokens exist whole", stacklevel=2)
        return self._logit_transform is not None

    def _check_trl_reads_all(self) -> None:
        """Raises ValueError for a model whose loss TRL's fused head computes only in part, on one process too.

        It reads the LM head's weights, and from the config the function that makes logits of their product.
        """
        name, head = type(self.model).__name__, self.model.get_output_embeddings()
        change = f"'s LM head {x}" if isinstance(head, nn.Linear) and (x := product_change(head)) else None
        if not is_known_code(self.model.forward) and is_known_code(type(self.model).forward):
            change = " has a forward of its own"
        found, of_config = known_logit_transform(self.model), self._configured_logit_transform
        if change is None and None not in (found, of_config) and found != of_config:
            change = f" makes logits with {found}, not with its config's {of_config}"
        if change is not None:
            raise ValueError(
                f"{name}{change}, which TRL's fused head leaves out; undo that, or use SequenceParallelTrainer"
            )

    def _replace_head(self, this: _Pass, compute: Callable[..., Tensor]) -> None:
        this.head = ReplacedHead(self.model.get_output_embeddings(), partial(compute, this))

    def _loss_sum(self, this: _Pass, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert this.labels is not None and self._logit_transform is not None
        head, device = self.model.get_output_embeddings(), hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        this.head_input = HeadInput(hidden, head.weight, tensor_version(head.weight), dtype)
        return cross_entropy_sum(hidden, weight, this.labels, transform=self._logit_transform, bias=bias)

    def _token_log_probs(self, this: _Pass, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert this.labels is not None and self._logit_transform is not None
        this.metrics = token_metrics(
            hidden, weight, this.labels, self._logit_transform, bias, equal_factors=self._weighs_tokens_equally
        )
        return this.metrics.log_probs

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
        """Replaces a shard's results by the whole batch's. After an exception, `output` is None."""
        this, self._pass = self._pass, None
        if this is None:
            return output
        head, this.head = this.head, None  # without a cycle of references, which would keep tensors
        if head is not None:
            head.restore()
        self._restore_loss_function(this)
        if output is None:
            return None
        output = self._with_router_loss(output)
        if getattr(output, "log_probs", None) is not None:
            return self._gather_per_token(output, this)
        if this.metrics is not None and head is not None:
            return self._gather_metrics(head.result(), this.metrics, output, this)
        if head is not None:
            assert this.divisor is not None and this.head_input is not None
            share = head.result() / this.divisor.clamp_min(1) if this.loss_function is None else output.loss
            loss = self._loss(share, this)
            return self._with_logits_later(output, loss, partial(self._logits, this.head_input, this))
        if this.labels is None:
            output.logits = self._in_order(output.logits, this)
            return output
        loss = self._loss(output.loss, this)
        if output.logits is None:
            output.loss = loss
            return output
        return self._with_logits_later(output, loss, partial(self._in_order, output.logits, this))

    def _with_router_loss(self, output: ModelOutput) -> ModelOutput:
        """Returns an output with the router loss of the whole batch, without logits of the routers."""
        if isinstance(share := getattr(output, "aux_loss", None), Tensor):
            output.aux_loss = self._sum(share)
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

    def _logits(self, given: HeadInput, this: _Pass) -> Tensor:
        """Computes logits of the whole batch from the input that the head had."""
        head, hidden = self.model.get_output_embeddings(), given.hidden
        assert self._logit_transform is not None and self.context.forward_pass.roll_call is not None
        self.context.forward_pass.roll_call.make("reads logits", is_training_step=False)
        with gathered_weight(self._outermost, head):
            if head.weight is given.weight and tensor_version(head.weight) != given.weight_version:
                raise ValueError("the weights have changed since these logits; read outputs.logits before the update")
            with torch.autocast(hidden.device.type, given.autocast_dtype, enabled=given.autocast_dtype is not None):
                local = self._logit_transform.logits(head.forward(hidden))  # without the hooks of FSDP2
        return self._in_order(local if given.autocast_dtype is None else local.float(), this)  # as accelerate does

    def _gather_per_token(self, output: Any, this: _Pass) -> Any:
        """Returns the output of TRL's fused head with the values of the whole batch."""
        self._check_trl_head()
        for name in PER_TOKEN:  # one by one, so that values which no loss reads get no gradient
            local = getattr(output, name, None)
            if local is None:
                continue
            whole = self._in_order(local.float(), this).to(local.dtype)
            setattr(output, name, whole[:, :-1] if this.shifted_here else whole)
        if output.loss is not None:
            output.loss = self._sum(output.loss)
        return output

    def _check_trl_head(self) -> None:
        """Raises ValueError if TRL took a trained head's weight outside FSDP2's hooks, which sum its gradients."""
        weight = getattr(self.model.get_output_embeddings(), "weight", None)
        if isinstance(weight, DTensor) and weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "FSDP2 shards the LM head by itself, and TRL's fused head would not sum its gradients over ranks; use "
                "DDP, or leave lm_head out of modules_to_save"
            )

    def _gather_metrics(self, log_probs: Tensor, metrics: TokenMetrics, output: Any, this: _Pass) -> TokenOutput:
        """Returns what TRL's fused head would, from token metrics (batch, local) of this rank."""
        assert this.labels is not None and this.divisor is not None
        mask = (this.labels != IGNORE_INDEX).to(log_probs.dtype)
        values = self._in_order(torch.stack([log_probs, metrics.entropy, metrics.hits, mask], -1), this)
        values = values[:, : this.length - 1 if this.shifted_here else this.length]
        log_probs, (entropy, hits, mask) = values[..., 0], values[..., 1:].detach().unbind(-1)
        loss = -log_probs.sum() / this.divisor.clamp_min(1)
        if (router_loss := getattr(output, "aux_loss", None)) is not None:
            loss = loss + getattr(text_config(self.model.config), "router_aux_loss_coef", 0.0) * router_loss
        return TokenOutput(loss, log_probs, entropy, hits.bool(), mask.bool(), router_loss)

    def _in_order(self, values: Tensor, this: _Pass) -> Tensor:
        """Returns values (batch, local, ...) of all ranks in the order of the batch (batch, length, ...)."""
        whole = hf.gather_padded_tokens(self.context, values, this.batch, gradient_factor=self._ranks)
        return whole[:, : this.length]

    def _loss(self, share: Tensor, this: _Pass) -> Tensor:
        """Returns the loss of the whole batch.

        Without a target, gradients are zero. The loss then is NaN, as on one process, if the caller counted the targets
        (`num_items_in_batch`), else 0.
        """
        loss = self._sum(share)
        return loss if this.divisor is None else loss.masked_fill(this.divisor == 0, torch.nan)

    def _sum(self, share: Tensor) -> Tensor:
        return hf.sum_over_ranks(self.context, share, gradient_factor=self._ranks)


def whole_batches_of(model: nn.Module) -> WholeBatches | None:
    """Returns the hooks of a model, which may be inside wrappers; None if its sequences are not split here."""
    return vars(transformers_model(model)).get(WHOLE_BATCHES)


@contextmanager
def gathered_weight(model: nn.Module, head: nn.Module) -> Iterator[None]:
    """Gathers an LM head's weight where FSDP2 has sharded it; with gradients, the backward pass shards it again."""
    units = [m for m in model.modules() if isinstance(m, FSDPModule) and any(child is head for child in m.modules())]
    if not units and getattr(head, "_is_fsdp_managed_module", False):
        raise ValueError("FSDP1 has sharded the weights that logits need; use FSDP2, or leave labels out of the call")
    if units:
        units[-1].unshard()  # the innermost
    yield
    if units and not torch.is_grad_enabled():
        units[-1].reshard()


def _padded(batch: dict[str, Tensor | None], length: int) -> dict[str, Tensor | None]:
    """Pads rows to a length. The padding is a document of its own where positions tell documents apart."""
    ids = batch["input_ids"]
    assert ids is not None
    missing = length - ids.shape[1]
    if missing <= 0:
        return batch
    fill = {"input_ids": 0, "labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, "attention_mask": 0}
    fill |= dict.fromkeys(TOKEN_TYPES, 0)
    padded = {
        name: None if (x := batch[name]) is None else nn.functional.pad(x, (0, missing), value=value)
        for name, value in fill.items()
    }
    positions = batch["position_ids"]
    if positions is not None:
        tail = torch.arange(missing, device=positions.device, dtype=positions.dtype).expand(len(positions), -1)
        positions = torch.cat([positions, tail], dim=1)
    return {**batch, **padded, "position_ids": positions}


def _padded_edges(edges: Tensor | None, length: int, padded: int) -> Tensor | list[int] | None:
    """Adds the document of padding that `_padded` makes to the edges of documents that fill a row."""
    if edges is None or padded <= length:
        return edges
    found: list[int] = edges.flatten().tolist()
    return [*found, padded] if found[-1] == length else found


def _at_least_one(divisor: Tensor | None) -> Tensor | None:
    """Returns a divisor that leaves gradients finite where there is nothing to divide."""
    return None if divisor is None else divisor.clamp_min(1)


def _is_set(value: Any) -> bool:
    return value is not None and not (isinstance(value, int) and value == 0)  # False is 0
