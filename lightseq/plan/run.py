"""Model and flags of a planned run on its hardware, and the sizes that follow from them."""

from dataclasses import dataclass, replace
from functools import cached_property
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
from lightseq.plan.breakdown import State
from lightseq.plan.document_lengths import DocumentLengths
from lightseq.plan.hardware import Hardware, hardware_here
from lightseq.plan.layer_costs import LayerCosts, LayerTable, Treatment, layer_table, tiles_mlp
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
        """Returns the run with other fields and the same adapters, whose targets take long to find."""
        other = replace(self, **changes)
        vars(other)["lora"] = self.lora
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
        allowed = base_transport_name(self.config.transport) in ("auto", "symmetric")
        return "symmetric" if inside_host and allowed else "nccl"

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
        return whole if self.documents is None else min(whole, self.documents.area_per_token / length)

    @cached_property
    def shape(self) -> AttentionShape:
        """Returns the attention that takes most FLOPs, to one sequence."""
        return attention_shape(self.architecture.attentions, self.config.model_max_length, element_bytes=self.itemsize)

    @cached_property
    def choice(self) -> ScheduleChoice:
        """Returns the schedule that training would choose, for one sequence and by the same rates."""
        options = AttentionConfig.from_flags(self.config, torch.device("cuda"), self.hardware.gpus_per_host)
        options = options.with_windows(self.architecture.windows, self.sequence_ranks)
        options = replace(options, carries_states=self.architecture.has_recurrences)
        return choose(schedule_request(options, self.sequence_ranks, self.shape, self.transport))

    @cached_property
    def schedule(self) -> Schedule:
        choice = self.choice
        found = schedule_without_steps(
            choice.schedule, self.sequence_ranks, choice.head_groups or 1, choice.ulysses_size
        )
        return with_few_fragments(found) if self.architecture.has_recurrences else found

    @cached_property
    def head_slices(self) -> int:
        """Returns the number of head slices that a layer passes to attention, one after the other."""
        if not self.config.slices_heads:
            return 1
        shape = self.shape
        return count_head_slices(self.schedule, shape.heads, shape.kv_heads, shape.head_dim)

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
        policy = policy or self.config.remat_policy
        tiled = policy != "none" and tiles_mlp(layer, self.config, self.tokens)
        return self.layer_table.costs(layer.place, Treatment(policy, self.config.compiles, tiled))

    @cached_property
    def layer_table(self) -> LayerTable:
        return layer_table(self.model, getattr(torch, self.config.compute_dtype), self.config.expert_ranks)

    @cached_property
    def weights(self) -> HeldWeights:
        """Returns the bytes of the model's weights, as one rank holds and gathers them."""
        return held_weights(self.model, self.config, self.lora, self.shards)

    def exchanged(self, place: int) -> Weights:
        """Returns the weights of a layer that FSDP2 gathers and whose gradients it reduces."""
        whole = self.config.expert_ranks == 1
        return self.weights.layers[place] + (self.weights.experts[place] if whole else Weights())

    @property
    def gathers_experts_again(self) -> bool:
        """Returns whether a rank's experts are cast or gathered for the backward pass again, and not kept for it."""
        return self.config.expert_ranks > 1 and (self.reshard_after_forward or self.config.remat_policy != "none")

    def layers_of(self, group: int) -> tuple[Layer, ...]:
        """Returns the layers of a group that shares a checkpoint."""
        return self.layers[group * self.group_size : (group + 1) * self.group_size]

    def gathered_bytes(self, first: int, last: int | None = None, runs: bool = True) -> int:
        """Returns the bytes of gathered weights of a group of layers, or of all groups from `first` to `last`.

        While the groups run, that includes their experts. A rank gathers only its own.
        """
        resident = self.layers_with_state_on_gpu if self.state_on_host else len(self.layers)
        end = 1 + (first if last is None else last)
        places = range(len(self.layers))[first * self.group_size : end * self.group_size]
        held, experts = self.weights.layers, self.weights.experts
        found = sum(held[place].gathered if place < resident else held[place].fetched for place in places)
        if runs or not self.gathers_experts_again:
            found += sum(experts[place].gathered // self.config.expert_ranks for place in places)
        return found

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

    @cached_property
    def teacher_run(self) -> "PlannedRun | None":
        """Returns a run of the teacher's forward pass; None without a teacher."""
        if self.teacher is None:
            return None
        flags = flags_for_teacher(self.config, inspect_architecture(self.teacher).has_recurrences)
        return PlannedRun(self.teacher, flags, self.hardware, self.state_on_host, documents=self.documents)

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

    @cached_property
    def shares_on_host(self) -> State:
        """Returns the shares of the state in host memory."""
        if not self.state_on_host:
            return State(0.0, 0.0, 0.0)
        held, resident = self.weights, self.layers_with_state_on_gpu
        away = sum((*held.layers[resident:], *held.experts[resident:]), held.ends)
        trained = away.trained / held.total.trained
        return State(away.stored / held.total.stored, gradients=trained, optimizer=trained)


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
