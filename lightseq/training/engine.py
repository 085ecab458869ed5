"""What holds a model across ranks, differentiates and updates it: FSDP2 here, DeepSpeed in deepspeed_engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.checkpoint import checkpoints, resume, state_files
from lightseq.config.checks import EIGHT_BIT
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.mesh import Meshes, World, local_part, on_all_ranks, use_host_cores
from lightseq.distributed.stopwatch import Stopwatch
from lightseq.memory.host_adamw import compute_updates_on
from lightseq.memory.offload import Offload
from lightseq.memory.pinned import PinnedMemory
from lightseq.models import adapters, weights
from lightseq.parallelize import Techniques, parallelize
from lightseq.training.optimization import (
    LossScaler,
    clip,
    first_sick,
    gradient_norms,
    local_gradients,
    make_optimizer,
    make_state,
    step_if_finite,
)
from lightseq.training.setup import Inputs

FSDP = {
    "full_shard": "FSDP2 over all ranks",
    "hybrid_shard": "FSDP2 inside a host, copies across",
    "ddp": "a copy on every rank",
}


class Update(NamedTuple):
    """What one rank knows of an update without waiting for the device."""

    norm: Tensor  # of the gradients over all ranks, before clipping
    # The first parameter whose gradient was not finite, by its number, or UNNAMED; then the step was skipped. -1: none.
    sick: Tensor


class Engine(Protocol):
    """The whole model on all ranks, weights included."""

    model: PreTrainedModel
    loss_model: nn.Module  # ids, positions, labels -> this rank's sum of losses
    context: SequenceContext
    optimizer: Any  # its groups carry the learning rate
    parameters: str  # how they are held, in words
    offload: Offload | None  # of what layers keep
    stopwatch: Stopwatch  # of what every rank does alone

    def backward(self, share: Tensor, last: bool) -> None:
        """Adds the gradients of a share of the loss; `last` of the shares that an update takes in."""
        ...

    def update(self) -> "Update":
        """Clips, steps and clears."""
        ...

    def try_memory(self, loss: Callable[[], Tensor]) -> None:
        """Runs a forward and a backward pass beside the optimizer's state, for the memory that they take.

        `loss` is zero, and so are its gradients: no later step differs for it.
        """
        ...

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in float32, gathered from all ranks; each rank goes through all of them."""
        ...

    def tensors(self) -> dict[str, Tensor] | None:
        """What a checkpoint holds of it on this rank, by name; None: it writes files of its own."""
        ...

    def save_state(self, directory: Path) -> None:
        """Writes the files of its own."""
        ...

    def restore(self, checkpoint_directory: Path) -> None: ...

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of the engine in a line."""
        ...


class FsdpEngine:
    """FSDP2, or copies on every rank, with the optimizers of torch and torchao."""

    def __init__(
        self, config: TrainConfig, inputs: Inputs, world: World, meshes: Meshes, techniques: Techniques
    ) -> None:
        self.parameters, self._world = FSDP[config.fsdp_mode], world
        self._max_grad_norm = config.max_grad_norm
        self._shards = meshes.parameters["shard"].get_group()
        names = meshes.parameters.mesh_dim_names or ()
        self._copy = meshes.parameters.get_local_rank("replicate") if "replicate" in names else 0
        self.model = weights.build_on_meta(inputs.model_config)
        adapters.add_adapters(self.model, inputs.lora, techniques.compute_dtype)
        loss_model, self.context = on_all_ranks(
            world, lambda: parallelize(self.model, meshes, world.device, techniques)
        )
        self.loss_model: nn.Module = loss_model
        self.offload, self.stopwatch = loss_model.offload, loss_model.stopwatch
        self._sums_every_time = on_host = techniques.state_on_host
        if on_host:
            last = techniques.state_stays - 1
            here = "layer 0" if last == 0 else f"layers 0-{last}"
            self.parameters += ", in host memory" + (f" but for {here}" if last >= 0 else "")
        if on_host or self.offload is not None:
            use_host_cores(world)
        on_all_ranks(world, lambda: self._materialize(world, techniques))
        on_all_ranks(world, lambda: fill_weights(self.model, inputs, config.seed, device=world.device))
        self.optimizer: Any = make_optimizer(self.model, config)
        if on_host and world.device.type == "cuda" and config.optim in EIGHT_BIT:
            compute_updates_on(world.device, self.optimizer)
        self._scaler = LossScaler() if config.fp16 else None

    def _materialize(self, world: World, techniques: Techniques) -> None:
        """On the host weights are page-locked in place, where FSDP2 would copy each into a power of two of bytes."""
        self._locked, host = PinnedMemory(), torch.device("cpu")
        layers: Any = self.model.model.layers
        here = {id(p) for layer in layers[: techniques.state_stays] for p in layer.parameters()}

        def place(parameter: Tensor) -> torch.device:
            return host if techniques.state_on_host and id(parameter) not in here else world.device

        def made(local: Tensor) -> None:
            if local.device.type != world.device.type:
                self._locked.lock_new(local)

        weights.materialize(self.model, world.device, place, made, self.loss_model)
        self._locked.retain_only(local_part(p) for p in self.model.parameters())

    def backward(self, share: Tensor, last: bool) -> None:
        """Shards of gradients are summed every time, or each rank would hold whole ones; their copies' sum can wait.

        Until it comes FSDP2 holds them on the device, where those that go to the host have no room.
        """
        sums = last or self._sums_every_time
        self.loss_model.set_requires_all_reduce(sums)  # type: ignore[operator]  # FSDP2 made it an FSDPModule
        (share * (self._scaler.scale if self._scaler else 1.0)).backward()

    def update(self) -> Update:
        grads = local_gradients(self.model.parameters())
        norms = gradient_norms(grads, self._shards)
        norm, take = norms.norm(), True
        if self._scaler is not None:
            norm, take = self._scaler.unscale(grads, norm)
        if take:
            clip(grads, norm, self._max_grad_norm, self.optimizer)
            step_if_finite(self.optimizer, norm)
        self.optimizer.zero_grad()
        return Update(norm, first_sick(norms))

    def try_memory(self, loss: Callable[[], Tensor]) -> None:
        fresh = not self.optimizer.state
        if fresh:
            make_state(self.optimizer, only=self._world.device)
        self.backward(loss(), last=True)
        self.optimizer.zero_grad()
        if fresh:
            self.optimizer.state.clear()  # it has counted a step

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return weights.full_parameters(self.model)

    def tensors(self) -> dict[str, Tensor] | None:
        """Of several copies, the first is saved."""
        return {} if self._copy else state_files.state_tensors(self.model, self.optimizer)

    def save_state(self, directory: Path) -> None:
        raise AssertionError("the saver writes the tensors")

    def restore(self, checkpoint_directory: Path) -> None:
        on_all_ranks(self._world, lambda: make_state(self.optimizer))  # before ranks wait for one another
        resume.restore(checkpoint_directory, self.model, self.optimizer)
        facts = checkpoints.read_trainer_state(checkpoint_directory)
        if self._scaler is not None and facts.get("scaler"):
            self._scaler = LossScaler(**facts["scaler"])

    def facts(self) -> dict[str, Any]:
        return {"scaler": vars(self._scaler) if self._scaler else None}


def fill_weights(
    model: PreTrainedModel,
    inputs: Inputs,
    seed: int,
    fill: weights.FillParameter = weights.fill,
    device: torch.device | None = None,
) -> None:
    """Weights from where the run takes them, fresh ones drawn on `device`. Raises ValueError if they cannot be read."""
    if inputs.resume_from is not None and inputs.lora is None:
        return  # the checkpoint's follow
    adapters.initialize(model, seed, fill, device)
    if inputs.weights is None:
        weights.initialize(model, seed, fill, device)
    else:
        weights.load_or_refuse(model, inputs.weights, "--model_name_or_path", fill)
