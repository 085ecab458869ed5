"""Checks of a patched model's inputs and passes for mistakes that would silently train on wrong data."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.comm.transport import base_transport_name
from lightseq.hf.agreement import (
    BATCH_FACTS,
    COUNTED_TOKENS,
    FACTS,
    announce_pass,
    begin_comparing_documents,
    compare_batches,
    finish_comparing_documents,
    routed_range,
)
from lightseq.hf.gradient_scale import find_gradient_factor, scale_gradients
from lightseq.hf.image_inputs import BESIDE_PIXELS, IMAGE_INPUTS, PIXELS, REMEDY, other_inputs
from lightseq.hf.images import ImageFeatures, install
from lightseq.hf.loss_checks import check_labels, check_loss, restore_loss_function
from lightseq.hf.quantized import check_sharded
from lightseq.hf.record import EnabledModel
from lightseq.hf.router_losses import install_router_loss, mark_router_logits, unmark_router_logits
from lightseq.models.decoder import (
    decoder_layers,
    headless,
    positions_in_table,
    text_config,
    transformers_model,
    vocabulary_size,
)
from lightseq.parts.attention import reaches_of_masks
from lightseq.parts.recurrences import attending_layers
from lightseq.parts.router_loss import asks_for_router_logits
from lightseq.parts.router_replay import ROUTED_EXPERTS, check_experts, check_shape
from lightseq.parts.routers import has_router_loss
from lightseq.sequence.documents import Documents
from lightseq.utils.tensors import IGNORE_INDEX


def install_checks(model: PreTrainedModel, record: EnabledModel, length_dependent_rope: bool) -> None:
    """Installs hooks that check every forward pass of a model and of its base model without the head.

    Both a wrapper such as PEFT's and the model inside it are checked, because either may be called.
    """
    inner, context, changes = transformers_model(model), record.context, record.changes
    attending = attending_layers(inner)
    images = install(inner, context, changes)
    install_router_loss(inner)
    for module in {model, inner, headless(inner)}:
        checks = Checks(context, inner, attending, length_dependent_rope, images)
        hooks = [module.register_forward_pre_hook(checks.check_inputs, with_kwargs=True)]
        if module is not headless(inner):
            hooks.append(module.register_forward_pre_hook(partial(check_labels, context), with_kwargs=True))
            # FSDP's hook casts the loss to another tensor, so this one runs first.
            hook = partial(check_loss, context)
            hooks.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(unmark_router_logits))
        else:
            hooks.append(module.register_forward_hook(partial(mark_router_logits, context)))
        hooks.append(module.register_forward_hook(partial(scale_gradients, context)))
        hooks.append(module.register_forward_hook(checks.check_pass, always_call=True))
        for hook in hooks:
            changes.add_hook(hook)
    changes.call_later(partial(restore_loss_function, inner))


class Checks:
    """Hooks of one module: the model, a wrapper around it, or its base model without the head."""

    def __init__(
        self,
        context: SequenceContext,
        model: PreTrainedModel,
        attending_layers: int,
        length_dependent_rope: bool,
        images: ImageFeatures,
    ) -> None:
        self._context = context
        self._layers = attending_layers
        self._reaches = reaches_of_masks(model)
        self._positions = positions_in_table(model)
        self._decoder_layers = decoder_layers(model) or ()
        self._images = images
        self._unsplit_inputs = sorted(other_inputs(model) - {PIXELS, *BESIDE_PIXELS})
        self._length_dependent_rope = length_dependent_rope
        self._shapes = set[tuple[Any, ...]]()  # shapes of positions that were right
        self._shards_are_checked = False

    @torch.compiler.disable  # reads tensor values and communicates, which cannot be compiled
    def check_inputs(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Raises ValueError for inputs that attention over ranks does not support. Returns the inputs for the model."""
        context, state = self._context, self._context.forward_pass
        kwargs = _supported_arguments(model, args, kwargs)
        if state.outermost is None:
            if not self._shards_are_checked:
                check_sharded(model)
                self._shards_are_checked = True
            self._check_other_inputs(kwargs)
            self._check_table(model, args, kwargs)
            self._images.begin(kwargs)
            self._check_routed_experts(args, kwargs, kwargs.get(BATCH_FACTS))
        documents, facts = kwargs.get("documents"), kwargs.pop(BATCH_FACTS, None)
        counted = kwargs.pop(COUNTED_TOKENS, None)
        if state.outermost is None:
            rows = None if documents is None else documents.rows
            state.counted_tokens, state.loss_weights = counted, None if rows is None else rows.weights
            if asks_for_router_logits(model.config, kwargs):
                if documents is not None and documents.are_trees and (counted is None or counted.dtype is torch.bool):
                    raise ValueError(
                        "router losses count a prefix once for each row, which Nodes do not tell; use hf.shard_rows"
                    )
                install_router_loss(transformers_model(model))  # again, if a function of the file was replaced since
                has_router_loss(transformers_model(model))  # raises for another loss
                if facts is None:
                    raise ValueError("output_router_logits=True needs all that shard_batch returns; pass it on")
        self._check_positions_and_documents(kwargs.get("position_ids"), documents)
        if facts is not None:
            local = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            announce_pass(context, (local.shape[0], local.shape[1] * context.layout.world), model.training)
            state.announced = False
            find_gradient_factor(model, context, facts, kwargs.get("num_items_in_batch"))
        if facts is not None and facts.shape == (FACTS,):  # wrappers that split the batch have changed the shape
            divisor, vocabulary = kwargs.get("num_items_in_batch"), vocabulary_size(transformers_model(model))
            compare_batches(context, facts, kwargs.get("labels"), divisor, vocabulary)
            if documents is not None:
                begin_comparing_documents(context, documents)
                # With gloo, attention waits for the other ranks on the host, so different documents would hang there.
                if base_transport_name(context.transport.name) == "gloo":
                    finish_comparing_documents(state)
        if state.outermost is None:  # the model around the layers may not forward `documents` to them
            state.outermost, context.sequence.batch.packed = model, documents is not None
        if model is headless(inner := transformers_model(model)):
            if reaches_of_masks(inner) != self._reaches:
                raise ValueError("the windows in the model's config changed after hf.enable; call hf.enable again")
            state.attention_passes = context.progress.passes
        return args, kwargs

    def _check_other_inputs(self, kwargs: dict[str, Any]) -> None:
        """Raises ValueError if a model gets other inputs than text, and images that `shard_batch` has chosen."""
        if name := next((name for name in self._unsplit_inputs if kwargs.get(name) is not None), None):
            remedy = "pass it to shard_batch" if name in IMAGE_INPUTS else REMEDY
            raise ValueError(
                f"{name} is not supported: the model takes text, and images that shard_batch returns; {remedy}"
            )

    def _check_routed_experts(self, args: tuple, kwargs: dict[str, Any], facts: Tensor | None) -> None:
        """Raises ValueError for a choice of experts that does not fit the model or the batch."""
        if (routed := kwargs.get(ROUTED_EXPERTS)) is not None:
            check_shape(routed, args[0] if args else kwargs["input_ids"])
            of_batch = None if facts is None or facts.shape != (FACTS,) else routed_range(facts)
            check_experts(routed, self._decoder_layers, of_batch)

    def _check_table(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raises ValueError on every rank if a rank has a position beyond the model's table of positions."""
        if self._positions is None:
            return
        ids = (
            args[0]
            if args
            else next(x for name in ("input_ids", "inputs_embeds") if (x := kwargs.get(name)) is not None)
        )
        if ids.shape[1] * self._context.layout.world <= self._positions:
            return  # all positions fit: skip reading them, which makes the host wait
        given = kwargs.get("position_ids")
        last = torch.tensor(ids.shape[1] - 1, device=ids.device) if given is None else given.max()
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._context.group)
        if int(last) >= self._positions:
            raise ValueError(
                f"a sequence has {int(last) + 1} tokens, but {type(transformers_model(model)).__name__} has a table "
                f"for {self._positions} positions; give shorter ones, or another model"
            )

    def _check_positions_and_documents(self, positions: Tensor | None, documents: Documents | None) -> None:
        context = self._context
        if documents is not None:
            if self._length_dependent_rope:
                raise ValueError(
                    "the model's RoPE depends on the sequence length, and packed documents have different lengths; "
                    "turn packing off, or use another rope_type"
                )
            if not context.sequence.match(documents):
                raise ValueError(
                    "the packed batch belongs to another context; call shard_batch with this model's context"
                )
            if positions is None:
                raise ValueError("position_ids are missing for packed documents; pass those that shard_batch returns")
        elif positions is None:
            if context.layout.world > 1:
                raise ValueError(
                    "position_ids are missing; make the batch with shard_batch and pass all that it returns"
                )
            return
        in_sequence = self._images.positions
        if in_sequence is not None and positions.ndim == 3:  # the model's own, with axes of images
            positions = in_sequence
        shape = (documents is None, *positions.shape)
        if positions.is_cpu or shape not in self._shapes:  # reading a GPU tensor synchronizes
            if documents is None:
                check_positions(context, positions)
            elif not torch.equal(positions.cpu(), documents.positions(context.rank)):
                raise ValueError(f"position_ids do not match the documents on rank {context.rank}; use shard_batch")
            self._shapes.add(shape)

    @torch.compiler.disable
    def check_pass(self, model: nn.Module, _args: tuple, output: Any) -> None:
        """Raises ValueError after a forward pass in which a layer's attention did not run over all ranks.

        After an exception in the forward pass, `output` is None.
        """
        state = self._context.forward_pass
        if state.outermost is model:
            state.outermost, state.counted_tokens = None, None
            self._context.sequence.batch.packed = False
            self._images.end(type(model).__name__, failed=output is None)
            finish_comparing_documents(state)
        if output is None or model is not headless(transformers_model(model)):
            return
        ran = self._context.progress.passes - state.attention_passes
        if not ran or ran % self._layers:  # some models call attention, or their layers, more than once
            raise ValueError(
                f"attention over all ranks ran {ran} times in {self._layers} layers, so some attended only within a "
                "shard; do not call set_attn_implementation after hf.enable, and use a model whose layers all use "
                "transformers' attention interface or a registered mixer"
            )


