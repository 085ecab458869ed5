"""Model and flags of a planned run on its hardware, and the sizes that follow from them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import Any

import torch
from transformers import PreTrainedConfig

from lightseq.architecture.flops import count_adapter_parameters
from lightseq.architecture.inspection import Architecture, inspect_architecture
from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import schedule_request
from lightseq.comm.transport import base_transport_name
from lightseq.config.remat_policies import may_keep_gathered
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.world import World
from lightseq.models.decoder import text_config
from lightseq.objectives.objective import Objective
from lightseq.objectives.registry import objective_of
from lightseq.objectives.teacher import flags_for_teacher
from lightseq.parts.adapters import Lora, lora_from_config
from lightseq.parts.facts import Layer, attention_shape
from lightseq.plan.document_lengths import DocumentLengths
from lightseq.plan.hardware import Hardware, hardware_here
from lightseq.plan.layer_costs import LayerCosts, LayerTable, layer_table, treatment_of
from lightseq.plan.weights import HeldWeights, Weights, held_weights
from lightseq.schedule.algorithms import schedule_without_steps, with_few_fragments
from lightseq.schedule.auto import ScheduleChoice
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.documents import local_tokens
from lightseq.schedule.head_slices import count_head_slices
from lightseq.schedule.schedule_choice import choose
from lightseq.schedule.table import Schedule
from lightseq.utils.formatting import divisors


@dataclass(frozen=True)
class PlannedRun:
    """A run and the sizes of its largest rank. `parameters` are numbers of weights; `bytes` are per rank."""

    model: PreTrainedConfig
    config: TrainConfig
    hardware: Hardware
    state_offloaded: bool = False  # the planner moves weights, gradients and optimizer state to the host ...
    layers_with_state_on_gpu: int = 0  # ... except for the first layers
    reshard_after_forward: bool = True  # FSDP2's option; False keeps gathered weights for the backward pass
    documents: DocumentLengths | None = None  # None: a sequence is one document
    teacher: PreTrainedConfig | None = None  # a frozen model of another architecture that also runs forward

    def __post_init__(self) -> None:
        if self.hardware.gpus % self.sequence_ranks:
            raise ValueError(
                f"--sequence_parallel_size {self.sequence_ranks} does not divide {self.hardware.gpus} GPUs; "
                f"use {divisors(self.hardware.gpus)}"
            )

    def with_length(self, length: int) -> "PlannedRun":
        """Returns the run with another --model_max_length."""
        return self.changed(config=replace(self.config, model_max_length=length))

    def changed(self, **changes: Any) -> "PlannedRun":
        """Returns the run with other fields, without inspecting model, dtype and adapters again."""
        other = replace(self, **changes)
        names = ["architecture", "parameters_before", "adapter_parameters", "lora"]
        if other.config.expert_ranks == self.config.expert_ranks:
            names += ["layer_table"]
        if other.shards == self.shards:
            names += ["weights"]
        for name in names:
            if name in vars(self):
                vars(other)[name] = vars(self)[name]
        if (teacher := self.teacher_run) is not None:
            flags = {"config": other.teacher_flags, "state_offloaded": other.state_on_host}
            vars(other)["teacher_run"] = teacher.changed(**flags, hardware=other.hardware, documents=other.documents)
        return other

    # ---- ranks and the sequence -------------------------------------------------------------------------------------

    @property
    def sequence_ranks(self) -> int:
        return self.config.sequence_parallel_size or self.hardware.gpus

    @cached_property
    def shards(self) -> int:
        """Returns the number of ranks over which FSDP shards a parameter."""
        per_host = self.hardware.ranks_per_host
        return {"full_shard": self.hardware.gpus, "hybrid_shard": per_host, "ddp": 1}[self.config.fsdp_mode]

    @property
    def prefetches_weights(self) -> bool:
        """Returns whether a layer's weights are gathered, or copied from the host, while another layer runs."""
        return self.shards > 1 or (self.state_on_host and not self.config.tiles_layers)

    @property
    def transport(self) -> str:
        """Returns `symmetric` if ranks that share a sequence share a host and the flags allow it, else `nccl`."""
        inside_host = self.sequence_ranks > 1 and self.hardware.ranks_per_host % self.sequence_ranks == 0
        return (
            "symmetric"
            if inside_host and base_transport_name(self.config.transport) in ("auto", "symmetric")
            else "nccl"
        )

    @cached_property
    def tokens(self) -> int:
        """Returns the tokens of one rank in a forward pass."""
        packed = self.config.packing != "none"
        length = local_tokens(self.schedule, self.config.model_max_length, packed)
        return length * self.config.per_device_train_batch_size

    @property
    def sequences_per_step(self) -> int:
        data_ranks = self.hardware.gpus // self.sequence_ranks
        return self.config.per_device_train_batch_size * data_ranks * self.config.gradient_accumulation_steps

    @property
    def attention_share(self) -> float:
        """Returns the attention that all layers compute over full causal attention to a sequence.

        At other lengths than the data's, documents keep their sizes.
        """
        length = self.config.model_max_length
        whole = self.architecture.attention_share(length)
        return whole if self.documents is None else min(whole, self.documents.attention_share(length))

    @cached_property
    def shape(self) -> AttentionShape:
        """Returns the attention that takes most FLOPs."""
        batch, length = self.config.per_device_train_batch_size, self.config.model_max_length
        return attention_shape(self.architecture.attentions, length, batch, self.itemsize)

    @cached_property
    def choice(self) -> ScheduleChoice:
        """Returns the schedule that training would choose, for one sequence and by the same rates."""
        length = self.config.model_max_length
        options = AttentionConfig.from_flags(self.config, torch.device("cuda"), self.hardware.gpus_per_host)
        options = options.with_windows(self.architecture.windows, self.sequence_ranks)
        options = replace(options, carries_states=self.architecture.has_recurrences)
        shape = attention_shape(self.architecture.attentions, length, element_bytes=self.itemsize)
        return choose(schedule_request(options, self.sequence_ranks, shape, self.transport))

    @cached_property
    def schedule(self) -> Schedule:
        choice = self.choice
        found = schedule_without_steps(
            choice.schedule, self.sequence_ranks, choice.head_groups or 1, choice.ulysses_size
        )
        return with_few_fragments(found) if self.architecture.has_recurrences else found

    @property
    def head_slices(self) -> int:
        """Returns the number of head slices that a layer passes to attention, one after the other."""
        if not self.config.slices_heads:
            return 1
        return count_head_slices(self.schedule, self.shape.heads, self.shape.kv_heads, self.shape.head_dim)

    @property
    def keeps_gathered(self) -> bool:
        return may_keep_gathered(self.config.remat_policy) and self.schedule.can_keep_gathered

    # ---- the model --------------------------------------------------------------------------------------------------

    @property
    def itemsize(self) -> int:
        """Returns the bytes per element of the compute dtype."""
        return self.config.itemsize

    @cached_property
    def architecture(self) -> Architecture:
        return inspect_architecture(self.model)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.architecture.layers

    def costs(self, layer: Layer, policy: str | None = None) -> LayerCosts:
        """Returns a layer's costs under a remat policy (default: the config's)."""
        return self.layer_table.costs(layer.place, treatment_of(layer, self.config, self.tokens, policy))

    @cached_property
    def layer_table(self) -> LayerTable:
        return layer_table(self.model, getattr(torch, self.config.compute_dtype), self.config.expert_ranks)

    @cached_property
    def parameters_before(self) -> tuple[int, ...]:
        """Returns the number of weights in the layers before each layer, and in all layers."""
        return (0, *accumulate(layer.parameters for layer in self.layers))

    @cached_property
    def weights(self) -> HeldWeights:
        """Returns the bytes of the model's weights, as one rank holds and gathers them."""
        return held_weights(self.model, self.config, self.lora, self.shards)

    def exchanged(self, place: int) -> Weights:
        """Returns the weights of a layer that FSDP2 gathers and whose gradients it reduces."""
        whole = self.config.expert_ranks == 1
        return self.weights.layers[place] + (self.weights.experts[place] if whole else Weights())

    @cached_property
    def _gathered_before(self) -> tuple[int, ...]:
        """Returns the gathered bytes of the layers before each layer, and of all layers, without other ranks' experts.

        A layer's are there while it runs.
        """
        ranks, experts = self.config.expert_ranks, self.weights.experts
        return (0, *accumulate(x + y.gathered // ranks for x, y in zip(self._layers_gathered, experts, strict=True)))

    @property
    def _layers_gathered(self) -> Iterator[int]:
        """Yields the bytes that a rank gathers of each layer, without experts."""
        resident = self.layers_with_state_on_gpu if self.state_on_host else len(self.layers)
        return (x.gathered if place < resident else x.fetched for place, x in enumerate(self.weights.layers))

    @property
    def gathers_experts_again(self) -> bool:
        """Returns whether a rank's experts are cast or gathered for the backward pass again, and not kept for it."""
        return self.config.expert_ranks > 1 and (self.reshard_after_forward or self.config.remat_policy != "none")

    @cached_property
    def _kept_before(self) -> tuple[int, ...]:
        """Does the same as `_gathered_before`, without experts that are gathered again."""
        if not self.gathers_experts_again:
            return self._gathered_before
        return (0, *accumulate(self._layers_gathered))

    def layers_of(self, group: int) -> tuple[Layer, ...]:
        """Returns the layers of a group that shares a checkpoint."""
        return self.layers[group * self.group_size : (group + 1) * self.group_size]

    def gathered_bytes(self, group: int) -> int:
        """Returns the bytes of gathered weights of a group of layers while it runs."""
        end = min(len(self.layers), (group + 1) * self.group_size)
        return self._gathered_before[end] - self._gathered_before[group * self.group_size]

    def kept_bytes(self, first: int, last: int) -> int:
        """Returns the bytes of weights in groups from `first` to `last` that are gathered while others run."""
        end = min(len(self.layers), (last + 1) * self.group_size)
        return self._kept_before[end] - self._kept_before[first * self.group_size]

    @property
    def tied(self) -> bool:
        """Returns whether embeddings and head share their weights."""
        return self.architecture.ties_embeddings

    @cached_property
    def text(self) -> Any:
        """Returns the config of the text decoder."""
        return text_config(self.model)

    @cached_property
    def adapter_parameters(self) -> int:
        """Returns the number of LoRA parameters; 0 if the whole model trains."""
        return count_adapter_parameters(self.lora, self.model)

    @cached_property
    def lora(self) -> Lora | None:
        """Returns the settings of adapters; None if the whole model trains."""
        return lora_from_config(self.config, self.model)

    @property
    def local_parameters(self) -> int:
        """Returns the number of one rank's weights."""
        return ceil(self.architecture.total / self.shards)

    @property
    def local_trained(self) -> int:
        """Returns the number of one rank's parameters that get a gradient."""
        return ceil((self.adapter_parameters or self.architecture.total) / self.shards)

    @property
    def weight_bytes(self) -> float:
        """Returns the bytes of one rank's weights, frozen copies in the compute dtype included."""
        copies = sum(frozen.source is None for frozen in self.objective.frozen_models)
        return float(self.weights.total.stored + self.itemsize * self.local_parameters * copies)

    @property
    def teacher_flags(self) -> TrainConfig:
        """Returns the flags of the teacher's forward pass."""
        return flags_for_teacher(self.config, inspect_architecture(self.teacher).has_recurrences)

    @cached_property
    def teacher_run(self) -> "PlannedRun | None":
        """Returns a run of the teacher's forward pass; None without a teacher."""
        if self.teacher is None:
            return None
        return PlannedRun(self.teacher, self.teacher_flags, self.hardware, self.state_on_host, documents=self.documents)

    @property
    def teacher_bytes(self) -> float:
        """Returns the bytes of one rank's part of the teacher. It is on the host if any state is."""
        return 0.0 if self.teacher_run is None else float(self.itemsize * self.teacher_run.local_parameters)

    @cached_property
    def objective(self) -> Objective:
        return objective_of(self.config)

    @property
    def group_size(self) -> int:
        return self.config.group_size

    @property
    def groups(self) -> int:
        """Returns the number of groups of layers that share a checkpoint."""
        return ceil(len(self.layers) / self.group_size)

    @property
    def state_on_host(self) -> bool:
        """Returns whether weights, gradients and optimizer state are in host memory, by a flag or by the planner."""
        return self.state_offloaded or self.config.state_on_host

    @property
    def host_share(self) -> float:
        """Returns the share of gradients and optimizer state in host memory."""
        return self._share_on_host(lambda weights: weights.trained)

    @property
    def host_weight_share(self) -> float:
        """Returns the share of the bytes of weights in host memory."""
        return self._share_on_host(lambda weights: weights.stored)

    def _share_on_host(self, count: Callable[[Weights], int]) -> float:
        if not self.state_on_host:
            return 0.0
        resident, held = self.layers_with_state_on_gpu, self.weights
        on_gpu = sum(map(count, (*held.layers[:resident], *held.experts[:resident])))
        return 1.0 - on_gpu / count(held.total)


def planned_run(
    config: TrainConfig,
    model: PreTrainedConfig,
    world: World,
    documents: DocumentLengths | None = None,
    teacher: PreTrainedConfig | None = None,
) -> PlannedRun:
    """Returns the planned run on this machine."""
    per_host = world.size if world.size % world.local_size else world.local_size  # hosts may differ
    hardware = hardware_here(world.size, per_host, world.device)
    return PlannedRun(model, config, hardware, documents=documents, teacher=teacher)
