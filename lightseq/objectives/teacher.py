"""Flags of a frozen teacher's forward pass."""

from typing import Final

from lightseq.config.recurrent_schedules import AUTO
from lightseq.config.train_config import TrainConfig

# Flags of the batch, of its split and of the computation. Those of memory, adapters and FP8 are the trained model's.
SHARED_FLAGS: Final = (
    *("model_max_length", "packing", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("bf16", "fp16", "tf32", "deterministic", "torch_compile"),
    *("sequence_parallel_size", "schedule", "ulysses_size", "kernel", "fused_attention", "transport"),
    "fsdp",
)


def flags_for_teacher(config: TrainConfig, has_scans: bool = False) -> TrainConfig:
    """Returns the flags of a teacher's forward pass: layers that keep nothing, MLPs in tiles, whole experts."""
    shared = {name: getattr(config, name) for name in SHARED_FLAGS}
    recurrent = config.recurrent_schedule if has_scans else AUTO
    return TrainConfig(**shared, remat="full", offload="none", recurrent_schedule=recurrent)
