"""Distributed attention for Hugging Face causal language models, in three lines of a user's own script.

context = hf.enable(model, group)
batch = hf.shard_batch(context, input_ids, labels)
loss = model(**batch).loss   # this rank's share: losses and gradients are summed over ranks
"""

import dataclasses
import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightseq.utils import quiet_transformers  # noqa: F401  first, because the modules below import transformers

# isort: split
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightseq.attention.context import AttentionConfig, SequenceContext, make_context, release
from lightseq.attention.module_attention import attention_function
from lightseq.config.train_config import TrainConfig
from lightseq.data.examples import IGNORE_INDEX
from lightseq.data.input_checks import BATCH_FACTS, batch_facts, install_checks, transformers_model
from lightseq.data.shard_batch import (
    check_right_padding,
    find_boundaries,
    local_batch,
    local_positions,
    packed_positions,
)
from lightseq.memory.planner.choice import make_plan
from lightseq.memory.planner.plan import Plan
from lightseq.memory.planner.run import Hardware, PlannedRun, hardware_here
from lightseq.models.architecture import (
    LENGTH_DEPENDENT_ROPE,
    attention_modules,
    check_attention,
    heads_of,
    rope_types,
    sliding_window,
)
from lightseq.schedule.cost import AttentionShape
from lightseq.utils.versions import UntestedVersionWarning, untested_versions

IMPLEMENTATION: Final = "lightseq"


def enable(
    model: PreTrainedModel,
    group: DeviceMesh | dist.ProcessGroup | None = None,
    config: AttentionConfig | None = None,
    **options: Any,
) -> SequenceContext:
    """Patches the model's attention to span the ranks of a group or one-dimensional mesh (default: all ranks).

    `options` are fields of `AttentionConfig` that override those of `config`.

    Raises TypeError for an unknown option, and ValueError for an unsupported model: attention dropout, a window shorter
    than `length`, an architecture without the attention interface. The patched model refuses masks, inputs without
    global positions, a key/value cache, and labels that it would shift inside a shard. Enabling a model again replaces
    its context. A deep copy of the model shares it.
    """
    config = _with_options(config or AttentionConfig(), options)
    check_attention(model, config.length)
    heads, parameter = heads_of(model.config), next(model.parameters())
    device = config.device or parameter.device
    config = dataclasses.replace(config, device=device, dtype=config.dtype or parameter.dtype)
    shape = AttentionShape(config.length, heads.query, heads.key_value, heads.dim)
    context = make_context(_process_group(group), shape, config)
    padded, window = context.layout.padded_length(config.length), sliding_window(model.config)
    if window is not None and padded > window:
        release(context)
        raise ValueError(
            f"{config.length} tokens, padded to {padded} here, exceed the model's window of {window}; use fewer"
        )
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
    model.set_attn_implementation(IMPLEMENTATION)
    _attach(model, context)
    return context


def plan_memory(
    model: PreTrainedModel | PreTrainedConfig, length: int, hardware: Hardware | None = None, **flags: Any
) -> Plan:
    """Returns the fastest memory plan for sequences of `length` tokens that fits, as training chooses it.

    `hardware` is that of this process group unless given. `flags` are those of training, such as `bf16=True`,
    `remat="attention"` or `lora_rank=16`; given ones are obeyed. The plan says in `run.config` what to compile,
    recompute and offload, in `parts` the bytes of a GPU, in `step_seconds` the time, and in `fits` whether it fits;
    print it for one line. Raises ValueError without a GPU or `hardware`, and for flags that exclude each other.
    """
    if hardware is None:
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU here; pass hardware=Hardware(...) of lightseq.memory.planner.run")
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        per_host = min(ranks, torch.cuda.device_count())
        hardware = hardware_here(ranks, per_host, torch.device("cuda", torch.cuda.current_device()))
    config = TrainConfig(model_max_length=length, **flags)
    return make_plan(PlannedRun(model if isinstance(model, PreTrainedConfig) else model.config, config, hardware))


def shard_batch(
    context: SequenceContext,
    input_ids: Tensor,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    position_ids: Tensor | None = None,
) -> dict[str, Any]:
    """Returns this rank's part of a whole batch (batch, length), as keyword arguments of the patched model.

    Labels are aligned with the ids, as in Hugging Face; they are shifted here, on the whole sequence. Every rank of the
    group passes the same batch. `num_items_in_batch` counts the valid labels of this group's batch: with data
    parallelism or accumulation, replace it with the sum over all. Masked tokens are not targets.

    A batch of one may hold several packed documents: `cu_seqlens` gives the first token of each and the end of the
    last, or `position_ids` restart at each. Documents neither attend to each other nor predict each other's tokens.
    Raises ValueError for a mask other than right padding, and for positions of neither kind.
    """
    check_right_padding(attention_mask)
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids are a {type(input_ids).__name__}; give a tensor (batch, length)")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids are {tuple(input_ids.shape)}; give (batch, length) with at least one token")
    for name, x in (("labels", labels), ("attention_mask", attention_mask)):
        if x is not None and x.shape != input_ids.shape:
            shapes = f"{name} {tuple(x.shape)} and input_ids {tuple(input_ids.shape)}"
            raise ValueError(f"{shapes} differ in shape; give one value per token")
    length = input_ids.shape[1]
    boundaries = find_boundaries(input_ids, cu_seqlens, position_ids)
    if labels is not None:
        if attention_mask is not None:
            labels = labels.masked_fill(attention_mask == 0, IGNORE_INDEX)
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        if boundaries is not None:
            labels[:, [end - 1 for end in boundaries[1:]]] = IGNORE_INDEX
            labels[:, boundaries[-1] :] = IGNORE_INDEX
    ids, local, documents = local_batch(context, input_ids, labels, boundaries)
    if documents is None:
        positions = local_positions(context, length, input_ids.device).expand(len(input_ids), -1)
        batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    else:
        positions = packed_positions(context, documents).to(input_ids.device)
        batch = {"input_ids": ids, "position_ids": positions, "documents": documents}
    batch[BATCH_FACTS] = batch_facts(input_ids, labels)
    if labels is not None:
        valid = (labels != IGNORE_INDEX).sum().clamp_min(1)  # without a target the loss is 0, not NaN
        batch |= {"labels": local, "shift_labels": local, "num_items_in_batch": valid}
    return batch


def _with_options(config: AttentionConfig, options: Mapping[str, Any]) -> AttentionConfig:
    names = [field.name for field in dataclasses.fields(AttentionConfig)]
    for name in options:
        if name not in names:
            guess = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {guess[0]}?" if guess else f"choose from {', '.join(names)}"
            raise TypeError(f"hf.enable has no option {name}; {remedy}")
    return dataclasses.replace(config, **options)


def _process_group(group: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"the mesh has {group.ndim} axes {group.mesh_dim_names}; pass only the sequence axis")
        return group.get_group()
    if group is None:
        if dist.group.WORLD is None:
            raise ValueError("torch.distributed is not initialised; call init_process_group before hf.enable")
        return dist.group.WORLD
    return group


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
    install_checks(model, length_dependent_rope=bool(ropes))


def _rope_forward(
    rope: nn.Module, forward: Callable[..., tuple[Tensor, Tensor]], *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of this rank's positions, scaled for the length of the whole sequence."""
    context = rope.sequence_context
    assert isinstance(context, SequenceContext)
    call = signature(forward).bind(
        *args, **kwargs
    )  # models pass positions with or without a name, and some also the layer type
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
