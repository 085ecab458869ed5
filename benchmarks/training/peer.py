"""What a peer is: one that trains a given model, a step at a time, on this rank; and what the peers share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, PreTrainedModel

from lightseq.data.batches import Batch
from lightseq.distributed.mesh import World
from lightseq.models import weights

CLIP_NORM = 1.0  # as lightseq's default is


@dataclass(frozen=True)
class Job:
    """What every peer is asked to do, with the same data, weights and optimizer."""

    config: LlamaConfig
    length: int  # of the one sequence, which all ranks share
    world: World
    learning_rate: float
    seed: int
    compile: bool  # honoured by peers that compile at all

    @property
    def dtype(self) -> torch.dtype:
        """Activations'. Master weights are float32 for everybody."""
        return torch.bfloat16 if self.world.device.type == "cuda" else torch.float32

    @property
    def head_dim(self) -> int:
        return self.config.head_dim or self.config.hidden_size // self.config.num_attention_heads

    def check_divides(self, parts: int, what: str) -> None:
        """Raises ValueError where a peer cannot cut the sequence."""
        if self.length % parts:
            raise ValueError(f"{what}: {self.length} tokens do not divide by {parts}")

    def check_heads(self, what: str) -> None:
        """Raises ValueError where a peer cannot split the heads."""
        heads, shared = self.config.num_attention_heads, self.config.num_key_value_heads
        if heads % self.world.size or shared % self.world.size:
            raise ValueError(
                f"{what}: {heads} query and {shared} key/value heads do not divide by {self.world.size} ranks"
            )


@dataclass(frozen=True)
class StepOutcome:
    """One optimizer step on this rank; neither tensor is read before the run ends."""

    loss: Tensor  # this rank's share: the sum over ranks is the mean loss over the sequence
    grad_norm: Tensor  # before clipping


@dataclass(frozen=True)
class Peer:
    """An implementation that is set up on this rank. `facts` are what the record says of it."""

    step: Callable[[Batch], StepOutcome]
    facts: Mapping[str, Any]


def whole_model(job: Job) -> PreTrainedModel:
    """All parameters on this device, float32, the same on every rank and for every implementation, lightseq's too."""
    model = weights.build_on_meta(job.config)
    weights.materialize(model, job.world.device)
    weights.initialize(model, job.seed)
    model.config.use_cache = False
    return model


def adamw(model: torch.nn.Module, job: Job) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0, fused=True)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    return x.contiguous().pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.contiguous()


def local(x: Tensor, job: Job) -> Tensor:
    """This rank's neighbouring tokens of a whole (batch, length) tensor, on its device."""
    return on_device(x.chunk(job.world.size, dim=1)[job.world.rank], job.world.device)


def positions(job: Job) -> Tensor:
    return torch.arange(job.length).unsqueeze(0)


def plain_tensor(x: Tensor | float) -> Tensor:
    """A scalar without its distribution, and without a wait for the device."""
    if isinstance(x, DTensor):
        return x.full_tensor()
    return x.detach() if isinstance(x, Tensor) else torch.tensor(float(x))


def sdpa_facts(on_gpu: bool) -> dict[str, str]:
    """What runs attention, and what carries it, where a peer is left to torch's SDPA; forced to cuDNN on GPUs."""
    return {"kernel": "cudnn", "transport": "nccl"} if on_gpu else {"kernel": "sdpa", "transport": "gloo"}
