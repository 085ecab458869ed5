"""Engine with FSDP2 or DDP, and optimizers from torch and torchao."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightseq.architecture.inspection import inspect_architecture
from lightseq.checkpoint import checkpoints, resume, state_files
from lightseq.checkpoint.resume import FRESH_START
from lightseq.config.optimizers import EIGHT_BIT
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import on_all_ranks
from lightseq.distributed.parallel_dims import local_part, shard_groups
from lightseq.distributed.world import use_host_cores
from lightseq.memory.fsdp2 import forget_forward_passes
from lightseq.memory.host_adamw import compute_updates_on
from lightseq.memory.pinned import PinnedMemory
from lightseq.memory.recomputation import MemorySettings
from lightseq.models import weights
from lightseq.models.packed import sharded_tensors
from lightseq.objectives.registry import objective_of
from lightseq.objectives.teacher import flags_for_teacher
from lightseq.parallelize import ParallelModel, parallelize
from lightseq.parts import adapters
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.packed_base import pack_layers
from lightseq.plan.plan import Plan
from lightseq.training.engine import Update, fill_weights
from lightseq.training.inputs import Inputs
from lightseq.training.optimization import (
    LossScaler,
    clip,
    first_nonfinite,
    gradient_norms,
    make_optimizer,
    make_state,
    step_if_finite,
)
from lightseq.training.router_flags import make_routers

SHARDING = {
    "full_shard": "FSDP2 over all ranks",
    "hybrid_shard": "FSDP2 within a host, replicated across hosts",
    "ddp": "DDP, a copy on every rank",
}


class FsdpEngine:
    """FSDP2 or DDP engine with optimizers from torch and torchao."""

    def __init__(self, config: TrainConfig, inputs: Inputs, memory: MemorySettings, plan: Plan | None) -> None:
        dims, world = inputs.dims, inputs.dims.world
        self.config, self.dims, self.memory, self.plan, self._world = config, dims, memory, plan, world
        self.sharding_description = _describe_sharding(config, memory)
        self._max_grad_norm = config.max_grad_norm
        self.model = build_to_train(inputs.model_config)
        adapters.add_adapters(self.model, inputs.lora, getattr(torch, config.compute_dtype))
        if inputs.packed_base is not None:
            pack_layers(self.model, inputs.weights if inputs.packed_base.in_files else None)
        parallel = on_all_ranks(world, lambda: parallelize(self.model, config, dims, memory))
        self.loss_model: nn.Module = parallel.loss_model
        self.context, self.offload, self.units = parallel.context, parallel.offload, parallel.units
        self._whole = parallel.whole
        self.stopwatch = parallel.loss_model.stopwatch
        if memory.state_on_host or self.offload is not None:
            use_host_cores(world)
        self._locked = PinnedMemory()
        on_all_ranks(world, lambda: self._materialize(self.model, parallel))
        self.routers = on_all_ranks(world, lambda: make_routers(config, self.model, self.context))
        on_all_ranks(world, lambda: fill_weights(self.model, inputs, config.seed, device=world.device))
        self.frozen: Mapping[str, nn.Module] = {
            frozen.name: self._load_frozen(inputs) if frozen.source is None else self._load_teacher(inputs)
            for frozen in objective_of(config).frozen_models
        }
        self._trained = [(p, shard_groups(p)) for p in self.model.parameters() if p.requires_grad]
        self.optimizer: Any = make_optimizer(self.model, config)
        if memory.state_on_host and world.device.type == "cuda" and config.optim in EIGHT_BIT:
            compute_updates_on(world.device, self.optimizer)
        self._scaler = LossScaler() if config.fp16 else None

    def _load_teacher(self, inputs: Inputs) -> nn.Module:
        """Builds the model that --teacher names."""
        assert inputs.teacher is not None, "`prepare` finds it"
        config = flags_for_teacher(self.config, inspect_architecture(inputs.teacher.config).has_recurrences)
        of_teacher = replace(
            inputs,
            model_config=inputs.teacher.config,
            weights=inputs.teacher.weights,
            dims=self.dims.with_whole_experts(),
        )
        return self._load_frozen(of_teacher, config, MemorySettings(self.memory.state_on_host), "--teacher")

    def _load_frozen(
        self,
        inputs: Inputs,
        config: TrainConfig | None = None,
        memory: MemorySettings | None = None,
        flag: str = "--model_name_or_path",
    ) -> nn.Module:
        """Builds a model that never changes, with the weights from which the run started, also when it resumes."""
        config, memory, world, dims = config or self.config, memory or self.memory, self._world, inputs.dims
        model = build_to_train(inputs.model_config)
        adapters.freeze(model, getattr(torch, config.compute_dtype))
        parallel = on_all_ranks(world, lambda: parallelize(model, config, dims, memory, beside=self.context))
        forget_forward_passes(parallel.loss_model)
        on_all_ranks(world, lambda: self._materialize(model, parallel))
        base = replace(inputs, resume_point=FRESH_START, lora=None, lora_adapter=None)
        on_all_ranks(world, lambda: fill_weights(model, base, config.seed, device=world.device, flag=flag))
        return parallel.loss_model.eval()

    def _materialize(self, model: PreTrainedModel, parallel: ParallelModel) -> None:
        """Allocates a model's weights, and page-locks weights on the host in place.

        FSDP2 would copy each of them into an allocation rounded up to a power of two.
        """
        device, host = self._world.device, torch.device("cpu")
        on_gpu = {id(parameter) for unit in parallel.units if not unit.state_on_host for parameter in unit.parameters}
        on_gpu |= {id(model.get_parameter(name)) for name in parallel.whole}

        def place(parameter: Tensor) -> torch.device:
            return host if self.memory.state_on_host and id(parameter) not in on_gpu else device

        def lock_on_host(local: Tensor) -> None:
            if local.device.type != device.type:
                for part in sharded_tensors(local):
                    self._locked.lock_new(part)

        dtype = getattr(torch, self.config.compute_dtype)
        weights.materialize(model, device, place, lock_on_host, parallel.loss_model, dtype)
        used = (local_part(p.detach()) for kept in {self.model, model} for p in kept.parameters())
        self._locked.retain_only(part for local in used for part in sharded_tensors(local))

    def backward(self, share: Tensor, last: bool) -> None:
        """Runs the backward pass. Gradients are reduce-scattered every time, so no rank holds full gradients.

        The all-reduce over replicas is deferred to the last share. FSDP2 holds gradients on the device until then, so
        with state on the host, where the device has no room for them, it runs every time.
        """
        all_reduces = last or self.memory.state_on_host
        self.loss_model.set_requires_all_reduce(all_reduces)  # type: ignore[operator]  # it is an FSDPModule
        (share * (self._scaler.scale if self._scaler else 1.0)).backward()

    def update(self) -> Update:
        self._sum_whole_gradients()
        found = [(local_part(p.grad), shards) for p, shards in self._trained if p.grad is not None]
        grads = [gradient for gradient, _ in found]
        norms = gradient_norms(grads, [shards for _, shards in found])
        norm, take = norms.norm(), True
        if self._scaler is not None:
            norm, take = self._scaler.unscale(grads, norm)
        if take:
            clip(grads, norm, self._max_grad_norm, self.optimizer)
            step_if_finite(self.optimizer, norm)
        self.optimizer.zero_grad()
        return Update(norm, first_nonfinite(norms))

    def _sum_whole_gradients(self) -> None:
        """Sums the gradients of parameters that no rank shards, over all ranks and in one message."""
        grads = [grad for name in self._whole if (grad := self.model.get_parameter(name).grad) is not None]
        if not grads or self._world.size == 1:
            return
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

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
        return {} if self.dims.replica else state_files.state_tensors(self.model, self.optimizer)

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
    if config.expert_ranks > 1:
        sharding += f", experts split over {config.expert_ranks}"
    if not memory.state_on_host:
        return sharding
    last = memory.layers_with_state_on_gpu - 1
    on_gpu = "layer 0" if last == 0 else f"layers 0-{last}"
    return f"{sharding}, in host memory" + (f" except {on_gpu}" if last >= 0 else "")
