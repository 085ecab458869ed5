"""Distributed attention for Hugging Face causal language models, in three lines of a user's own script.

context = hf.enable(model, group)
batch = hf.shard_batch(context, input_ids, labels)
loss = model(**batch).loss   # this rank's share: losses are summed over ranks
loss.backward()              # so are gradients: all-reduce them, or wrap the model in DDP or FSDP2

Losses of log-probabilities, such as DPO and GRPO, take these lines instead of the last one:

log_probs = hf.token_log_probs(context, model, batch)      # of this rank's tokens; logits never exist whole
sums = hf.sequence_sums(context, log_probs, batch)         # of whole sequences, the same on every rank
in_order = hf.gather_tokens(context, log_probs, batch)     # of all tokens, the same on every rank

hf.disable(model)   # the plain model again, to generate for example
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
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
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import SequenceContext, make_context, release
from lightseq.attention.module_attention import attention_function
from lightseq.config.train_config import TrainConfig
from lightseq.data.input_checks import (
    BATCH_FACTS,
    batch_facts,
    install_checks,
    remove_checks,
)
from lightseq.data.shard_batch import (
    check_labels,
    check_right_padding,
    find_boundaries,
    local_batch,
    without_masked,
)
from lightseq.distributed.roll_call import RollCall
from lightseq.log_probs import (
    gather_padded_tokens,
    gather_tokens,
    sequence_sums,
    sum_over_ranks,
    token_log_probs,
)
from lightseq.memory.planner.choice import make_plan
from lightseq.memory.planner.plan import Plan
from lightseq.memory.planner.run import Hardware, PlannedRun, hardware_here
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
from lightseq.utils.labels import IGNORE_INDEX
from lightseq.utils.upload import upload
from lightseq.utils.versions import UntestedVersionWarning, untested_versions

__all__ = [
    "disable",
    "enable",
    "gather_padded_tokens",
    "gather_tokens",
    "plan_memory",
    "sequence_sums",
    "shard_batch",
    "sum_over_ranks",
    "token_log_probs",
]

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
    check_names("hf.plan_memory", flags, [field.name for field in dataclasses.fields(TrainConfig)])
    config = TrainConfig(model_max_length=length, **flags)
    return make_plan(PlannedRun(model if isinstance(model, PreTrainedConfig) else model.config, config, hardware))


def shard_batch(
    context: SequenceContext,
    input_ids: Tensor,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    position_ids: Tensor | None = None,
    shift_labels: Tensor | None = None,
) -> dict[str, Any]:
    """Returns this rank's part of a whole batch (batch, length), as keyword arguments of the patched model.

    Labels are aligned with the ids, as in Hugging Face; they are shifted here, on the whole sequence, unless
    `shift_labels` are given instead, which already are. Every rank of the group passes the same batch.
    `num_items_in_batch` counts the valid labels of this group's batch: with data parallelism or accumulation, replace
    it with the sum over all. Masked tokens are not targets.

    A batch of one may hold several packed documents: `cu_seqlens` gives the first token of each and the end of the
    last, or `position_ids` restart at each. Documents neither attend to each other nor predict each other's tokens,
    unless `shift_labels` say so.
    Raises ValueError for a mask other than right padding, and for positions of neither kind.
    """
    check_right_padding(attention_mask)
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids are a {type(input_ids).__name__}; give a tensor (batch, length)")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids are {tuple(input_ids.shape)}; give (batch, length) with at least one token")
    given = {"labels": labels, "shift_labels": shift_labels, "attention_mask": attention_mask}
    for name, x in given.items():
        if x is not None and x.shape != input_ids.shape:
            shapes = f"{name} {tuple(x.shape)} and input_ids {tuple(input_ids.shape)}"
            raise ValueError(f"{shapes} differ in shape; give one value per token")
    length = input_ids.shape[1]
    boundaries = find_boundaries(input_ids, cu_seqlens, position_ids)
    if shift_labels is not None:
        labels = shift_labels
        if attention_mask is not None:
            labels = without_masked(labels, attention_mask)
    elif labels is not None:
        if attention_mask is not None:
            labels = labels.masked_fill(attention_mask == 0, IGNORE_INDEX)
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        if boundaries is not None:
            labels[:, [end - 1 for end in boundaries[1:]]] = IGNORE_INDEX
            labels[:, boundaries[-1] :] = IGNORE_INDEX
    if labels is not None:
        check_labels(labels)
    ids, local, documents = local_batch(context.sequence, input_ids, labels, boundaries)
    if documents is None:
        positions = context.sequence.positions(length, input_ids.device).expand(len(input_ids), -1)
        batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    else:
        positions = upload(documents.positions(context.rank), input_ids.device)
        batch = {"input_ids": ids, "position_ids": positions, "documents": documents}
    batch[BATCH_FACTS] = batch_facts(input_ids, labels)
    if labels is not None:
        valid = (labels != IGNORE_INDEX).sum().clamp_min(1)  # without a target the loss is 0, not NaN
        batch |= {"labels": local, "shift_labels": local, "num_items_in_batch": valid}
    return batch


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
