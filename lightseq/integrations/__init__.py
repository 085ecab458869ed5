"""lightseq inside other trainers: transformers' Trainer, TRL's trainers, loops with accelerate."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightseq.integrations.async_grpo import SequenceParallelAsyncGRPOTrainer
    from lightseq.integrations.trainer import SequenceParallel, SequenceParallelTrainer
    from lightseq.integrations.trl import (
        SequenceParallelDistillationTrainer,
        SequenceParallelDPOTrainer,
        SequenceParallelGRPOTrainer,
        SequenceParallelRewardTrainer,
        SequenceParallelRLOOTrainer,
        SequenceParallelSFTTrainer,
    )

__all__ = [
    "SequenceParallel",
    "SequenceParallelAsyncGRPOTrainer",
    "SequenceParallelDPOTrainer",
    "SequenceParallelDistillationTrainer",
    "SequenceParallelGRPOTrainer",
    "SequenceParallelRLOOTrainer",
    "SequenceParallelRewardTrainer",
    "SequenceParallelSFTTrainer",
    "SequenceParallelTrainer",
]


def __getattr__(name: str) -> Any:
    """Imports a class when it is asked for, so that Trainer's users need no TRL."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}; choose from {', '.join(__all__)}")
    if name in ("SequenceParallel", "SequenceParallelTrainer"):
        from lightseq.integrations import trainer

        return getattr(trainer, name)
    if name == "SequenceParallelAsyncGRPOTrainer":
        from lightseq.integrations import async_grpo

        return async_grpo.SequenceParallelAsyncGRPOTrainer
    from lightseq.integrations import trl

    return getattr(trl, name)
