"""Parallelization of a Hugging Face model: every technique, in order, on one page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightseq.utils import quiet_transformers  # noqa: F401  first, because the modules below import transformers

# isort: split
from transformers import PreTrainedModel

from lightseq import hf
from lightseq.architecture.inspection import inspect_architecture
from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import SequenceContext
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.environment import has_expandable_segments
from lightseq.distributed.parallel_dims import ParallelDims
from lightseq.distributed.stopwatch import Stopwatch
from lightseq.memory.fsdp2 import ReduceScatterIntoSharedPool, WeightPrefetch
from lightseq.memory.offload import Offload
from lightseq.memory.recomputation import MemorySettings, apply_recomputation
from lightseq.models.decoder import decoder_layers, final_norm, float32_parameters, text_decoder
from lightseq.models.weights import stored_buffers
from lightseq.objectives.registry import objective_of
from lightseq.parts.changes import changes_of
from lightseq.parts.expert_parallel import expert_group, shard_experts
from lightseq.parts.experts import experts_modules
from lightseq.parts.fit import fit
from lightseq.parts.fp8 import to_fp8
from lightseq.parts.head import required_logit_transform
from lightseq.parts.loss_model import LossModel
from lightseq.parts.part import Ranks, choices_of_policy
from lightseq.schedule.documents import local_tokens


@dataclass(frozen=True)
class FsdpPolicy:
    """Treatment of a unit's parameters by FSDP2."""

    precision: MixedPrecisionPolicy
    offload: OffloadPolicy  # says whether shards, gradients and optimizer state are in host memory
    reshard_after_forward: bool | None = None  # None: FSDP2's default, which keeps the root gathered
    unshard_in_backward: bool = True


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered, freed and reduced together."""

    # group of layers, embeddings, head, root (all the rest), or experts that the mesh splits
    kind: Literal["layers", "end", "root", "experts"]
    modules: tuple[nn.Module, ...]  # in the order in which they run
    mesh: DeviceMesh  # over which the parameters are sharded
    policy: FsdpPolicy | None  # None: the modules' own operator gathers them

    def freed_after_forward(self) -> "Unit":
        """Returns the unit with parameters that are freed after every forward pass."""
        return self if self.policy is None else replace(self, policy=replace(self.policy, reshard_after_forward=True))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the modules. Norms inside of experts belong to their layer."""
        return [x for module in self.modules for x in module.parameters(recurse=self.kind != "experts")]

    @property
    def buffers(self) -> list[Tensor]:
        """Returns the buffers that the model's files store. Every rank holds them whole."""
        modules = () if self.kind == "experts" else self.modules  # modules of experts are inside layers
        return [buffer for module in modules for buffer in stored_buffers(module).values()]

    @property
    def state_on_host(self) -> bool:
        """Returns whether the parameters, and with them gradients and optimizer state, are in host memory."""
        return self.policy is not None and isinstance(self.policy.offload, CPUOffloadPolicy)


@dataclass(frozen=True)
class ParallelModel:
    """A model with every technique applied."""

    loss_model: LossModel
    context: SequenceContext
    units: list[Unit]
    offload: Offload | None  # moves activations to the host
    whole: list[str]  # names of unsharded parameters, which compute in another dtype


def units(model: PreTrainedModel, config: TrainConfig, dims: ParallelDims, memory: MemorySettings) -> list[Unit]:
    """Returns the units of a model: its embeddings, its groups of layers, its head, the root, and experts of a mesh.

    A group of layers is one checkpoint, too. Embeddings tied to the head belong to the root and stay gathered for the
    whole step.
    """
    mesh, decoder, layers = dims.parameter_mesh, text_decoder(model), decoder_layers(model)
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.compute_dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload_policy = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if memory.state_on_host else OffloadPolicy()
    )
    policy = FsdpPolicy(precision, offload_policy)
    groups = []
    for start in range(0, len(layers), config.group_size):
        offload = OffloadPolicy() if start < memory.layers_with_state_on_gpu else offload_policy
        group_policy = replace(policy, offload=offload, reshard_after_forward=memory.reshard_after_forward)
        groups.append(Unit("layers", tuple(layers[start : start + config.group_size]), mesh, group_policy))
    experts = list[Unit]()
    if dims.expert_mesh is not None:
        experts.append(Unit("experts", tuple(x for _, x in experts_modules(model)), dims.expert_mesh, policy=None))
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    others = tuple(module for module in decoder.children() if module is not embeddings and module is not layers)
    if embeddings.weight is head.weight:
        return [*groups, *experts, Unit("root", (embeddings, *others), mesh, policy)]
    # The backward pass reads neither the embedding table nor, after a loss that has its gradients already, the head.
    unread = replace(policy, unshard_in_backward=False)
    first = Unit("end", (embeddings,), mesh, unread)
    last = Unit("end", (head,), mesh, policy if objective_of(config).reads_head_in_backward else unread)
    return [first, *groups, *experts, last, Unit("root", others, mesh, policy)]


