"""Engine protocol: what shards a model, runs its backward pass and updates it. build.py chooses an engine."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.parallel_dims import ParallelDims
from lightseq.distributed.stopwatch import Stopwatch
from lightseq.memory.offload import Offload
from lightseq.memory.recomputation import MemorySettings
from lightseq.models import random_weights, weights
from lightseq.parallelize import Unit
from lightseq.parts import adapter_files, adapters
from lightseq.parts.routers import Routers
from lightseq.plan.plan import Plan
from lightseq.training.inputs import Inputs


class Update(NamedTuple):
    """Result of an optimizer update, as tensors on the device."""

    norm: Tensor  # global gradient norm before clipping
    # -1, or if the step was skipped, the index of the first trained parameter with a non-finite gradient, or
    # UNKNOWN_PARAMETER.
    nonfinite: Tensor


class Engine(Protocol):
    """Model, optimizer and parallelism of a run, on one rank."""

    model: PreTrainedModel
    loss_model: nn.Module  # ids, positions, labels -> this rank's sum of losses
    frozen: Mapping[str, nn.Module]  # models that the objective needs beside it, called alike
    context: SequenceContext
    units: list[Unit]
    optimizer: Any  # its groups hold the learning rate
    dims: ParallelDims
    config: TrainConfig  # the flags, with the planner's choices
    memory: MemorySettings
    plan: Plan | None  # source of the memory settings; None: no planner decided, as on CPUs
    sharding_description: str  # sharding and location of the parameters, for display
    offload: Offload | None  # moves activations to the host
    routers: Routers | None  # only if a flag balances experts
    stopwatch: Stopwatch  # times the work that waits for no other rank

    def backward(self, share: Tensor, last: bool) -> None:
        """Adds the gradients of a share of the loss. `last`: the final share before the update."""
        ...

    def update(self) -> Update:
        """Clips gradients, takes an optimizer step and clears gradients."""
        ...

    def try_memory(self, loss: Callable[[], Tensor]) -> None:
        """Runs a forward and a backward pass next to the optimizer state, to allocate the memory they need.

        `loss` must be zero, so that its gradients are zero and do not affect later steps.
        """
        ...

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter in float32, gathered from all ranks. Every rank must exhaust the iterator."""
        ...

    def tensors(self) -> dict[str, Tensor] | None:
        """Returns this rank's checkpoint tensors by name, or None if the engine writes its own files."""
        ...

    def save_state(self, directory: Path) -> None:
        """Writes the engine's own files."""
        ...

    def restore(self, checkpoint_directory: Path) -> None:
        """Restores weights and optimizer state from a checkpoint."""
        ...

    def facts(self) -> dict[str, Any]:
        """Returns the engine's entries in trainer_state.json."""
        ...


def fill_weights(
    model: PreTrainedModel,
    inputs: Inputs,
    seed: int,
    fill: weights.FillParameter = weights.fill,
    device: torch.device | None = None,
    flag: str = "--model_name_or_path",
) -> None:
    """Loads the weights that `flag` names, or draws random ones on `device`. Raises ValueError for unreadable ones."""
    if inputs.resume_from is not None and inputs.lora is None:
        return  # the checkpoint replaces them
    if inputs.lora_adapter is not None and inputs.resume_from is None:
        adapter_files.load(model, inputs.lora_adapter, fill)
    else:
        adapters.initialize(model, seed, fill, device)
    if inputs.weights is None:
        random_weights.initialize(model, seed, fill, device)
    else:
        weights.load_or_refuse(model, inputs.weights, flag, fill)
