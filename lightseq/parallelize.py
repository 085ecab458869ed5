"""Every technique that turns a Hugging Face Llama into one trained across ranks, in order, on one page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightseq.utils import quiet_transformers  # noqa: F401  before what follows imports transformers

# isort: split
from transformers import PreTrainedModel

from lightseq import hf
from lightseq.attention.context import Documents, SequenceContext
from lightseq.config.remat_policies import STORE_LINEARS, STORES_MLP, keeps_gathered
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.mesh import Meshes
from lightseq.distributed.stopwatch import Stopwatch
from lightseq.memory.offload import HostBufferPool, Offload, layers_in_flight
from lightseq.memory.planner.placement import KEEP, OFFLOAD, OFFLOADED, RECOMPUTED
from lightseq.memory.remat import apply_remat, changed_forwards, checkpoint_groups
from lightseq.memory.weight_prefetch import WeightPrefetch
from lightseq.models.architecture import inspect_architecture
from lightseq.modules.fp8 import FP8_COMPILE_OPTIONS, to_fp8
from lightseq.modules.loss import CHUNK_TOKENS, cross_entropy_sum
from lightseq.modules.mlp import shrunk, tile_mlps
from lightseq.modules.projections import store_projections
from lightseq.modules.tiled import tile_layers
from lightseq.schedule.documents import local_tokens

ReadOptions = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden states, the head's weight and labels
MOST_GRAPHS = 64  # of a layer: lengths of a batch, in training and in evaluation, under two policies, and some more
# Of a rank that rehearses; with more, tiled operations run their first tile only, and host memory is counted.
MOST_WHOLE_TOKENS = 2**18


@dataclass(frozen=True)
class Techniques:
    """What `parallelize` applies; names and values are those of the command line."""

    length: int
    schedule: str = "auto"
    kernel: str = "auto"
    transport: str = "auto"
    ulysses_size: int | None = None
    remat: str = "attention"
    layers_per_checkpoint: int = 1
    tile_layers: bool = False
    offload: str = "none"
    state_on_host: bool = False  # weights, gradients and the optimizer's state
    state_stays: int = 0  # but for the first so many layers
    placement: tuple[str, ...] | None = None  # the state of every layer, with offload "auto"
    host_memory_bytes: float = math.inf
    compute_dtype: torch.dtype = torch.float32
    fp8: str | None = None
    fp8_emulate: bool = False
    compile: bool = False
    deterministic: bool = False
    gpus_per_host: int | None = None
    stands_for: int | None = None  # the length of a longer run, whose schedule and (shrunk) tiles are taken
    packed: bool = False  # sequences hold several documents
    rehearses: bool = False  # attention's arithmetic is left out, and of long sequences most tiles


def techniques_of(
    config: TrainConfig,
    placement: tuple[str, ...] | None,
    state_on_host: bool,
    state_stays: int,
    host_memory_bytes: float,
    gpus_per_host: int,
    rehearses: bool = False,
    stands_for: int | None = None,
) -> Techniques:
    """What a run's flags ask for, on the hosts it found and by the plan it has."""
    return Techniques(
        length=config.model_max_length,
        stands_for=stands_for,
        schedule=config.schedule,
        kernel=config.kernel_name,
        transport=config.transport,
        ulysses_size=config.ulysses_size,
        remat=config.remat_policy,
        layers_per_checkpoint=config.layers_per_checkpoint,
        tile_layers=config.tile_layers,
        offload=config.offload,
        state_on_host=state_on_host,
        state_stays=state_stays,
        placement=placement,
        host_memory_bytes=host_memory_bytes,
        compute_dtype=getattr(torch, config.compute_dtype),
        fp8=config.fp8,
        fp8_emulate=config.fp8_emulate,
        compile=config.torch_compile,
        deterministic=config.deterministic,
        gpus_per_host=gpus_per_host,
        packed=config.packing != "none",
        rehearses=rehearses,
    )


