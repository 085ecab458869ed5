"""The peer `unsloth`: full fine-tuning with Unsloth and the SFTTrainer that it patches, on one GPU.

Float32 weights and bfloat16 autocast by `float32_mixed_precision`, which are lightseq's dtypes. Unsloth's own gradient
checkpointing, which offloads the layers' inputs, its kernels, its loss and its choice of attention. The trainer shifts
the labels, so the last token of a sequence has no target.

Unsloth needs older transformers and TRL than the peer `trl`, hence `--unsloth_python` of step.py. It is AGPL: it is no
dependency, and only unsloth_worker.py imports it first, in a process of its own.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.step_peers.hf_trainer import StepRecorder, rows_of, tokenizer_of, trainer_arguments
from benchmarks.step_peers.peer import Job, TrainerPeer
from lightseq.data.batches import Batch


def prepare(job: Job) -> TrainerPeer:
    if job.world.size > 1:
        raise ValueError("Unsloth is measured on one GPU only")
    packages = ("unsloth", "trl", "transformers")
    note = ", ".join(f"{name} {version(name)}" for name in packages) + "; attention is Unsloth's choice"
    facts = {"schedule": "none", "remat": "full, offloaded", "compile": False, "note": note}
    return TrainerPeer(lambda batches: train(job, batches), facts)


def train(job: Job, batches: Sequence[Batch]) -> dict[str, Any]:
    import trl
    from datasets import Dataset
    from unsloth import FastLanguageModel

    recorder = StepRecorder(job)
    with tempfile.TemporaryDirectory() as directory:
        original = job.whole_model()
        parameters = sum(p.numel() for p in original.parameters())
        original.save_pretrained(directory)
        del original
        tokenizer_of(job.config.vocab_size).save_pretrained(directory)
        model, tokenizer = FastLanguageModel.from_pretrained(
            directory,
            max_seq_length=job.length,
            dtype=torch.bfloat16 if job.on_gpu else torch.float32,
            load_in_4bit=False,
            full_finetuning=True,
            **({"float32_mixed_precision": True} if job.on_gpu else {}),  # unknown to its loader for CPUs
        )
        check_weights(model, parameters)
        arguments = trl.SFTConfig(
            **trainer_arguments(job, len(batches), directory),
            max_length=job.length,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        unshifted = [replace(batch, labels=batch.input_ids) for batch in batches]
        trainer = trl.SFTTrainer(
            model,
            arguments,
            train_dataset=Dataset.from_list([*rows_of(unshifted, 1)]),
            processing_class=tokenizer,
            callbacks=[recorder],
        )
        trainer.train()
    return recorder.numbers()


def check_weights(model: torch.nn.Module, parameters: int) -> None:
    """Raises ValueError unless Unsloth trains all parameters and holds them in float32."""
    trained = [p for p in model.parameters() if p.requires_grad]
    count, dtypes = sum(p.numel() for p in trained), {p.dtype for p in trained}
    if count != parameters or dtypes != {torch.float32}:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"Unsloth trains {count:,} of {parameters:,} parameters in {names}; all must be in float32")
