"""The peer `trl`: TRL's SFTTrainer with Liger's kernels, as in TRL's guides to memory and long context.

Float32 weights and bfloat16 autocast, TRL's default. These are lightseq's dtypes: master weights, gradients and
optimizer states in float32, products in bfloat16. Every layer is checkpointed. The loss is TRL's own, in chunks, and
Liger replaces RoPE, RMSNorm and the gated MLP. Attention is FlashAttention-4, or SDPA with cuDNN where that is missing.

Several GPUs share a sequence by accelerate's context parallelism over FSDP2, which allows only SDPA and sums gradients
in bfloat16. On CPUs accelerate has neither, so every rank computes the whole sequence under DDP.

Context parallelism refuses packed rows and sliding windows, so each GPU then trains a row of its own: the same row on
all, counted as many. Adapters, float32 over weights in the compute dtype, then train under DDP and whole models under
FSDP2. Packed rows are packed already, as TRL's best-fit packing would, and go through its collator, which separates the
documents.
"""

import contextlib
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import is_flash_attn_4_available

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
from lightseq.data.batches import Batch


def prepare(job: Job) -> TrainerPeer:
    import trl

    packed = job.packed_rows is not None
    context_ranks = job.world.size if job.on_gpu and own_row_reason(job) is None else 1
    if context_ranks > 1:
        job.check_divides(2 * context_ranks, "context parallel")
    data_ranks = job.world.size // context_ranks
    sharded = job.on_gpu and job.world.size > 1 and not job.lora
    fa4 = context_ranks == 1 and is_flash_attn_4_available()
    cudnn = job.takes_cudnn and not fa4

    def train(batches: Sequence[Batch]) -> dict[str, Any]:
        from datasets import Dataset
        from peft import LoraConfig

        model = job.whole_model()
        if job.lora:
            model.to(job.dtype)  # frozen; the adapters stay in float32, as in lightseq
        model.set_attn_implementation("flash_attention_4" if fa4 else "sdpa")
        recorder = StepRecorder(job)
        backend = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else contextlib.nullcontext()
        with tempfile.TemporaryDirectory() as output_dir, backend:
            arguments = trl.SFTConfig(
                **trainer_arguments(job, len(batches), output_dir),
                **(context_parallel(context_ranks) if context_ranks > 1 else {}),
                **(fully_sharded(job) if sharded or context_ranks > 1 else {"gradient_checkpointing": True}),
                packing=packed,
                max_length=None,
                dataset_kwargs={"skip_prepare_dataset": True},
                use_liger_kernel=job.on_gpu,
            )
            rows = (packed_rows_of if packed else rows_of)(batches, data_ranks)
            trainer = trl.SFTTrainer(
                model,
                arguments,
                data_collator=None if packed else collate,
                train_dataset=Dataset.from_list([*rows]),
                processing_class=tokenizer_of(job.config.vocab_size),
                callbacks=[recorder],
                peft_config=LoraConfig(**lora_arguments(job.lora), task_type="CAUSAL_LM") if job.lora else None,
            )
            if job.lora:
                job.initialize_adapters(trainer.model.get_base_model())
            trainer.train()
        return {**recorder.numbers(), "sequences": data_ranks if job.on_gpu else 1}

    attention = {"kernel": "fa4", "transport": "nccl"} if fa4 else job.sdpa_facts
    schedule, note = "context parallel" if context_ranks > 1 else "none", "; ".join(notes_of(job, fa4))
    return TrainerPeer(train, {"schedule": schedule, **attention, "remat": "full", "compile": False, "note": note})


def own_row_reason(job: Job) -> str | None:
    """Returns why every GPU trains a row of its own; None if context parallelism can share one."""
    if job.packed_rows:
        return "TRL refuses packing with context parallelism"
    return "context parallelism has no sliding windows" if job.has_windows else None


def context_parallel(ranks: int) -> dict[str, Any]:
    """Returns arguments for context parallelism, which needs FSDP2."""
    from accelerate.parallelism_config import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(cp_size=ranks, cp_backend="torch")}


def fully_sharded(job: Job, checkpoints: bool = True) -> dict[str, Any]:
    """Returns arguments for FSDP2, which then checkpoints the layers if asked to. Small models stay gathered."""
    return {
        "gradient_checkpointing": False,
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [job.layer_class],
            "activation_checkpointing": checkpoints,
            "reshard_after_forward": job.reshards,
        },
    }


def notes_of(job: Job, fa4: bool) -> list[str]:
    """Returns the versions, and what the trainer does without."""
    notes = [f"TRL {version('trl')}"]
    notes.append(f"Liger {version('liger-kernel')}" if job.on_gpu else "without Liger, which needs a GPU")
    if not job.on_gpu:
        notes.append("sdpa, because flash-attn-4 needs a GPU")
    elif not fa4:
        shared = job.world.size > 1 and own_row_reason(job) is None
        reason = "context parallelism needs it" if shared else "flash-attn-4 is not installed"
        notes.append(f"sdpa, because {reason}")
    if not job.on_gpu and job.world.size > 1:
        notes.append("DDP with the whole sequence on every rank, because context parallelism needs GPUs")
    if job.on_gpu and job.world.size > 1 and (why_own := own_row_reason(job)):
        notes.append(f"a row per GPU under {'DDP' if job.lora else 'FSDP2'}, because {why_own}")
    return notes
