"""Every technique that turns a Hugging Face Llama into one trained across ranks, in order, on one page."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from lightseq import hf
from lightseq.attention import SequenceContext
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
    compile: bool = False
    deterministic: bool = False
    gpus_per_host: int | None = None


class LossModel(nn.Module):
    """A causal language model that returns its loss: the unit whose forward is one step's forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        """The sum of -log p(label) over this rank's valid labels; all three (batch, local sequence), labels shifted."""
        output = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return cross_entropy_sum(output.last_hidden_state, self.model.lm_head.weight, labels)


def parallelize(
    model: PreTrainedModel, meshes: Meshes, device: torch.device, techniques: Techniques
) -> tuple[LossModel, SequenceContext]:
    """Distributed attention, rematerialisation, compilation, sharding. The model may be on the meta device."""
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
    apply_remat(layers, techniques.remat)
    if techniques.compile:
        for layer in layers:
            layer.forward = torch.compile(layer.forward)
    loss_model = LossModel(model)
    shard_parameters(loss_model, layers, meshes.parameters, techniques.compute_dtype)
    return loss_model, context


def shard_parameters(root: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2 per layer, the rest as one unit. Float32 shards, gathered in the compute dtype; gradients add in float32.

    The sum is the gradient: the loss is divided by the global number of valid tokens before the backward pass.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(root, mesh=mesh, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # these setters do not reach the modules below
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
