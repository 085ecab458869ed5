"""Parallelization of a Hugging Face model: every technique, in order, on one page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightseq.utils import quiet_transformers  # noqa: F401  first, because the modules below import transformers

# isort: split
from transformers import PreTrainedModel

from lightseq import hf
from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import SequenceContext
from lightseq.config.remat_policies import STORE_LINEARS, STORES_MLP
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.environment import has_expandable_segments
from lightseq.distributed.parallel_dims import ParallelDims
from lightseq.distributed.stopwatch import Stopwatch
from lightseq.kernels.logit_transform import LogitTransform
from lightseq.memory.gradient_memory import ReduceScatterIntoSharedPool
from lightseq.memory.offload import HostBufferPool, Offload, layers_in_flight
from lightseq.memory.planner.placement import KEEP, OFFLOAD, OFFLOADED, RECOMPUTED, Placement
from lightseq.memory.planner.plan import Plan
from lightseq.memory.remat import apply_remat, capture_forwards, checkpoint_groups
from lightseq.memory.weight_prefetch import WeightPrefetch
from lightseq.models.architecture import head_change, inspect_architecture, known_logit_transform
from lightseq.modules.compilation import allow_graphs_per_length
from lightseq.modules.fp8 import FP8_COMPILE_OPTIONS, to_fp8
from lightseq.modules.identity import hook_of
from lightseq.modules.loss import cross_entropy_sum
from lightseq.modules.mlp import tile_mlps
from lightseq.modules.projections import store_projections
from lightseq.modules.tiled import tile_layers
from lightseq.schedule.documents import local_tokens
from lightseq.sequence.documents import Documents
from lightseq.utils.versions import source_digest

# Computes values per token in place of the loss, from hidden states, the head's weight, labels, the transform of the
# logits, and the head's bias. `modules.loss.token_losses` is one.
HeadReader = Callable[[Tensor, Tensor, Tensor, LogitTransform, Tensor | None], Tensor]


@dataclass(frozen=True)
class MemorySettings:
    """Settings of weights, optimizer state and activations in host memory, from the flags or from the planner."""

    state_on_host: bool = False  # weights, gradients and optimizer state
    layers_with_state_on_gpu: int = 0  # the first layers, whose state stays on the device
    reshard_after_forward: bool = True  # False keeps the layers' gathered weights for the backward pass
    placement: Placement | None = None  # each layer's activations, with --offload auto
    activation_bytes: float = math.inf  # limit of this rank's host memory for offloaded activations
    plan: Plan | None = None  # which the settings come from; None: no planner decided, as on CPUs


class LossModel(nn.Module):
    """Causal language model that returns its loss; its forward is the whole forward pass of a step."""

    def __init__(self, model: PreTrainedModel, stopwatch: Stopwatch, offload: Offload | None = None) -> None:
        super().__init__()
        self.model = model
        self.offload = offload
        self.stopwatch = stopwatch  # times the loss, which is equal work on every rank
        head: Any = model.lm_head
        # Only `forward` is replaced, so that FSDP's hooks still run around the loss.
        head.forward = partial(_head_loss, head, stopwatch, _logit_transform(model))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        documents: Documents | None = None,
        read: HeadReader | None = None,
    ) -> Tensor:
        """Returns the sum of -log p(label) over this rank's valid labels.

        ids, positions and labels are (batch, local sequence), labels shifted. `documents` are those of a packed
        sequence. With `read`, as in evaluations, its result is returned instead.
        """
        packed = {} if documents is None else {"documents": documents}  # only some models take the argument
        output = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **packed)
        return self.model.lm_head(output.last_hidden_state, labels, read)


def _logit_transform(model: PreTrainedModel) -> LogitTransform:
    """Returns the function that makes logits of the head's product. Raises ValueError for a model that does more."""
    name = type(model).__name__
    change = head_change(model) or ((hook := hook_of(model)) and f"{name} {hook}")
    if change:
        raise ValueError(f"{change}, which the chunked loss would leave out; use your own loop around hf.enable")
    found = known_logit_transform(model)
    if found is None:
        raise ValueError(f"{name} makes its logits in an unknown way; use your own loop around hf.enable")
    return found


