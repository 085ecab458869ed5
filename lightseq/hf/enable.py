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

from lightseq.utils import quiet_transformers  # noqa: F401  first, because the modules below import transformers

# isort: split
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import SequenceContext, make_context, release
from lightseq.attention.module_attention import attention_function
from lightseq.distributed.roll_call import RollCall
from lightseq.hf.checks import install_checks, remove_checks
from lightseq.models.architecture import (
    LENGTH_DEPENDENT_ROPE,
    attention_modules,
    caps_scores,
    check_attention,
    rope_types,
    sliding_window,
    transformers_model,
    windows_of_masks,
)
from lightseq.models.heads import heads_of
from lightseq.schedule.cost import AttentionShape
from lightseq.sequence_parallel import process_group
from lightseq.utils.formatting import check_names
from lightseq.utils.versions import UntestedVersionWarning, untested_versions

IMPLEMENTATION: Final = "lightseq"
ENABLE_OPTIONS: Final = tuple(field.name for field in dataclasses.fields(AttentionConfig))


def enable(
    model: PreTrainedModel,
    group: DeviceMesh | dist.ProcessGroup | None = None,
    config: AttentionConfig | None = None,
    **options: Any,
) -> SequenceContext:
    """Patches the model's attention to span the ranks of a group or one-dimensional mesh (default: all ranks).

    `options` are fields of `AttentionConfig` that override those of `config`.

    Raises TypeError for an unknown option, and ValueError for an unsupported model: attention dropout, an architecture
    without the attention interface; also for a schedule without windows if the model has them. The patched model
    refuses masks, inputs without global positions, a key/value cache, and labels that it would shift inside a shard.
    In DDP and FSDP2, which average gradients over ranks, it scales them so that those of a sequence are summed.
    Enabling a model again replaces its context. A deep copy of the model shares it.
    """
    check_names("hf.enable", options, ENABLE_OPTIONS)
    config = dataclasses.replace(config or AttentionConfig(), **options)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    transformers_model(model)
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"hf.enable takes a transformers model, not a {type(model).__name__}; pass the one inside it")
    if config.length < 1:
        raise ValueError(f"length is {config.length}; give the tokens of a sequence")
    check_attention(model)
    heads, parameter = heads_of(model.config), next(model.parameters())
    device, window = torch.device(config.device or parameter.device), sliding_window(model.config)
    config = dataclasses.replace(
        config,
        device=device,
        dtype=config.dtype or parameter.dtype,
        windows=config.windows or (window is not None and window < config.length),
        softcap=config.softcap or caps_scores(model.config),
    )
    shape = AttentionShape(config.length, heads.query, heads.key_value, heads.dim)
    context = make_context(process_group(group), shape, config)
    context.forward_pass.roll_call = RollCall(context.group)
    slow = config.kernel == "auto" and device.type == "cuda" and context.selection.kernel.name.startswith("reference")
    if slow and context.rank == 0:
        warnings.warn(
            f"attention runs with quadratic memory on kernel {context.selection}; pass dtype=torch.bfloat16 if the "
            "model computes in bfloat16, as under autocast",
            stacklevel=2,
        )
    if dist.get_rank() == 0:
        for line in untested_versions():
            warnings.warn(line, UntestedVersionWarning, stacklevel=2)
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_function)
    inner = transformers_model(model)
    if (before := inner.config._attn_implementation) != IMPLEMENTATION:
        inner.plain_attention = before  # type: ignore[assignment]
    model.set_attn_implementation(IMPLEMENTATION)
    _attach(model, context)
    return context


def disable(model: PreTrainedModel) -> None:
    """Undoes `enable`: the model attends, checks its inputs and generates as before, with the weights it has now.

    Pass the module that was enabled, or one around it. The context is released, except for deep copies of the model;
    call it when no backward pass is pending. The model may be enabled again. Raises ValueError if it is not enabled.
    """
    inner = transformers_model(model)
    context = vars(inner).get("sequence_context")
    if not isinstance(context, SequenceContext):
        raise ValueError(f"{type(inner).__name__} is not enabled; hf.disable takes the model that hf.enable took")
    if (function := vars(inner).get("disabled_by")) is not None:  # set by what called `enable` and added to it
        raise ValueError(f"{type(inner).__name__} is split inside a trainer or accelerate; call {function} instead")
    remove_checks(model)
    for module in model.modules():
        vars(module).pop("sequence_context", None)
        vars(module).pop("window_of_mask", None)
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is _rope_forward:
            del module.forward
            if forward.args[1] != module.forward:  # another library's
                module.forward = forward.args[1]
    # A model whose config an enabled one shares was never plain; None is the default of transformers.
    inner.set_attn_implementation(vars(inner).pop("plain_attention", None))  # type: ignore[arg-type]
    release(context)


def _attach(model: PreTrainedModel, context: SequenceContext) -> None:
    """Gives the context to every module that reads it. Hooks are installed once, however often a model is enabled."""
    # RoPE that scales with the length must see the length of the whole sequence on every rank, not the local one.
    ropes = [m for m in model.modules() if hasattr(m, "rope_type") and rope_types(m) & LENGTH_DEPENDENT_ROPE]
    inner = transformers_model(model)
    if isinstance(before := vars(inner).get("sequence_context"), SequenceContext):
        release(before)
    for rope in ropes:
        if "sequence_context" not in vars(rope):
            rope.forward = partial(_rope_forward, rope, rope.forward)  # type: ignore[method-assign]
    for module in (model, inner, inner.base_model, *ropes, *attention_modules(model)):
        module.sequence_context = context  # type: ignore[assignment]
    windows = inner.base_model.mask_windows = windows_of_masks(inner)  # type: ignore[assignment]
    for module in attention_modules(model):
        module.window_of_mask = windows[module.layer_idx]  # type: ignore[index, assignment]
    install_checks(model, length_dependent_rope=bool(ropes))


def _rope_forward(
    rope: nn.Module, forward: Callable[..., tuple[Tensor, Tensor]], *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of this rank's positions, scaled for the length of the whole sequence."""
    context = rope.sequence_context
    assert isinstance(context, SequenceContext)
    # Models pass positions with or without a name, and some also the layer type.
    call = signature(forward).bind(*args, **kwargs)
    position_ids = call.arguments["position_ids"]
    if position_ids.ndim != 2:
        raise ValueError(
            f"RoPE that depends on the length needs positions of 2 dimensions, not {position_ids.ndim}; set another "
            "rope_type in the model's config"
        )
    last = position_ids.max()
    dist.all_reduce(last, op=dist.ReduceOp.MAX, group=context.group)
    call.arguments["position_ids"] = torch.cat([position_ids, last.expand(len(position_ids), 1)], 1)
    cos, sin = forward(*call.args, **call.kwargs)
    return cos[:, :-1], sin[:, :-1]
