"""The peer `unsloth`: full fine-tuning or adapters with Unsloth and the SFTTrainer that it patches.

Float32 weights and bfloat16 autocast by `float32_mixed_precision`, which are lightseq's dtypes. Unsloth's own gradient
checkpointing, which offloads the layers' inputs, its kernels, its loss and its choice of attention. The trainer shifts
the labels, so the last token of a sequence has no target. Several GPUs train a row each under Unsloth's own FSDP2: the
same row on all, counted as many.

Unsloth needs older transformers and TRL than the peer `trl`, hence `--unsloth_python` of step.py. It is AGPL: it is no
dependency, and only worker.py imports it, before everything else, in a process of its own.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step_peers.peer import SEED, Job, TrainerPeer
from benchmarks.step_peers.sft import (
    StepRecorder,
    lora_arguments,
    packed_rows_of,
    rows_of,
    tokenizer_of,
    trainer_arguments,
)
from lightseq.architecture.flops import count_adapter_parameters
from lightseq.data.batches import Batch
from lightseq.parts.adapters import Lora


def prepare(job: Job) -> TrainerPeer:
    if job.world.size > 1 and not job.on_gpu:
        raise ValueError("Unsloth is measured with one process on CPUs; give --nproc_per_node 1")
    packages = ("unsloth", "trl", "transformers")
    note = ", ".join(f"{name} {version(name)}" for name in packages) + "; attention is Unsloth's choice"
    note += "; a row per GPU under Unsloth's FSDP2" if job.world.size > 1 else ""
    facts = {"schedule": "none", "remat": "full, offloaded", "compile": False, "note": note}
    return TrainerPeer(lambda batches: train(job, batches), facts)


def train(job: Job, batches: Sequence[Batch]) -> dict[str, Any]:
    import trl
    from datasets import Dataset
    from unsloth import FastLanguageModel

    recorder, packed, copies = StepRecorder(job), job.packed_rows is not None, job.world.size
    with shared_directory(job) as directory:
        parameters = save_model(job, directory)
        model, tokenizer = FastLanguageModel.from_pretrained(
            directory,
            max_seq_length=job.length,
            dtype=torch.bfloat16 if job.on_gpu else torch.float32,
            load_in_4bit=False,
            full_finetuning=job.lora is None,
            **({"float32_mixed_precision": True} if job.on_gpu else {}),  # unknown to its loader for CPUs
        )
        if job.lora:
            model = add_adapters(model, job.lora)
            parameters = count_adapter_parameters(job.lora, job.config)
            job.initialize_adapters(model.get_base_model())
        check_weights(model, parameters)
        arguments = trl.SFTConfig(
            **trainer_arguments(job, len(batches), directory),
            max_length=job.length,
            packing=packed,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        unshifted = [replace(batch, labels=batch.input_ids) for batch in batches]
        rows = packed_rows_of(batches, copies) if packed else rows_of(unshifted, copies)
        trainer = trl.SFTTrainer(
            model,
            arguments,
            train_dataset=Dataset.from_list([*rows]),
            processing_class=tokenizer,
            callbacks=[recorder],
        )
        if trainer.args.gradient_accumulation_steps != 1:
            raise ValueError(f"Unsloth takes {trainer.args.gradient_accumulation_steps} rows a step, not 1")
        if packed and not trainer.args.packing:
            raise ValueError("Unsloth turned packing off, so documents would attend to each other")
        trainer.train()
    return {**recorder.numbers(), "sequences": copies}


@contextmanager
def shared_directory(job: Job) -> Iterator[str]:
    """Yields a temporary directory that all ranks of this host see and the main rank removes."""
    with tempfile.TemporaryDirectory() as own:
        paths = [own]
        dist.broadcast_object_list(paths, src=0)
        yield paths[0]
        dist.barrier()  # no rank reads from it any more


def save_model(job: Job, directory: str) -> int:
    """Writes the model and a tokenizer on the main rank, and returns the number of parameters.

    The weights are written in the compute dtype, in which Unsloth loads them before it trains float32 copies.
    """
    original = job.whole_model()
    parameters = sum(p.numel() for p in original.parameters())
    if job.world.is_main:
        # Unsloth would scale the RoPE of a model with fewer positions than tokens in a row.
        text = original.config.get_text_config()
        text.max_position_embeddings = max(text.max_position_embeddings, job.length)
        original.to(job.dtype).save_pretrained(directory)
        tokenizer_of(job.config.vocab_size).save_pretrained(directory)
    dist.barrier()
    return parameters


def add_adapters(model: Any, lora: Lora) -> Any:
    """Adds adapters as Unsloth's guide does, with its gradient checkpointing."""
    from unsloth import FastLanguageModel

    return FastLanguageModel.get_peft_model(
        model,
        **lora_arguments(lora),
        use_gradient_checkpointing="unsloth",
        random_state=SEED,
    )


def check_weights(model: torch.nn.Module, parameters: int) -> None:
    """Raises ValueError unless Unsloth trains this many parameters and holds them in float32."""
    trained = [p for p in model.parameters() if p.requires_grad]
    count, dtypes = sum(p.numel() for p in trained), {p.dtype for p in trained}
    if count != parameters or dtypes != {torch.float32}:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"Unsloth trains {count:,} parameters in {names}; it must be {parameters:,} in float32")