def _head_loss(
    head: nn.Linear, stopwatch: Stopwatch, transform: LogitTransform, hidden: Tensor, labels: Tensor,
    read: HeadReader | None,
) -> Tensor:  # fmt: skip
    if read is not None:
        return read(hidden, head.weight, labels, transform, head.bias)
    with stopwatch.lap():
        return cross_entropy_sum(hidden, head.weight, labels, transform=transform, bias=head.bias)


def parallelize(
    model: PreTrainedModel, config: TrainConfig, dims: ParallelDims, memory: MemorySettings
) -> tuple[LossModel, SequenceContext]:
    """Applies every technique to a model, which may be on the meta device, and shards it with FSDP2."""
    loss_model, context = apply_techniques(model, config, dims, memory)
    groups = layer_groups(model, config)
    dtype = getattr(torch, config.compute_dtype)
    shard_parameters(loss_model, model, dims.parameter_mesh, dtype, groups, memory)
    if memory.state_on_host and dims.shard == 1 and not config.tiles_layers:
        WeightPrefetch(groups, dims.world.device.type)  # tiled layers run for seconds, and need no prefetch
    return loss_model, context


def apply_techniques(
    model: PreTrainedModel, config: TrainConfig, dims: ParallelDims, memory: MemorySettings
) -> tuple[LossModel, SequenceContext]:
    """Applies every technique except sharding, which DeepSpeed does itself."""
    layers: Any = model.model.layers
    device = dims.world.device
    context = hf.enable(model, dims.sequence_mesh, AttentionConfig.from_flags(config, device, dims.world.local_size))
    if config.fp8 is not None:
        tokens = local_tokens(context.schedule, config.model_max_length, config.packing != "none")
        to_fp8(layers, config.fp8, config.fp8_emulate, tokens)
    if config.remat_policy != "none":
        last = all(layer.mlp_is_last for layer in inspect_architecture(model.config).layers)
        tile_mlps(layers, config.remat_policy in STORES_MLP, ends_layer=last)
    if config.remat_policy == STORE_LINEARS:
        store_projections(layers)
    offload = apply_recomputation(model, config, device, memory)
    return LossModel(model, Stopwatch(device), offload), context


def apply_recomputation(
    model: PreTrainedModel, config: TrainConfig, device: torch.device, memory: MemorySettings
) -> Offload | None:
    """Checkpoints, compiles and offloads each layer as its placement says. Returns the offload, None without one."""
    layers: Any = model.model.layers
    groups, grouped = layer_groups(model, config), config.group_size > 1
    placements = _layer_placements(config, memory, len(layers))
    offload, rerun_offload = _make_offloads(config, device, memory)
    options = FP8_COMPILE_OPTIONS if config.fp8 else None
    # One graph for each batch length: a graph for all lengths would be slower at each.
    compiled = partial(torch.compile, dynamic=False, options=options) if config.compiles else lambda forward: forward
    if config.compiles:
        allow_graphs_per_length()
        # torch's disk cache knows our operators only by name, not the shapes and backward passes that they declare.
        torch.compiler.config.cache_key_tag = f"lightseq {source_digest()}"

    def rematerialize(chosen: Sequence[nn.Module], policy: str) -> None:
        if config.tiles_layers:
            tile_layers(chosen, store_attention=policy == "attention", compiled=config.compiles, options=options)
            return
        apply_remat(chosen, policy, config.compiles, rerun_offload or offload)
        for layer in chosen:
            layer.forward = compiled(layer.forward)  # type: ignore[method-assign]

    rerun_forwards = None
    if grouped and config.remat_policy == "full":  # see `checkpoint_groups`
        last_layers = [group[-1] for group in groups]
        rerun_forwards = capture_forwards(last_layers, lambda: rematerialize(last_layers, "attention"))
    placed = list(zip(layers, placements, strict=True))
    rematerialize([layer for layer, placement in placed if placement in RECOMPUTED], "full")
    rematerialize([layer for layer, placement in placed if placement not in RECOMPUTED], config.remat_policy)
    model.model.norm.forward = compiled(model.model.norm.forward)
    if grouped:
        checkpoint_groups(groups, rerun_offload, rerun_forwards)
    if offload is not None:
        first_layers = [group[0] for group in groups]
        by_group = zip(first_layers, placements[:: config.group_size], strict=True)
        staying = [first for first, placement in by_group if placement not in OFFLOADED]
        if len(staying) < len(first_layers):
            offload.wrap(first_layers[:-1], first_layers[-1], staying)
    return offload