def _supported_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the model's keyword arguments without a mask of ones. Raises ValueError for unsupported ones."""
    configs, kwargs = (model.config, text_config(model.config)), dict(kwargs)
    if len(args) > 1:
        raise ValueError(f"{len(args)} positional arguments; pass all but the first by keyword, as shard_batch does")
    if kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in ("past_key_values", "cache")):
        raise ValueError(
            "a key/value cache is not supported; to generate, call hf.disable(model), or load the saved model in plain "
            "transformers"
        )
    if any(getattr(config, "use_cache", False) for config in configs):
        kwargs["use_cache"] = False
    asked = kwargs.get("output_attentions")
    if asked or (asked is None and any(getattr(config, "output_attentions", False) for config in configs)):
        raise ValueError(
            "output_attentions=True is not supported: attention never materializes the score matrix; set it to False"
        )
    if (ignored := kwargs.get("ignore_index")) not in (None, IGNORE_INDEX):
        raise ValueError(f"ignore_index={ignored} is not supported; set labels without a target to {IGNORE_INDEX}")
    mask = kwargs.get("attention_mask")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2 or not bool((mask == 1).all()):
            raise ValueError("attention_mask masks tokens of a shard; pass the whole mask to shard_batch instead")
        kwargs["attention_mask"] = None
    return kwargs


def check_positions(context: SequenceContext, positions: Tensor) -> None:
    """Raises ValueError unless `positions` are the global positions of this rank's tokens."""
    layout, local = context.layout, positions.shape[-1]
    if local % layout.chunks_per_rank:
        raise ValueError(f"{local} local tokens do not split into {layout.chunks_per_rank} chunks; use shard_batch")
    want, got = layout.positions(context.rank, local * layout.world), positions.cpu()
    padded = want.clamp_max(int(got.max()))  # padding has the position of the last token
    if not torch.equal(got, padded.expand_as(got)):
        raise ValueError(
            f"position_ids do not match the {layout.kind} layout on rank {context.rank}; use shard_batch, with "
            "cu_seqlens for packed documents"
        )
