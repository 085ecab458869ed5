"""Engine protocol (sharding, backward pass, update) and its FSDP2 implementation; DeepSpeed is in deepspeed.py."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.checkpoint import checkpoints, resume, state_files
from lightseq.config.optimizers import EIGHT_BIT
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
from lightseq.distributed.start_over import memory_limit
from lightseq.distributed.stopwatch import Stopwatch
from lightseq.distributed.watchdog import Watchdog
from lightseq.memory.host_adamw import compute_updates_on
from lightseq.memory.offload import Offload
from lightseq.memory.pinned import PinnedMemory
from lightseq.memory.planner.advice import out_of_memory
from lightseq.memory.planner.breakdown import Breakdown, loss_bytes, measured_state_bytes, stored_activations
from lightseq.memory.planner.choice import plan_on_all_ranks
from lightseq.memory.planner.plan import Plan, host_memory_for_layers
from lightseq.memory.planner.run import planned_run
from lightseq.models import adapters, weights
from lightseq.parallelize import MemorySettings, parallelize
from lightseq.schedule.documents import local_tokens
from lightseq.training.errors import exit_on_out_of_memory
from lightseq.training.fallback import fall_back
from lightseq.training.metrics import earlier_plan
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
from lightseq.training.terminal import Terminal

SHARDING = {
    "full_shard": "FSDP2 over all ranks",
    "hybrid_shard": "FSDP2 within a host, replicated across hosts",
    "ddp": "DDP, a copy on every rank",
}


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
    context: SequenceContext
    optimizer: Any  # its groups hold the learning rate
    meshes: Meshes
    config: TrainConfig  # the flags, with the planner's choices
    memory: MemorySettings
    sharding_description: str  # sharding and location of the parameters, for display
    offload: Offload | None  # of activations
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


def build_engine(config: TrainConfig, inputs: Inputs, world: World, watchdog: Watchdog | None = None) -> Engine:
    """Builds the sharded model and its optimizer, and loads the weights or the checkpoint.

    The planner fills in memory flags that are not given. If memory runs out, the run starts over with the next plan if
    there are a watchdog and such a plan; otherwise it ends with an explanation.
    """
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    if config.deterministic:
        make_deterministic()
    meshes = on_all_ranks(world, lambda: make_meshes(world, inputs.sequence_size, config.fsdp_mode))
    memory, planned = choose_memory_settings(config, inputs, world)
    with out_of_memory_handler(config, inputs, world, memory.plan, watchdog):
        if inputs.deepspeed is None:
            engine: Engine = FsdpEngine(planned, inputs, world, meshes, memory)
        else:
            from lightseq.training.deepspeed import DeepSpeedEngine  # imports this file

            engine = DeepSpeedEngine(planned, inputs, world, meshes, memory)
    resume_engine(engine, config, inputs, world, watchdog)
    return engine


def choose_memory_settings(config: TrainConfig, inputs: Inputs, world: World) -> tuple[MemorySettings, TrainConfig]:
    """Returns the memory settings, and the flags with the planner's choices: the same on all ranks.

    On CPUs and under DeepSpeed there is no choice, except with budgets of memory.
    """
    config, plan = config.resolve_memory_flags(on_gpu=world.device.type == "cuda"), None
    if config.offload == "auto" or (world.device.type == "cuda" and inputs.deepspeed is None):
        earlier = earlier_plan(inputs.resume_from)
        plan = plan_on_all_ranks(config, inputs.model_config, world, earlier, memory_limit(), inputs.documents)
        run, config = plan.run, plan.run.config
    else:
        run = planned_run(config, inputs.model_config, world, inputs.documents)
    memory = MemorySettings(
        state_on_host=run.state_on_host,
        layers_with_state_on_gpu=run.layers_with_state_on_gpu,
        reshard_after_forward=run.reshard_after_forward,
        placement=plan.placement if plan and config.offload == "auto" else None,
        activation_bytes=host_memory_for_layers(run, world, inputs.deepspeed),
        plan=plan,
    )
    return memory, config


def resume_engine(
    engine: Engine, config: TrainConfig, inputs: Inputs, world: World, watchdog: Watchdog | None = None
) -> None:
    """Restores weights, optimizer and random states if the run resumes from a checkpoint."""
    if (directory := inputs.resume_from) is None:
        return

    def restore() -> None:
        engine.restore(directory)
        resume.restore_rng_state(directory, world)

    with out_of_memory_handler(config, inputs, world, engine.memory.plan, watchdog):
        on_all_ranks(world, restore)


def out_of_memory_handler(
    config: TrainConfig,
    inputs: Inputs,
    world: World,
    plan: Plan | None,
    watchdog: Watchdog | None,
    terminal: Terminal | None = None,
) -> AbstractContextManager[None]:
    """Returns a context that handles running out of memory.

    The run starts over with the next plan if there are a plan and a watchdog; otherwise it ends with an explanation.
    """

    def next_plan(reason: str) -> None:
        if plan is not None and watchdog is not None:
            fall_back(plan, config, world, watchdog, reason)

    return exit_on_out_of_memory(
        world, terminal, lambda: out_of_memory(config, inputs.model_config, world, inputs.documents), next_plan
    )


def tokens_per_forward(config: TrainConfig, context: SequenceContext) -> int:
    """Returns a rank's tokens in a forward pass of the longest batch."""
    tokens = local_tokens(context.schedule, config.model_max_length, config.packing != "none")
    return tokens * config.per_device_train_batch_size


