"""Common parts of the peers: the training job, data, weights and the measurement of steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.architecture.inspection import inspect_architecture
from lightseq.data.batches import Batch
from lightseq.distributed.parallel_dims import whole_tensor
from lightseq.distributed.stopwatch import DeviceTimestamp
from lightseq.distributed.world import World
from lightseq.models import random_weights, weights
from lightseq.parts import adapters
from lightseq.parts.adapters import Lora
from lightseq.parts.attention import layer_reaches
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.facts import heads_of
from lightseq.training.step_stats import StepResult

SEED = 0  # of weights and data
LEARNING_RATE = 1e-5
MAX_GATHERED_BYTES = 2**32  # of weights that stay gathered from the forward to the backward pass
CLIP_NORM = 1.0  # lightseq's default


@dataclass(frozen=True)
class Job:
    """Training job that every peer runs, with the same data, weights and optimizer."""

    config: PreTrainedConfig
    length: int  # of the sequence that all ranks share
    world: World
    learning_rate: float = LEARNING_RATE
    packed_rows: int | None = None  # length of the documents in each sequence; None: one document
    lora: Lora | None = None  # adapters to train; None: all weights
    load_in_4bit: bool = False  # the layers' linears beneath adapters

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of activations. Master weights are float32 in all peers."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def head_dim(self) -> int:
        return heads_of(self.config).dim

    @property
    def layer_class(self) -> str:
        """Returns the name of the layers' class, which FSDP2 wraps."""
        return inspect_architecture(self.config).layers[0].kind

    @property
    def reshards(self) -> bool:
        """Returns whether FSDP2 gathers weights again for the backward pass. Those of small models stay gathered."""
        return inspect_architecture(self.config).total * self.dtype.itemsize > MAX_GATHERED_BYTES

    @property
    def has_windows(self) -> bool:
        """Returns whether some layers have a sliding window."""
        return any(layer_reaches(self.config))

    @property
    def has_recurrences(self) -> bool:
        """Returns whether some layers mix tokens without attention."""
        return inspect_architecture(self.config).has_recurrences

    @property
    def takes_cudnn(self) -> bool:
        """Returns whether cuDNN, the fastest kernel of torch's SDPA, computes this model's attention and gradients."""
        return self.on_gpu and self.head_dim <= 128 and not self.has_windows

    @property
    def sdpa_facts(self) -> dict[str, str]:
        """Returns kernel and transport of peers that use torch's SDPA, which chooses where cuDNN cannot run."""
        kernel = "cudnn" if self.takes_cudnn else "sdpa"
        return {"kernel": kernel, "transport": "nccl" if self.on_gpu else "gloo"}

    def check_divides(self, parts: int, what: str) -> None:
        """Raises ValueError if the length is not divisible by `parts`."""
        if self.length % parts:
            raise ValueError(f"{what}: {self.length} tokens are not divisible by {parts}")

    def check_heads(self, what: str) -> None:
        """Raises ValueError if the heads are not divisible by the ranks."""
        heads, shared, ranks = self.config.num_attention_heads, self.config.num_key_value_heads, self.world.size
        if heads % ranks or shared % ranks:
            raise ValueError(f"{what}: {heads} query and {shared} key/value heads are not divisible by {ranks} ranks")

    def positions(self) -> Tensor:
        return torch.arange(self.length).unsqueeze(0)

    def on_device(self, x: Tensor) -> Tensor:
        """Copies to the device without waiting."""
        x = x.contiguous()
        return x.pin_memory().to(self.world.device, non_blocking=True) if self.on_gpu else x

    def local(self, x: Tensor) -> Tensor:
        """Returns this rank's contiguous part of a whole (batch, length) tensor, on its device."""
        return self.on_device(x.chunk(self.world.size, dim=1)[self.world.rank])

    def whole_model(self) -> PreTrainedModel:
        """Builds parameters on this device, equal on all ranks and for all implementations.

        They are float32 if they are trained, and in the compute dtype beneath adapters.
        """
        model = build_to_train(self.config)
        if self.lora:
            model.to(self.dtype)
        weights.materialize(model, self.world.device)
        random_weights.initialize(model, SEED)
        model.config.use_cache = False
        return model

    def initialize_adapters(self, model: PreTrainedModel) -> None:
        """Gives the adapters inside a model lightseq's values."""
        adapters.initialize(model, SEED)

    def adamw(self, model: torch.nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.0, fused=True)


@dataclass(frozen=True)
class StepOutcome:
    """Result of one optimizer step. Tensors are read only at the end of the run."""

    loss: Tensor  # this rank's part; the sum over ranks is the mean loss over the sequence
    grad_norm: Tensor  # before clipping


@dataclass(frozen=True)
class Peer:
    """An implementation set up on this rank. `facts` go into the record."""

    step: Callable[[Batch], StepOutcome]
    facts: Mapping[str, Any]
    sequences: int = 1  # of a step, over all ranks


@dataclass(frozen=True)
class TrainerPeer:
    """A trainer with its own loop, set up on this rank. `train` takes one step per batch and returns their numbers."""

    train: Callable[[Sequence[Batch]], dict[str, Any]]
    facts: Mapping[str, Any]


def plain_tensor(x: Tensor | float) -> Tensor:
    """Returns a scalar as a plain tensor without waiting for the device."""
    return whole_tensor(x.detach()) if isinstance(x, Tensor) else torch.tensor(float(x))


def measure(step: Callable[[int], StepOutcome | StepResult], steps: range, device: torch.device) -> dict[str, Any]:
    """Runs steps and returns the numbers of each.

    As in a trainer, the host runs at most one step ahead of the device.
    """
    reset_peak_memory(device)
    moments, outcomes = [DeviceTimestamp(device)], list[StepOutcome | StepResult]()
    for done, index in enumerate(steps):
        if done >= 2:
            moments[0].seconds_until(moments[done - 1])
        outcomes.append(step(index))
        moments.append(DeviceTimestamp(device))
    losses = torch.stack([outcome.loss.float().to(device) for outcome in outcomes])
    return step_numbers(moments, losses, [outcome.grad_norm.item() for outcome in outcomes], device)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def step_numbers(
    moments: Sequence[DeviceTimestamp], losses: Tensor, grad_norms: Sequence[float], device: torch.device
) -> dict[str, Any]:
    """Returns the numbers of every step, equal on all ranks.

    `moments` are the start of the first step and the end of every step, and `losses` this rank's shares of the losses.
    The slowest rank's seconds count, and the peak memory of the fullest rank during these steps.
    """
    seconds = torch.tensor([a.seconds_until(b) for a, b in pairwise(moments)], device=device)
    peaks = torch.zeros(2, dtype=torch.int64, device=device)
    if device.type == "cuda":
        peaks[0], peaks[1] = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(losses)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    allocated, reserved = (int(x) or None for x in peaks.tolist())
    return {
        "step_seconds": seconds.tolist(),
        "losses": losses.tolist(),
        "grad_norms": list(grad_norms),
        "peak_memory_allocated_bytes": allocated,
        "peak_memory_reserved_bytes": reserved,
    }
