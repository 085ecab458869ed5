"""A training run as its plan sees it: model, flags, GPUs and hosts, and the sizes that follow from them."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from transformers import PreTrainedConfig

from lightseq.comm.transport import base_transport_name
from lightseq.config.remat_policies import keeps_gathered
from lightseq.config.train_config import TrainConfig
from lightseq.memory.planner.rates import Chip
from lightseq.models.adapters import adapter_parameters, lora_of
from lightseq.models.architecture import Architecture, examine
from lightseq.schedule.algorithms import schedule_without_steps
from lightseq.schedule.auto import ScheduleChoice, choose_by_time, choose_packed
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.documents import local_tokens
from lightseq.schedule.timing import RATES

CORES = 8  # of a host for each of its ranks, where nobody says: hosts of eight GPUs have more


@dataclass(frozen=True)
class Hardware:
    """What is there. Memory in bytes: of one GPU that a run may use, of one host. Cores: of one host."""

    chip: Chip
    gpus: int
    gpus_per_host: int
    gpu_memory: float
    host_memory: float
    host_cores: int | None = None  # None: CORES a rank

    def __post_init__(self) -> None:
        if self.gpus > self.gpus_per_host and self.gpus % self.gpus_per_host:
            raise ValueError(f"--gpus {self.gpus} do not fill hosts of {self.gpus_per_host}; give a multiple")

    @property
    def ranks_per_host(self) -> int:
        return min(self.gpus, self.gpus_per_host)

    @property
    def cores_per_rank(self) -> int:
        return CORES if self.host_cores is None else max(1, self.host_cores // self.ranks_per_host)


@dataclass(frozen=True)
class PlannedRun:
    """One rank's sizes are those of the rank that has most."""

    model: PreTrainedConfig
    config: TrainConfig
    hardware: Hardware
    state_leaves: bool = False  # with `--offload auto`, as with `both`: weights and their state are in host memory
    state_stays: int = 0  # but for the first so many layers, whose are on the GPU

    def __post_init__(self) -> None:
        size = self.config.sequence_parallel_size or self.hardware.gpus
        if self.hardware.gpus % size:
            raise ValueError(f"--sequence_parallel_size {size} does not divide the {self.hardware.gpus} GPUs")

    def at(self, length: int) -> "PlannedRun":
        return replace(self, config=replace(self.config, model_max_length=length))

    @property
    def sequence_ranks(self) -> int:
        return self.config.sequence_parallel_size or self.hardware.gpus

    @property
    def data_ranks(self) -> int:
        return self.hardware.gpus // self.sequence_ranks

    @property
    def shards(self) -> int:
        """Ranks over which a parameter is split."""
        per_host = self.hardware.ranks_per_host
        return {"full_shard": self.hardware.gpus, "hybrid_shard": per_host, "ddp": 1}[self.config.fsdp_mode]

    @property
    def weights_ahead(self) -> bool:
        """Whether a layer's weights come while another one computes: gathered by FSDP2, or copied from the host."""
        return self.shards > 1 or (self.state_on_host and not self.config.tile_layers)

    @property
    def transport(self) -> str:
        inside = self.sequence_ranks > 1 and self.hardware.ranks_per_host % self.sequence_ranks == 0
        asked = base_transport_name(self.config.transport)
        return "symmetric" if inside and asked in ("auto", "symmetric") else "nccl"

    @cached_property
    def tokens(self) -> int:
        """Of one rank in a forward pass."""
        c, schedule = self.config, schedule_without_steps(*self.schedule_words)
        return local_tokens(schedule, c.model_max_length, c.packing != "none") * self.sequences

    @property
    def sequences(self) -> int:
        """Of a sequence-parallel group in a forward pass."""
        return self.config.per_device_train_batch_size

    @property
    def sequences_per_step(self) -> int:
        return self.sequences * self.data_ranks * self.config.gradient_accumulation_steps

    @cached_property
    def shape(self) -> AttentionShape:
        length = self.config.model_max_length
        return AttentionShape(length, self.heads, self.kv_heads, self.head_dim, self.sequences, self.element)

    @cached_property
    def choice(self) -> ScheduleChoice:
        """The schedule that training takes, by the same rates and for one sequence."""
        asked, per_host = ScheduleChoice(self.config.schedule, self.config.ulysses_size), self.hardware.gpus_per_host
        one = AttentionShape(self.config.model_max_length, self.heads, self.kv_heads, self.head_dim)
        if self.config.packing != "none":
            asked = choose_packed(self.sequence_ranks, one, asked)
        rates = RATES[self.transport]
        return choose_by_time(
            self.sequence_ranks, one, rates, per_host, asked, keep_gathered=keeps_gathered(self.config.remat_policy)
        )

    @property
    def keeps_gathered(self) -> bool:
        return (
            keeps_gathered(self.config.remat_policy) and schedule_without_steps(*self.schedule_words).can_keep_gathered
        )

    @property
    def schedule_words(self) -> tuple[str, int, int, int | None]:
        return self.choice.schedule, self.sequence_ranks, self.choice.head_groups or 1, self.choice.ulysses_size

    # ---- the model's sizes ------------------------------------------------------------------------------------------

    @property
    def element(self) -> int:
        return 4 if self.config.compute_dtype == "float32" else 2

    @cached_property
    def made_of(self) -> Architecture:
        return examine(self.model)

    @property
    def layers(self) -> int:
        return self.made_of.layers

    @property
    def heads(self) -> int:
        return self.made_of.heads.query

    @property
    def kv_heads(self) -> int:
        return self.made_of.heads.key_value

    @property
    def head_dim(self) -> int:
        return self.made_of.heads.dim

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Hidden, attention (heads x head dim), key/value, intermediate."""
        hidden, dim = self.model.hidden_size, self.head_dim
        return hidden, self.heads * dim, self.kv_heads * dim, getattr(self.model, "intermediate_size", 4 * hidden)

    @property
    def layer_linears(self) -> int:
        return self.made_of.layer_linears // self.layers

    @property
    def layer_parameters(self) -> int:
        return self.layer_linears + 2 * self.model.hidden_size

    @property
    def head_parameters(self) -> int:
        return self.made_of.head

    @property
    def tied(self) -> bool:
        return bool(getattr(self.model, "tie_word_embeddings", False))

    @cached_property
    def adapters(self) -> int:
        """Weights that train beside frozen ones; 0: all train."""
        return adapter_parameters(lora_of(self.config, self.model), self.model)

    @property
    def local_parameters(self) -> int:
        return ceil(self.made_of.total / self.shards)

    @property
    def local_trained(self) -> int:
        """Of one rank, those that get a gradient."""
        return ceil((self.adapters or self.made_of.total) / self.shards)

    @property
    def weight_bytes(self) -> float:
        """Of one rank: float32 masters; what is frozen is in the dtype that computes."""
        frozen = self.element * self.local_parameters if self.adapters else 0
        return frozen + 4.0 * self.local_trained

    @property
    def group(self) -> int:
        return self.config.layers_per_checkpoint

    @property
    def groups(self) -> int:
        return ceil(self.layers / self.group)

    @property
    def state_on_host(self) -> bool:
        return self.state_leaves or self.config.state_on_host

    @property
    def share_on_host(self) -> float:
        """Of the weights, those that are in host memory, with their gradients and the optimizer's state."""
        if not self.state_on_host:
            return 0.0
        return 1.0 - self.state_stays * self.layer_parameters / self.made_of.total

    @property
    def accumulates(self) -> bool:
        return self.config.gradient_accumulation_steps > 1
