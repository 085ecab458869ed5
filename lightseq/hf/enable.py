"""Turns distributed attention on and off in a Hugging Face model."""

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from lightseq.utils import quiet_transformers  # noqa: F401  first, because the modules below import transformers

# isort: split
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightseq.architecture.inspection import attentions_of, check_attention
from lightseq.architecture.recurrent_schedule import check_recurrent_schedule
from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import SequenceContext, context_beside, make_context, release
from lightseq.attention.module_attention import attention_function
from lightseq.distributed.roll_call import RollCall
from lightseq.hf.adapters import check_adapters
from lightseq.hf.checks import install_checks
from lightseq.hf.image_attention import IMPLEMENTATION as WITH_IMAGES
from lightseq.hf.image_attention import image_attention_function
from lightseq.hf.quantized import check_quantized, skip_in_ddp
from lightseq.hf.record import RECORD, EnabledModel, record_of
from lightseq.models.decoder import attending_part, decoder_layers, positions_in_table, text_decoder, transformers_model
from lightseq.parts.attention import (
    IMPLEMENTATION,
    attend_with,
    caps_scores,
    layer_reaches,
    length_dependent_ropes,
    reaches_of_masks,
)
from lightseq.parts.facts import attention_shape
from lightseq.parts.fit import fit
from lightseq.parts.part import Choices, Ranks
from lightseq.parts.probes import sees_later_tokens_of_images
from lightseq.parts.recurrences import mixer_modules
from lightseq.parts.router_replay import install as install_router_replay
from lightseq.schedule.cost import AttentionShape
from lightseq.sequence_parallel import process_group
from lightseq.utils.formatting import check_names
from lightseq.utils.versions import UntestedVersionWarning, untested_versions

ENABLE_OPTIONS: Final = tuple(field.name for field in dataclasses.fields(AttentionConfig))


def enable(
    model: PreTrainedModel,
    group: DeviceMesh | dist.ProcessGroup | None = None,
    config: AttentionConfig | None = None,
    **options: Any,
) -> SequenceContext:
    """Patches the model's attention to span the ranks of a group or one-dimensional mesh (default: all ranks).

    `options` are fields of `AttentionConfig` and override `config`.

    Raises TypeError for an unknown option, and ValueError for an unsupported model: attention dropout, an architecture
    without the attention interface, quantized weights that pass no gradient; also for a schedule without windows if the
    model has them, and for a length beyond its table of positions. The patched model refuses masks, inputs without
    global positions or longer than its table, a key/value cache, and labels that it would shift inside a shard.
    In DDP and FSDP2, which average gradients over ranks, it scales them so that the gradients of a sequence are summed.
    Enabling a model again replaces its context. A deep copy of the model shares it.
    """
    check_names("hf.enable", options, ENABLE_OPTIONS)
    given_length = options.get("length", 0 if config is None else config.length)
    config = dataclasses.replace(config or AttentionConfig(), **options)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    transformers_model(model)
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"hf.enable takes a transformers model, not a {type(model).__name__}; pass the one inside it")
    if config.length < 1:
        raise ValueError(f"length is {config.length}; give the tokens of a sequence")
    check_attention(model)
    check_adapters(model)
    check_quantized(model)
    if (positions := positions_in_table(transformers_model(model))) is not None and given_length > positions:
        raise ValueError(
            f"length is {given_length}, but {type(transformers_model(model)).__name__} has a table for {positions} "
            f"positions; give {positions} or less"
        )
    mixers, ranks = mixer_modules(model), process_group(group)
    config = dataclasses.replace(_completed(config, model, dist.get_world_size(ranks)), carries_states=bool(mixers))
    assert config.device is not None and config.dtype is not None
    check_recurrent_schedule(
        config.recurrent_schedule,
        type(transformers_model(model)).__name__,
        (kind.facts(module) for module, kind in mixers),
        dist.get_world_size(ranks),
    )
    context = make_context(ranks, _shape(model, config), config)
    context.forward_pass.roll_call = RollCall(context.group)
    is_reference = context.selection.kernel.name.startswith("reference")
    if is_reference and config.kernel == "auto" and config.device.type == "cuda" and context.rank == 0:
        warnings.warn(
            f"attention runs with quadratic memory on kernel {context.selection}; pass dtype=torch.bfloat16 if the "
            "model computes in bfloat16, as under autocast",
            stacklevel=2,
        )
    if dist.get_rank() == 0:
        for line in untested_versions():
            warnings.warn(line, UntestedVersionWarning, stacklevel=2)
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_function)
    ALL_ATTENTION_FUNCTIONS.register(WITH_IMAGES, image_attention_function)
    if (before := record_of(model)) is not None:
        before.changes.undo()
    record = EnabledModel(context)
    skip_in_ddp(model, record.changes)
    _install(model, record)
    return context