def layer_groups(model: PreTrainedModel, config: TrainConfig) -> list[list[nn.Module]]:
    """Returns groups of neighbouring layers; each group is one checkpoint and one FSDP2 unit."""
    layers: Any = model.model.layers
    size = config.group_size
    return [list(layers[start : start + size]) for start in range(0, len(layers), size)]


def _layer_placements(config: TrainConfig, memory: MemorySettings, layers: int) -> tuple[str, ...]:
    """Returns each layer's activation placement, such as KEEP.

    The last group stays on the GPU, because the backward pass begins with it.
    """
    if memory.placement is not None:
        return memory.placement.layers
    size, offloads = config.group_size, config.offload in ("activations", "both")
    return tuple(OFFLOAD if offloads and i % size == 0 and i + size < layers else KEEP for i in range(layers))


def _make_offloads(
    config: TrainConfig, device: torch.device, memory: MemorySettings
) -> tuple[Offload | None, Offload | None]:
    """Returns the offload between forward and backward pass, and the one while a group is recomputed."""
    placed_on_host = memory.placement is not None and set(memory.placement.layers) & set(OFFLOADED)
    if config.offload not in ("activations", "both") and not placed_on_host:
        return None, None
    host = HostBufferPool(memory.activation_bytes, device.type == "cuda")
    make = partial(Offload, device, host, layers_in_flight(config.tiles_layers))
    return make(), make() if config.group_size > 1 else None


def shard_parameters(
    root: nn.Module,
    model: PreTrainedModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    groups: Sequence[list[nn.Module]],
    memory: MemorySettings,
) -> None:
    """Shards `root`, which holds the model, with FSDP2: a unit for every group of layers, the embeddings and the head.

    Shards are float32 and gathered in the compute dtype; gradients are reduced in float32. They are summed, not
    averaged, because the loss is already divided by the global number of valid tokens. Embeddings tied to the head
    belong to the root and stay gathered for the whole step. Gradients on the GPU share the pool of activations.
    `memory` says whether the shards, and with them the gradients and the optimizer state, are in host memory, and
    whether groups are gathered again for the backward pass.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if memory.state_on_host else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = ends[0].weight is ends[1].weight
    groups_on_gpu = math.ceil(memory.layers_with_state_on_gpu / len(groups[0]))
    for i, group in enumerate(groups):
        policy = OffloadPolicy() if i < groups_on_gpu else place
        fully_shard(group, offload_policy=policy, reshard_after_forward=memory.reshard_after_forward, **options)
    for end in [] if tied else ends:
        fully_shard(end, offload_policy=place, **options)
    fully_shard(root, offload_policy=place, **options)
    if not tied:
        for end in ends:  # the backward pass reads neither the embedding table nor, after the fused loss, the head
            end.set_unshard_in_backward(False)
    # Without expandable segments a shared pool breaks into pieces, none of them large enough for a gradient.
    if mesh.device_type == "cuda" and has_expandable_segments() and not memory.state_on_host:
        for module in root.modules():
            if isinstance(module, FSDPModule):  # these setters do not recurse
                module.set_custom_reduce_scatter(ReduceScatterIntoSharedPool())
    if mesh.size() == 1:
        return  # a factor of 1 would cost a pass over the gradients
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
