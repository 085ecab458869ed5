"""All flags of a training run in one object, and what follows from them."""

from dataclasses import dataclass
from typing import Final

from lightseq.config.flags import (
    AdapterConfig,
    DataConfig,
    LoggingConfig,
    MemoryConfig,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)

FSDP_MODES: Final = ("full_shard", "hybrid_shard")


def fsdp_words(fsdp: str) -> list[str]:
    """Splits the value of --fsdp into words."""
    return fsdp.replace(",", " ").split()


# Dataclasses collect the fields of their bases from last to first.
@dataclass(frozen=True)
class Flags(LoggingConfig, MemoryConfig, ParallelismConfig, AdapterConfig, TrainingConfig, DataConfig, ModelConfig):
    """All flags of a training run in one flat object, and what follows from them."""

    @property
    def eval_schedule(self) -> str:
        """When the run evaluates: no, steps or epoch."""
        if self.eval_strategy != "no" or self.eval_fraction is None:
            return self.eval_strategy
        return "epoch" if self.eval_steps is None else "steps"

    @property
    def evaluates_at_end(self) -> bool:
        """True if the run evaluates after its last step, whatever the schedule."""
        return self.eval_fraction is not None and self.eval_strategy == "no"

    @property
    def steps_per_evaluation(self) -> int:
        """The value of --eval_steps, or its default."""
        return 500 if self.eval_steps is None else self.eval_steps

    @property
    def retains_best(self) -> bool:
        """True if the checkpoint with the lowest evaluation loss is never removed."""
        return self.keep_best or (self.early_stopping_patience is not None and self.save_strategy != "no")

    @property
    def remat_policy(self) -> str:
        """The value of --remat, or its equivalent of --gradient_checkpointing."""
        if self.remat is not None:
            return self.remat
        return "none" if self.gradient_checkpointing is False else "attention"

    @property
    def compiles(self) -> bool:
        """True if the decoder layers are compiled."""
        return bool(self.torch_compile)

    @property
    def tiles_layers(self) -> bool:
        """True if layers run in tiles of tokens."""
        return bool(self.tile_layers)

    @property
    def slices_heads(self) -> bool:
        """True if layers pass their heads to attention in slices. FP8 weights cannot be cut by heads."""
        return self.tiles_layers and self.fp8 is None

    @property
    def group_size(self) -> int:
        """Layers per checkpoint."""
        return self.layers_per_checkpoint or 1

    @property
    def model_name(self) -> str:
        """Preset name, Hub id or directory; the model `scaled` gets its size in the name."""
        name = self.model_name_or_path
        return f"scaled-{self.scaling_strategy}-{self.scaling_factor}" if name == "scaled" else name

    @property
    def kernel_name(self) -> str:
        """The value of --kernel, or its equivalent of --fused_attention."""
        return "reference" if self.fused_attention is False else self.kernel

    @property
    def fsdp_mode(self) -> str:
        """One of full_shard, hybrid_shard and ddp."""
        return next((word for word in fsdp_words(self.fsdp) if word in FSDP_MODES), "ddp")

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that hold different experts; 1 until the plan chooses."""
        return self.expert_parallel_size or 1

    @property
    def state_on_host(self) -> bool:
        """True if the flags put weights, gradients and optimizer state in host memory. False for auto."""
        return self.offload in ("optimizer", "both")

    @property
    def compute_dtype(self) -> str:
        """Name of the torch dtype of activations."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @property
    def itemsize(self) -> int:
        """Bytes per element of the compute dtype."""
        return 4 if self.compute_dtype == "float32" else 2