class LossModel(nn.Module):
    """A causal language model that returns its loss: the unit whose forward is one step's forward."""

    def __init__(
        self,
        model: PreTrainedModel,
        stopwatch: Stopwatch,
        offload: Offload | None = None,
        first_chunk_only: bool = False,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__()
        self.model = model
        self.offload = offload
        self.stopwatch = stopwatch  # of the loss: every rank has as many tokens
        head: Any = model.lm_head
        head.forward = partial(
            _head_loss, head, stopwatch, first_chunk_only, chunk_tokens
        )  # the call stays: what FSDP hooks to it runs around the loss

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        documents: Documents | None = None,
        read: ReadOptions | None = None,
    ) -> Tensor:
        """The sum of -log p(label) over this rank's valid labels; all three (batch, local sequence), labels shifted.

        `documents` are several in one sequence. Evaluations read something else off the hidden states.
        """
        several = {} if documents is None else {"documents": documents}
        output = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **several)
        return self.model.lm_head(output.last_hidden_state, labels, read)


def _head_loss(
    head: nn.Linear,
    stopwatch: Stopwatch,
    first_chunk_only: bool,
    chunk_tokens: int,
    hidden: Tensor,
    labels: Tensor,
    read: ReadOptions | None,
) -> Tensor:
    if read is not None:
        return read(hidden, head.weight, labels)
    with stopwatch.lap():
        return cross_entropy_sum(hidden, head.weight, labels, chunk_tokens, first_chunk_only)


