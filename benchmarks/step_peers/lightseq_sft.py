"""The implementation `lightseq-sft`: TRL's SFTTrainer with `SequenceParallel` before it, as docs/trainers.md shows.

FSDP2 over all ranks through accelerate, bfloat16, layers compiled. Nothing is recomputed, or with
gradient_checkpointing all but attention.
"""

import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.step_peers.hf_trainer import (
    StepRecorder,
    collate,
    lora_arguments,
    packed_rows_of,
    rows_of,
    tokenizer_of,
    trainer_arguments,
)
from benchmarks.step_peers.peer import Job, TrainerPeer
from benchmarks.step_peers.trl_sft import fully_sharded
from lightseq.data.batches import Batch


def prepare(job: Job) -> TrainerPeer:
    packed = job.packed_rows is not None

    def train(batches: Sequence[Batch]) -> dict[str, Any]:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import SFTConfig

        from lightseq.integrations import SequenceParallelSFTTrainer

        model = job.whole_model()
        if job.lora:
            model.to(job.dtype)  # frozen; the adapters stay in float32
        sharded = fully_sharded(job, checkpoints=False) if job.on_gpu and job.world.size > 1 else {}
        sharded["gradient_checkpointing"] = job.gradient_checkpointing
        recorder = StepRecorder(job)
        with tempfile.TemporaryDirectory() as output_dir:
            arguments = SFTConfig(
                **trainer_arguments(job, len(batches), output_dir),
                **sharded,
                packing=packed,
                max_length=job.length if packed else None,
                dataset_kwargs={"skip_prepare_dataset": True},
            )
            trainer = SequenceParallelSFTTrainer(
                model,
                arguments,
                data_collator=None if packed else collate,
                train_dataset=Dataset.from_list([*(packed_rows_of if packed else rows_of)(batches, 1)]),
                processing_class=tokenizer_of(job.config.vocab_size),
                callbacks=[recorder],
                peft_config=LoraConfig(**lora_arguments(job.lora), task_type="CAUSAL_LM") if job.lora else None,
                compile_layers=job.on_gpu,
            )
            if job.lora:
                job.initialize_adapters(trainer.model.get_base_model())
            trainer.train()
        return recorder.numbers()

    remat = "attention" if job.gradient_checkpointing else "none"
    facts = {"remat": remat, "compile": job.on_gpu, "note": f"TRL {version('trl')}"}
    return TrainerPeer(train, facts)
