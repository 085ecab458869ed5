"""The engine that holds a model across ranks, differentiates and updates it: FSDP2 here, DeepSpeed in deepspeed.py."""

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
from lightseq.distributed.mesh import (
    Meshes,
    World,
    local_part,
    make_deterministic,
    make_meshes,
    on_all_ranks,
    use_host_cores,
)
from lightseq.distributed.stopwatch import Stopwatch
from lightseq.memory.host_adamw import compute_updates_on
from lightseq.memory.offload import Offload
from lightseq.memory.pinned import PinnedMemory
from lightseq.memory.planner.advice import auto_notes, out_of_memory
from lightseq.memory.planner.breakdown import Breakdown, kept_activations, loss_bytes, state_bytes
from lightseq.memory.planner.plan import host_memory_for_layers, plan_of_layers
from lightseq.memory.planner.run import planned_run
from lightseq.models import adapters, weights
from lightseq.parallelize import MemoryPlan, parallelize
from lightseq.schedule.documents import local_tokens
from lightseq.training.errors import explained_out_of_memory
from lightseq.training.optimization import (
    LossScaler,
    clip,
    first_nonfinite,
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
    """Facts of an update that one rank has without waiting for the device."""

    norm: Tensor  # of the gradients over all ranks, before clipping
    # Number of the first parameter whose gradient was not finite, or UNNAMED: the step was skipped. -1: none.
    nonfinite: Tensor


class Engine(Protocol):
    """The whole model on all ranks, weights included."""

    model: PreTrainedModel
    loss_model: nn.Module  # ids, positions, labels -> this rank's sum of losses
    context: SequenceContext
    optimizer: Any  # its groups carry the learning rate
    meshes: Meshes
    memory: MemoryPlan
    parameters: str  # how they are held, in words
    offload: Offload | None  # of activations
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
        """Yields every parameter in float32, gathered from all ranks; each rank goes through all of them."""
        ...

    def tensors(self) -> dict[str, Tensor] | None:
        """Returns this rank's tensors of a checkpoint, by name; None: the engine writes files of its own."""
        ...

    def save_state(self, directory: Path) -> None:
        """Writes the engine's own files."""
        ...

    def restore(self, checkpoint_directory: Path) -> None:
        """Takes weights and optimizer state from a checkpoint."""
        ...

    def facts(self) -> dict[str, Any]:
        """Returns what a checkpoint notes of the engine."""
        ...


def build_engine(config: TrainConfig, inputs: Inputs, world: World) -> Engine:
    """Builds the model across ranks, with its optimizer, and fills it from the weights or the checkpoint given.

    A run that finds too little memory ends here, explained.
    """
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    if config.deterministic:
        make_deterministic()
    meshes = on_all_ranks(world, lambda: make_meshes(world, inputs.sequence_size, config.fsdp_mode))
    memory = plan_memory(config, inputs, world)
    with explained_out_of_memory(world, None, lambda: out_of_memory(config, inputs.model_config, world)):
        if inputs.deepspeed is None:
            engine: Engine = FsdpEngine(config, inputs, world, meshes, memory)
        else:
            from lightseq.training.deepspeed import DeepSpeedEngine  # an engine too: it imports this file

            engine = DeepSpeedEngine(config, inputs, world, meshes, memory)
    resume_engine(engine, config, inputs, world)
    return engine


def plan_memory(config: TrainConfig, inputs: Inputs, world: World) -> MemoryPlan:
    """Decides what waits in host memory: the planner does with --offload auto, else the flags say."""
    plan = plan_of_layers(config, inputs.model_config, world)
    run = plan.run if plan else planned_run(config, inputs.model_config, world)
    return MemoryPlan(
        state_on_host=run.state_on_host,
        layers_with_state_on_gpu=run.layers_with_state_on_gpu,
        placement=plan.placement if plan else None,
        activation_bytes=host_memory_for_layers(run, world, inputs.deepspeed),
        run=run,
        notes=tuple(auto_notes(plan)) if plan else (),
    )


def resume_engine(engine: Engine, config: TrainConfig, inputs: Inputs, world: World) -> None:
    """Restores the checkpoint that the run goes on from, if any: weights, optimizer and randomness."""
    if (directory := inputs.resume_from) is None:
        return

    def restore() -> None:
        engine.restore(directory)
        resume.restore_rng_state(directory, world)

    with explained_out_of_memory(world, None, lambda: out_of_memory(config, inputs.model_config, world)):
        on_all_ranks(world, restore)


def tokens_per_forward(config: TrainConfig, context: SequenceContext) -> int:
    """Returns the tokens of one rank in a forward pass of the longest batch."""
    tokens = local_tokens(context.schedule, config.model_max_length, config.packing != "none")
    return tokens * config.per_device_train_batch_size


def memory_parts(
    config: TrainConfig, engine: Engine, device: torch.device, taken_by_forward: int | None = None
) -> Breakdown:
    """Returns what the peak of device memory so far was made of.

    `taken_by_forward` is what a forward pass left taken, where measured.
    """
    tokens, model = tokens_per_forward(config, engine.context), engine.model.config
    states = state_bytes(engine.model, config, engine.memory.state_on_host)
    logits, gradients = loss_bytes(model, config, tokens)
    kept = kept_activations(model, config, tokens)
    if taken_by_forward is not None:
        kept = max(0, taken_by_forward - gradients)
    elif engine.offload is not None:
        kept = max(0, kept - engine.offload.memory.allocated_bytes)
    transport = engine.context.transport
    buffers, held = transport.buffer_bytes, transport.buffer_bytes + transport.recorded_bytes
    peak = torch.cuda.max_memory_allocated(device) + held if device.type == "cuda" else 0
    working = max(0, peak - sum(states) - kept - logits - gradients - buffers)
    return Breakdown(*states, kept, logits + gradients, buffers, working)


class FsdpEngine:
    """FSDP2, or copies on every rank, with the optimizers of torch and torchao."""

    def __init__(self, config: TrainConfig, inputs: Inputs, world: World, meshes: Meshes, memory: MemoryPlan) -> None:
        self.meshes, self.memory, self._world = meshes, memory, world
        self.parameters = _held(config, memory)
        self._max_grad_norm = config.max_grad_norm
        self._shards = meshes.parameters["shard"].get_group()
        names = meshes.parameters.mesh_dim_names or ()
        self._copy = meshes.parameters.get_local_rank("replicate") if "replicate" in names else 0
        self.model = weights.build_on_meta(inputs.model_config)
        adapters.add_adapters(self.model, inputs.lora, getattr(torch, config.compute_dtype))
        loss_model, self.context = on_all_ranks(world, lambda: parallelize(self.model, config, world, meshes, memory))
        self.loss_model: nn.Module = loss_model
        self.offload, self.stopwatch = loss_model.offload, loss_model.stopwatch
        if memory.state_on_host or self.offload is not None:
            use_host_cores(world)
        self._locked = PinnedMemory()
        on_all_ranks(world, self._materialize)
        on_all_ranks(world, lambda: fill_weights(self.model, inputs, config.seed, device=world.device))
        self.optimizer: Any = make_optimizer(self.model, config)
        if memory.state_on_host and world.device.type == "cuda" and config.optim in EIGHT_BIT:
            compute_updates_on(world.device, self.optimizer)
        self._scaler = LossScaler() if config.fp16 else None

    def _materialize(self) -> None:
        """Makes the weights, and page-locks those on the host where they are.

        FSDP2 would copy each of them into a power of two of bytes.
        """
        device, host = self._world.device, torch.device("cpu")
        layers: Any = self.model.model.layers
        here = {id(p) for layer in layers[: self.memory.layers_with_state_on_gpu] for p in layer.parameters()}

        def place(parameter: Tensor) -> torch.device:
            return host if self.memory.state_on_host and id(parameter) not in here else device

        def made(local: Tensor) -> None:
            if local.device.type != device.type:
                self._locked.lock_new(local)

        weights.materialize(self.model, device, place, made, self.loss_model)
        self._locked.retain_only(local_part(p) for p in self.model.parameters())

    def backward(self, share: Tensor, last: bool) -> None:
        """Differentiates. Sums of shards over ranks come every time, or each rank would hold whole gradients.

        The sum over copies can wait for the last one. Until then FSDP2 holds gradients on the device, where those that
        go to the host have no room.
        """
        sums = last or self.memory.state_on_host
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
        return Update(norm, first_nonfinite(norms))

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
        """Returns what a checkpoint saves. Of several copies, the first is saved."""
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


def _held(config: TrainConfig, memory: MemoryPlan) -> str:
    """Returns how the parameters are held, in words."""
    words = FSDP[config.fsdp_mode]
    if not memory.state_on_host:
        return words
    last = memory.layers_with_state_on_gpu - 1
    here = "layer 0" if last == 0 else f"layers 0-{last}"
    return f"{words}, in host memory" + (f" but for {here}" if last >= 0 else "")


def fill_weights(
    model: PreTrainedModel,
    inputs: Inputs,
    seed: int,
    fill: weights.FillParameter = weights.fill,
    device: torch.device | None = None,
) -> None:
    """Fills the weights from where the run takes them; draws fresh ones on `device`.

    Raises ValueError if they cannot be read.
    """
    if inputs.resume_from is not None and inputs.lora is None:
        return  # the checkpoint's follow
    adapters.initialize(model, seed, fill, device)
    if inputs.weights is None:
        weights.initialize(model, seed, fill, device)
    else:
        weights.load_or_refuse(model, inputs.weights, "--model_name_or_path", fill)
