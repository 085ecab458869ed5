"""lightseq inside other trainers: transformers' Trainer, TRL's trainers, loops with accelerate."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightseq.integrations.async_grpo import SequenceParallelAsyncGRPOTrainer
    from lightseq.integrations.distillation_trainer import SequenceParallelDistillationTrainer
    from lightseq.integrations.trainer import SequenceParallel, SequenceParallelTrainer
    from lightseq.integrations.trl import (
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
FILES: Final = {  # where classes are, if not in trl.py
    "SequenceParallel": "trainer",
    "SequenceParallelTrainer": "trainer",
    "SequenceParallelAsyncGRPOTrainer": "async_grpo",
    "SequenceParallelDistillationTrainer": "distillation_trainer",
}


def __getattr__(name: str) -> Any:
    """Imports a class when it is asked for, so that Trainer's users need no TRL."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}; choose from {', '.join(__all__)}")
    file = FILES.get(name, "trl")
    return getattr(import_module(f"{__name__}.{file}"), name)
