"""Every technique that turns a Hugging Face Llama into one trained across ranks, in order, on one page."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from lightseq import hf
from lightseq.attention import SequenceContext
from lightseq.fp8 import to_fp8
from lightseq.loss import cross_entropy_sum
from lightseq.mesh import Meshes
from lightseq.remat import apply_remat


@dataclass(frozen=True)
class Techniques:
    """What `parallelize` applies; names and values are those of the command line."""

    length: int
    schedule: str = "auto"
    kernel: str = "auto"
    transport: str = "auto"
    ulysses_size: int | None = None
    remat: str = "attention"
    compute_dtype: torch.dtype = torch.float32
    fp8: str | None = None
    fp8_emulate: bool = False
    compile: bool = False
    deterministic: bool = False
    gpus_per_host: int | None = None


class LossModel(nn.Module):
    """A causal language model that returns its loss: the unit whose forward is one step's forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        head: Any = model.lm_head
        head.forward = partial(_head_loss, head)  # the call stays: what FSDP hooks to it runs around the loss

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        """The sum of -log p(label) over this rank's valid labels; all three (batch, local sequence), labels shifted."""
        output = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return self.model.lm_head(output.last_hidden_state, labels)


def _head_loss(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy_sum(hidden, head.weight, labels)


def parallelize(
    model: PreTrainedModel, meshes: Meshes, device: torch.device, techniques: Techniques
) -> tuple[LossModel, SequenceContext]:
    """Distributed attention, FP8, rematerialisation, compilation, sharding. The model may be on the meta device."""
    loss_model, context = transform(model, meshes, device, techniques)
    shard_parameters(loss_model, model, meshes.parameters, techniques.compute_dtype)
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
        length=techniques.length,
        deterministic=techniques.deterministic,
        gpus_per_host=techniques.gpus_per_host,
    )
    if techniques.fp8 is not None:
        local_tokens = context.layout.padded_length(techniques.length) // context.layout.world
        to_fp8(layers, techniques.fp8, techniques.fp8_emulate, local_tokens)
    apply_remat(layers, techniques.remat)
    if techniques.compile:
        for module in (*layers, model.model.norm):
            module.forward = torch.compile(module.forward)
    return LossModel(model), context


def shard_parameters(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2 on `root`, which holds the model: a unit for every layer, the embeddings and the head.

    Float32 shards, gathered in the compute dtype; gradients add in float32. The sum is the gradient: the loss is
    divided by the global number of valid tokens before the backward pass. Embeddings that are the head too stay
    gathered from one end of the step to the other, with the root.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers: Any = model.model.layers
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = ends[0].weight is ends[1].weight
    for unit in [*layers, *([] if tied else ends)]:
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    fully_shard(root, mesh=mesh, mp_policy=precision)
    if not tied:
        for end in ends:  # a lookup has no use for its table in the backward pass, nor has a loss that is done with it
            end.set_unshard_in_backward(False)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # these setters do not reach the modules below
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