def enable_beside(
    model: PreTrainedModel, context: SequenceContext, dtype: torch.dtype | None = None
) -> SequenceContext:
    """Patches a frozen model, such as a teacher, to run over the ranks of an enabled one and on the same batches.

    The model may have another architecture. `dtype` is that of its q, k and v (default: as in the other model). The two
    run forward one after the other, and only the model of `context` runs backward, after the other's forward pass.
    Returns the model's context, which is the given one if that takes its layers.

    Raises ValueError for an unsupported model, as `enable` does, and if it needs another schedule than `context` has.
    """
    check_attention(model)
    check_adapters(model)
    config = dataclasses.replace(context.config, dtype=dtype or context.config.dtype)
    mixers = mixer_modules(model)
    config = dataclasses.replace(_completed(config, model, context.layout.world), carries_states=bool(mixers))
    if mixers:
        facts = (kind.facts(module) for module, kind in mixers)
        name = type(transformers_model(model)).__name__
        check_recurrent_schedule(config.recurrent_schedule, name, facts, context.layout.world)
    found = context_beside(context, _shape(model, config), config)
    if found is context:
        context.forward_pass.shared = True
    else:
        found.forward_pass.roll_call = RollCall(context.group)
    if (before := record_of(model)) is not None:
        before.changes.undo()
    _install(model, EnabledModel(found))
    return found


def disable(model: PreTrainedModel) -> None:
    """Undoes `enable`: the model attends, checks its inputs and generates as before, with the weights it has now.

    Pass the module that was enabled, or one around it. The context is released, except for deep copies of the model;
    call it when no backward pass is pending. The model may be enabled again. Raises ValueError if it is not enabled.
    """
    record, name = record_of(model), type(transformers_model(model)).__name__
    if record is None:
        raise ValueError(f"{name} is not enabled; hf.disable takes the model that hf.enable took")
    if (function := record.disabled_by) is not None:
        raise ValueError(f"{name} is split inside a trainer or accelerate; call {function} instead")
    record.changes.undo()


def _shape(model: PreTrainedModel, config: AttentionConfig) -> AttentionShape:
    """Returns the shape of a model's attention, for a completed config."""
    assert config.dtype is not None
    return attention_shape(attentions_of(model), config.length, element_bytes=config.dtype.itemsize)


def _completed(config: AttentionConfig, model: PreTrainedModel, ranks: int) -> AttentionConfig:
    """Fills in device, dtype, windows and softcap from the model where the config leaves them open."""
    parameter = next(model.parameters())
    sizes = [reach.tokens for reach in layer_reaches(model.config) if reach is not None]
    return dataclasses.replace(
        config.with_windows(sizes, ranks),
        device=torch.device(config.device or parameter.device),
        dtype=config.dtype or parameter.dtype,
        softcap=config.softcap or caps_scores(model.config),
    )


def _install(model: PreTrainedModel, record: EnabledModel) -> None:
    """Changes the modules of a model, and notes each change in its record."""
    inner, context, changes = transformers_model(model), record.context, record.changes
    changes.call_later(partial(release, context))
    changes.set_attribute(inner, RECORD, record)
    attends_over_images = sees_later_tokens_of_images(inner)
    attend_with(attending_part(inner), WITH_IMAGES if attends_over_images else IMPLEMENTATION, changes)
    # RoPE that scales with the length must see the length of the whole sequence on every rank, not the local one.
    ropes = length_dependent_ropes(model)
    for rope in ropes:
        changes.set_attribute(rope, "sequence_context", context)
        changes.replace_forward(rope, partial(_rope_forward, context))
    # First, because it finds mixers by their classes, which `fit` replaces.
    install_checks(model, record, length_dependent_rope=bool(ropes))
    install_router_replay(decoder_layers(inner) or (), changes)  # None if the class has unknown names for its layers
    fit([text_decoder(inner)], Choices(reaches=reaches_of_masks(inner)), Ranks(sequence=context), changes)


def _rope_forward(
    context: SequenceContext, rope: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns cosines and sines of this rank's positions, scaled for the length of the whole sequence."""
    if getattr(rope, "sequence_context", None) is not context:  # disabled under the wrapper of another library
        return forward(*args, **kwargs)
    # Models pass positions with or without a name, and some also the layer type. Wrappers may hide the signature.
    call = signature(type(rope).forward).bind(rope, *args, **kwargs)
    position_ids = call.arguments["position_ids"]
    if position_ids.ndim != 2:
        raise ValueError(
            f"RoPE that depends on the length needs positions of 2 dimensions, not {position_ids.ndim}; set another "
            "rope_type in the model's config"
        )
    last = position_ids.max()
    dist.all_reduce(last, op=dist.ReduceOp.MAX, group=context.group)
    call.arguments["position_ids"] = torch.cat([position_ids, last.expand(len(position_ids), 1)], 1)
    rotations = forward(*call.args[1:], **call.kwargs)  # cosines and sines, or both in complex numbers
    return tree_map(lambda x: x[:, :-1], rotations)  # type: ignore[no-any-return]