def memory_parts(engine: Engine, device: torch.device, taken_by_forward: int | None = None) -> Breakdown:
    """Returns the breakdown of the peak device memory so far.

    `taken_by_forward`: bytes that a forward pass was measured to leave allocated, if known.
    """
    config, model = engine.config, engine.model.config
    tokens = tokens_per_forward(config, engine.context)
    states = measured_state_bytes(engine.model, config, engine.memory.state_on_host)
    logits, gradients = loss_bytes(model, config, tokens)
    stored = stored_activations(model, config, tokens)
    if taken_by_forward is not None:
        stored = max(0, taken_by_forward - gradients)
    elif engine.offload is not None:
        stored = max(0, stored - engine.offload.memory.allocated_bytes)
    transport = engine.context.transport
    parts = Breakdown(
        parameters=int(states.parameters),
        gradients=int(states.gradients),
        optimizer=int(states.optimizer),
        stored_activations=stored,
        loss=logits + gradients,
        attention_buffers=transport.buffer_bytes,
        working=0,
    )
    if device.type != "cuda":
        return parts
    not_in_allocator = transport.buffer_bytes + transport.graph_bytes
    return parts.at_peak(torch.cuda.max_memory_allocated(device) + not_in_allocator)


class FsdpEngine:
    """FSDP2 or DDP engine with optimizers from torch and torchao."""

    def __init__(
        self, config: TrainConfig, inputs: Inputs, world: World, meshes: Meshes, memory: MemorySettings
    ) -> None:
        self.config, self.meshes, self.memory, self._world = config, meshes, memory, world
        self.sharding_description = _describe_sharding(config, memory)
        self._max_grad_norm = config.max_grad_norm
        self._shard_group = meshes.parameters["shard"].get_group()
        names = meshes.parameters.mesh_dim_names or ()
        self._replica = meshes.parameters.get_local_rank("replicate") if "replicate" in names else 0
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
        """Allocates the weights and page-locks those on the host in place.

        FSDP2 would copy each of them into an allocation rounded up to a power of two.
        """
        device, host = self._world.device, torch.device("cpu")
        layers: Any = self.model.model.layers
        on_gpu = {id(p) for layer in layers[: self.memory.layers_with_state_on_gpu] for p in layer.parameters()}

        def place(parameter: Tensor) -> torch.device:
            return host if self.memory.state_on_host and id(parameter) not in on_gpu else device

        def lock_on_host(local: Tensor) -> None:
            if local.device.type != device.type:
                self._locked.lock_new(local)

        weights.materialize(self.model, device, place, lock_on_host, self.loss_model)
        self._locked.retain_only(local_part(p) for p in self.model.parameters())

    def backward(self, share: Tensor, last: bool) -> None:
        """Runs the backward pass. Gradients are reduce-scattered every time, so no rank holds full gradients.

        The all-reduce over replicas is deferred to the last share. FSDP2 holds gradients on the device until then, so
        with state on the host, where the device has no room for them, it runs every time.
        """
        all_reduces = last or self.memory.state_on_host
        self.loss_model.set_requires_all_reduce(all_reduces)  # type: ignore[operator]  # it is an FSDPModule
        (share * (self._scaler.scale if self._scaler else 1.0)).backward()

    def update(self) -> Update:
        grads = local_gradients(self.model.parameters())
        norms = gradient_norms(grads, self._shard_group)
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
            self.optimizer.state.clear()  # it counts a step

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return weights.full_parameters(self.model)

    def tensors(self) -> dict[str, Tensor] | None:
        """Returns the tensors to save. Only the first replica saves any."""
        return {} if self._replica else state_files.state_tensors(self.model, self.optimizer)

    def save_state(self, directory: Path) -> None:
        raise AssertionError("the saver writes the tensors")

    def restore(self, checkpoint_directory: Path) -> None:
        on_all_ranks(self._world, lambda: make_state(self.optimizer))  # may fail on one rank, so before any collective
        resume.restore(checkpoint_directory, self.model, self.optimizer)
        facts = checkpoints.read_trainer_state(checkpoint_directory)
        if self._scaler is not None and facts.get("scaler"):
            self._scaler = LossScaler(**facts["scaler"])

    def facts(self) -> dict[str, Any]:
        return {"scaler": vars(self._scaler) if self._scaler else None}


def _describe_sharding(config: TrainConfig, memory: MemorySettings) -> str:
    """Describes how the parameters are sharded and which of them are in host memory."""
    sharding = SHARDING[config.fsdp_mode]
    if not memory.state_on_host:
        return sharding
    last = memory.layers_with_state_on_gpu - 1
    on_gpu = "layer 0" if last == 0 else f"layers 0-{last}"
    return f"{sharding}, in host memory" + (f" except {on_gpu}" if last >= 0 else "")


def fill_weights(
    model: PreTrainedModel,
    inputs: Inputs,
    seed: int,
    fill: weights.FillParameter = weights.fill,
    device: torch.device | None = None,
) -> None:
    """Loads the weights, or draws random ones on `device`. Raises ValueError if they cannot be read."""
    if inputs.resume_from is not None and inputs.lora is None:
        return  # the checkpoint replaces them
    adapters.initialize(model, seed, fill, device)
    if inputs.weights is None:
        weights.initialize(model, seed, fill, device)
    else:
        weights.load_or_refuse(model, inputs.weights, "--model_name_or_path", fill)