def parallelize(
    model: PreTrainedModel, meshes: Meshes, device: torch.device, techniques: Techniques
) -> tuple[LossModel, SequenceContext]:
    """Distributed attention, FP8, rematerialisation, compilation, sharding. The model may be on the meta device."""
    loss_model, context = transform(model, meshes, device, techniques)
    groups, on_host = _groups(model.model.layers, techniques), techniques.state_on_host
    staying = -(-techniques.state_stays // techniques.layers_per_checkpoint)
    shard_parameters(loss_model, model, meshes.parameters, techniques.compute_dtype, groups, on_host, staying)
    alone = meshes.parameters.size(-1) == 1
    if on_host and alone and not techniques.tile_layers:  # layers over tiles compute for seconds
        WeightPrefetch(groups, device.type)
    return loss_model, context


def transform(
    model: PreTrainedModel, meshes: Meshes, device: torch.device, techniques: Techniques
) -> tuple[LossModel, SequenceContext]:
    """All of it but the sharding."""
    layers: Any = model.model.layers
    context = hf.enable(
        model,
        meshes.sequence,
        schedule=techniques.schedule,
        kernel=techniques.kernel,
        transport=techniques.transport,
        ulysses_size=techniques.ulysses_size,
        dtype=techniques.compute_dtype,
        device=device,
        length=techniques.stands_for or techniques.length,
        deterministic=techniques.deterministic,
        gpus_per_host=techniques.gpus_per_host,
        packed=techniques.packed,
        keep_gathered=keeps_gathered(techniques.remat),
    )
    if techniques.fp8 is not None:
        tokens = local_tokens(context.schedule, techniques.length, techniques.packed)
        to_fp8(layers, techniques.fp8, techniques.fp8_emulate, tokens)
    shrink = (techniques.stands_for or techniques.length) / techniques.length
    first_tile_only = techniques.rehearses and techniques.length > MOST_WHOLE_TOKENS * context.layout.world
    if techniques.remat != "none":
        last = inspect_architecture(model.config).mlp_is_last
        tile_mlps(layers, first_tile_only, shrink, techniques.remat in STORES_MLP, ends_layer=last)
    if techniques.remat == STORE_LINEARS:
        store_projections(layers)
    offload, inner = _offloads(techniques, device, first_tile_only)
    states, options = _states(techniques, len(layers)), FP8_COMPILE_OPTIONS if techniques.fp8 else None
    # A graph for each length of a batch: one for all lengths would be slower at each.
    compiled = partial(torch.compile, dynamic=False, options=options) if techniques.compile else lambda forward: forward
    if techniques.compile:
        torch._dynamo.config.recompile_limit = MOST_GRAPHS

    def rematerialize(chosen: Sequence[nn.Module], policy: str) -> None:
        if techniques.tile_layers:
            tile_layers(chosen, policy == "attention", techniques.compile, first_tile_only, shrink, options)
        else:
            apply_remat(chosen, policy, techniques.compile, inner or offload)
            for layer in chosen:
                layer.forward = compiled(layer.forward)  # type: ignore[method-assign]

    groups, lasts_again = _groups(layers, techniques), None
    if techniques.layers_per_checkpoint > 1 and techniques.remat == "full":  # `checkpoint_groups` says why
        lasts = [group[-1] for group in groups]
        lasts_again = changed_forwards(lasts, lambda: rematerialize(lasts, "attention"))
    for policy, again in (("full", True), (techniques.remat, False)):  # all layers at once: they compile as one
        rematerialize([x for x, state in zip(layers, states, strict=True) if (state in RECOMPUTED) == again], policy)
    model.model.norm.forward = compiled(model.model.norm.forward)
    if techniques.layers_per_checkpoint > 1:
        checkpoint_groups(groups, inner, lasts_again)
    if offload is not None:
        firsts = [group[0] for group in groups]
        staying = [
            first for first, state in zip(firsts, states[:: len(groups[0])], strict=True) if state not in OFFLOADED
        ]
        if len(staying) < len(firsts):
            offload.wrap(firsts[:-1], firsts[-1], staying)
    return LossModel(model, Stopwatch(device), offload, first_tile_only, shrunk(CHUNK_TOKENS, shrink)), context


def _states(techniques: Techniques, layers: int) -> tuple[str, ...]:
    """Of every layer what it keeps, and where. The backward pass begins with the last group: what it keeps stays."""
    if techniques.placement is not None:
        return techniques.placement
    size, offloads = techniques.layers_per_checkpoint, techniques.offload in ("activations", "both")
    return tuple(OFFLOAD if offloads and i % size == 0 and i + size < layers else KEEP for i in range(layers))


def _groups(layers: Any, techniques: Techniques) -> list[list[nn.Module]]:
    """Neighbouring layers that share a checkpoint, and a unit of FSDP2."""
    size = techniques.layers_per_checkpoint
    return [list(layers[start : start + size]) for start in range(0, len(layers), size)]


def _offloads(techniques: Techniques, device: torch.device, counts_only: bool) -> tuple[Offload | None, Offload | None]:
    """For what waits from the forward to the backward pass, and for what waits while a group of layers runs again."""
    if techniques.offload not in ("activations", "both") and not set(techniques.placement or ()) & set(OFFLOADED):
        return None, None
    memory = HostBufferPool(techniques.host_memory_bytes, device.type == "cuda", counts_only)
    make = partial(Offload, device, memory, layers_in_flight(techniques.tile_layers))
    return make(), make() if techniques.layers_per_checkpoint > 1 else None


def shard_parameters(
    root: nn.Module,
    model: PreTrainedModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    groups: Sequence[list[nn.Module]],
    on_host: bool = False,
    staying: int = 0,
) -> None:
    """FSDP2 on `root`, which holds the model: a unit for every group of layers, the embeddings and the head.

    Float32 shards, gathered in the compute dtype; gradients add in float32. The sum is the gradient: the loss is
    divided by the global number of valid tokens before the backward pass. Embeddings that are the head too stay
    gathered from one end of the step to the other, with the root. `on_host` leaves the shards, and with them their
    gradients and the optimizer's state, in host memory, but for the first groups `staying`.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = ends[0].weight is ends[1].weight
    for unit in groups[:staying]:
        fully_shard(unit, **options)
    for unit in [*groups[staying:], *([] if tied else [[end] for end in ends])]:
        fully_shard(unit, offload_policy=place, **options)
    fully_shard(root, offload_policy=place, **options)
    if not tied:
        for end in ends:  # a lookup has no use for its table in the backward pass, nor has a loss that is done with it
            end.set_unshard_in_backward(False)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # these setters do not reach the modules below
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