def parallelize(
    model: PreTrainedModel,
    config: TrainConfig,
    dims: ParallelDims,
    memory: MemorySettings,
    beside: SequenceContext | None = None,
) -> ParallelModel:
    """Applies every technique to a model, which may be on the meta device, and shards it with FSDP2.

    `beside` is the context of a model of the same architecture that trains. This one then never runs backward.
    """
    parallel = apply_techniques(model, config, dims, memory, beside)
    if beside is not None:  # no backward pass frees its weights
        parallel = replace(parallel, units=[unit.freed_after_forward() for unit in parallel.units])
    ignored = [parameter for unit in parallel.units if unit.policy is None for parameter in unit.parameters]
    ignored += map(model.get_parameter, parallel.whole)
    empty = [parameter for parameter in model.parameters() if not parameter.numel()]
    for parameter in empty:  # FSDP2 cannot shard empty parameters, so it would not cast them
        parameter.data = parameter.data.to(getattr(torch, config.compute_dtype))
    ignored += empty
    shard_parameters(parallel.loss_model, parallel.units, ignored)
    if memory.state_on_host and dims.shard == 1 and not config.tiles_layers:
        # Tiled layers run for seconds, and need no prefetch.
        WeightPrefetch(layer_groups(parallel.units), dims.world.device.type)
    return parallel


def apply_techniques(
    model: PreTrainedModel,
    config: TrainConfig,
    dims: ParallelDims,
    memory: MemorySettings,
    beside: SequenceContext | None = None,
) -> ParallelModel:
    """Applies every technique except sharding, which DeepSpeed does itself. `beside`: see `parallelize`."""
    changes = changes_of(model)
    found, layers, device = units(model, config, dims, memory), decoder_layers(model), dims.world.device
    if beside is None:
        options = AttentionConfig.from_flags(config, device, dims.world.local_size)
        context = hf.enable(model, dims.sequence_mesh, options)
    else:
        context = hf.enable_beside(model, beside)
    if config.fp8 is not None:
        tokens = local_tokens(context.schedule, config.model_max_length, config.packing != "none")
        to_fp8(layers, config.fp8, config.fp8_emulate, tokens)
    mesh, compute_dtype = dims.expert_mesh, getattr(torch, config.compute_dtype)
    # A checkpoint gathers experts again by itself.
    gathers_again = memory.reshard_after_forward and config.remat_policy == "none"
    experts = None if mesh is None else expert_group(mesh, compute_dtype, gathers_again)
    choices = choices_of_policy(config.remat_policy, inspect_architecture(model.config).ends_with_mlps)
    fit(list(layers), choices, Ranks(experts=experts), changes)
    if mesh is not None:
        shard_experts(model, mesh)
    offload = apply_recomputation(layer_groups(found), final_norm(model), changes, config, device, memory)
    loss_model = LossModel(model, required_logit_transform(model), Stopwatch(device))
    whole = [] if config.compute_dtype == "float32" else [*float32_parameters(model)]
    return ParallelModel(loss_model, context, found, offload, whole)


def layer_groups(units: Sequence[Unit]) -> list[tuple[nn.Module, ...]]:
    """Returns the groups of neighbouring layers."""
    return [unit.modules for unit in units if unit.kind == "layers"]


def shard_parameters(root: nn.Module, units: Sequence[Unit], ignored: Sequence[nn.Parameter] = ()) -> None:
    """Shards `root`, which holds the model, with FSDP2, unit by unit.

    Shards are float32 and gathered in the compute dtype; gradients are reduced in float32. They are summed, not
    averaged, because the loss is already divided by the global number of valid tokens. Gradients on the GPU share the
    pool of activations. Parameters in `ignored` stay as they are.
    """
    # Without expandable segments a shared pool breaks into pieces, none of them large enough for a gradient.
    shares_pool = has_expandable_segments() and not any(unit.state_on_host for unit in units)
    for unit in units:
        if (policy := unit.policy) is None:
            continue
        modules = [root] if unit.kind == "root" else [*unit.modules]
        fully_shard(
            modules,
            mesh=unit.mesh,
            reshard_after_forward=policy.reshard_after_forward,
            mp_policy=policy.precision,
            offload_policy=policy.offload,
            ignored_params={*ignored} or None,
        )
        sharded: Any
        for sharded in modules:  # these setters do not recurse
            sharded.set_unshard_in_backward(policy.unshard_in_backward)
            if shares_pool and unit.mesh.device_type == "cuda":
                sharded.set_custom_reduce_scatter(ReduceScatterIntoSharedPool())
            if unit.mesh.size() > 1:  # a factor of 1 would cost a pass over the gradients
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)
