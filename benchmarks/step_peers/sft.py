"""The peers `trl` and `lightseq-sft`: TRL's SFTTrainer, and lightseq's subclass of it as docs/trainers.md shows.

Both have float32 weights and bfloat16 autocast, TRL's default. These are lightseq's dtypes: master weights, gradients
and optimizer states in float32, products in bfloat16.

`trl` checkpoints every layer. The loss is TRL's own, in chunks, and Liger replaces RoPE, RMSNorm and the gated MLP.
Attention is FlashAttention-4, or SDPA with cuDNN where that is missing. Several GPUs share a sequence by accelerate's
context parallelism over FSDP2, which allows only SDPA and sums gradients in bfloat16. On CPUs accelerate has neither,
so every rank computes the whole sequence under DDP. Context parallelism refuses packed rows and sliding windows, so
each GPU then trains a row of its own: the same row on all, counted as many. Adapters, float32 over weights in the
compute dtype, then train under DDP and whole models under FSDP2.

`lightseq-sft` shards over all ranks through accelerate's FSDP2, compiles layers and recomputes nothing.

Packed rows are packed already, as TRL's best-fit packing would, and go through its collator, which separates the
documents.
"""

import contextlib
import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import is_flash_attn_4_available

from benchmarks.step_peers.peer import CLIP_NORM, SEED, Job, TrainerPeer, reset_peak_memory, step_numbers
from lightseq.data.batches import Batch
from lightseq.distributed.stopwatch import DeviceTimestamp
from lightseq.models.decoder import attending_part, decoder_layers, has_towers, text_config
from lightseq.parts.adapters import Lora


def prepare_trl(job: Job) -> TrainerPeer:
    import trl

    context_ranks = job.world.size if job.on_gpu and own_row_reason(job) is None else 1
    if context_ranks > 1:
        job.check_divides(2 * context_ranks, "context parallel")
    data_ranks = job.world.size // context_ranks
    sharded = job.on_gpu and job.world.size > 1 and not job.lora
    fa4 = context_ranks == 1 and is_flash_attn_4_available()
    cudnn = job.takes_cudnn and not fa4

    def train(batches: Sequence[Batch]) -> dict[str, Any]:
        arguments = {
            **(context_parallel(context_ranks) if context_ranks > 1 else {}),
            **(
                fully_sharded(job, checkpoints=True)
                if sharded or context_ranks > 1
                else {"gradient_checkpointing": True}
            ),
            "max_length": None,
            "use_liger_kernel": job.on_gpu,
        }
        attention = {"attention": "flash_attention_4" if fa4 else "sdpa"}
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else contextlib.nullcontext():
            numbers = train_with(trl.SFTTrainer, job, batches, arguments, copies=data_ranks, **attention)
        return {**numbers, "sequences": data_ranks if job.on_gpu else 1}

    attention = {"kernel": "fa4", "transport": "nccl"} if fa4 else job.sdpa_facts
    schedule, note = "context parallel" if context_ranks > 1 else "none", "; ".join(notes_of(job, fa4))
    return TrainerPeer(train, {"schedule": schedule, **attention, "remat": "full", "compile": False, "note": note})


def prepare_lightseq(job: Job) -> TrainerPeer:
    def train(batches: Sequence[Batch]) -> dict[str, Any]:
        from lightseq.integrations import SequenceParallelSFTTrainer

        sharded = fully_sharded(job, checkpoints=False) if job.on_gpu and job.world.size > 1 else {}
        arguments = sharded | {"gradient_checkpointing": False, "max_length": job.length if job.packed_rows else None}
        return train_with(SequenceParallelSFTTrainer, job, batches, arguments, compile_layers=job.on_gpu)

    return TrainerPeer(train, {"remat": "none", "compile": job.on_gpu, "note": f"TRL {version('trl')}"})


def train_with(
    trainer_class: type, job: Job, batches: Sequence[Batch], arguments: Mapping[str, Any], copies: int = 1,
    attention: str | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Trains a step per batch with SFTTrainer or a subclass and returns the steps' numbers.

    `arguments` go to SFTConfig, `options` to the trainer. Each of `copies` data-parallel ranks trains the same row.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig

    model, packed, recorder = job.whole_model(), job.packed_rows is not None, StepRecorder(job)
    if has_towers(job.config):
        add_towers(model)  # Liger looks for them
    if job.lora:
        model.to(job.dtype)  # frozen; the adapters stay in float32, as in lightseq
    if job.load_in_4bit:
        quantize_as_transformers_does(model)
    if attention is not None:
        attending_part(model).set_attn_implementation(attention)  # encoders of images may support less
    with tempfile.TemporaryDirectory() as output_dir:
        config = SFTConfig(
            **trainer_arguments(job, len(batches), output_dir),
            packing=packed,
            dataset_kwargs={"skip_prepare_dataset": True},
            # Experts: no router loss, as in lightseq without its flag.
            **({"router_aux_loss_coef": 0.0} if hasattr(text_config(job.config), "output_router_logits") else {}),
            **arguments,
        )
        trainer = trainer_class(
            model,
            config,
            data_collator=None if packed else collate,
            train_dataset=Dataset.from_list([*(packed_rows_of if packed else rows_of)(batches, copies)]),
            processing_class=tokenizer_of(text_config(job.config).vocab_size),
            callbacks=[recorder],
            peft_config=LoraConfig(**lora_arguments(job.lora), task_type="CAUSAL_LM") if job.lora else None,
            **options,
        )
        if job.lora:
            job.initialize_adapters(trainer.model.get_base_model())
        trainer.train()
    return recorder.numbers()


def add_towers(model: PreTrainedModel) -> None:
    """Adds the frozen encoders of images, without values, to a model that trains on text."""
    with torch.device("meta"):
        whole = type(model)._from_config(copy.deepcopy(model.config))
    for name, part in whole.base_model.named_children():
        if getattr(model.base_model, name, None) is None:
            setattr(model.base_model, name, part.to_empty(device=model.device).requires_grad_(False))


def quantize_as_transformers_does(model: PreTrainedModel) -> None:
    """Puts the linears of the layers in four bits as `from_pretrained` with BitsAndBytesConfig does (NF4, nested)."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for layer in decoder_layers(model):
        for parent in [*layer.modules()]:
            for name, linear in parent.named_children():
                if type(linear) is not torch.nn.Linear:
                    continue
                weight = linear.weight
                with torch.device("meta"):
                    quantized = Linear4bit(
                        linear.in_features, linear.out_features, bias=False, compute_dtype=weight.dtype,
                        compress_statistics=True, quant_type="nf4",
                    )  # fmt: skip
                quantized.bias = linear.bias
                quantized.weight = Params4bit(
                    weight.detach().cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4",
                    module=quantized,
                ).to(weight.device)  # fmt: skip
                setattr(parent, name, quantized)
    model.is_loaded_in_4bit = True  # which peft and TRL look at


def own_row_reason(job: Job) -> str | None:
    """Returns why GPUs cannot share a row; None if context parallelism can share one."""
    if job.packed_rows:
        return "TRL refuses packing with context parallelism"
    if job.has_windows:
        return "context parallelism has no sliding windows"
    return "context parallelism has no recurrent layers" if job.has_recurrences else None


def context_parallel(ranks: int) -> dict[str, Any]:
    """Returns arguments for context parallelism, which needs FSDP2."""
    from accelerate.parallelism_config import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(cp_size=ranks, cp_backend="torch")}


def fully_sharded(job: Job, checkpoints: bool) -> dict[str, Any]:
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


# ---- common to trainers of transformers ------------------------------------------------------------------------------


class StepRecorder(TrainerCallback):
    """Callback that collects the end, the loss and the gradient norm of every step."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._moments: list[DeviceTimestamp] = []
        self._losses: list[float] = []
        self._grad_norms: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        reset_peak_memory(self._job.world.device)
        self._moments.append(DeviceTimestamp(self._job.world.device))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._moments.append(DeviceTimestamp(self._job.world.device))

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: Mapping[str, float], **_: Any) -> None:
        if "grad_norm" in logs:  # the last entry has the averages of the run
            self._losses.append(logs["loss"])
            self._grad_norms.append(logs["grad_norm"])

    def numbers(self) -> dict[str, Any]:
        world = self._job.world
        shares = torch.tensor(self._losses, device=world.device) / world.size  # every rank logs the mean of all
        return step_numbers(self._moments, shares, self._grad_norms, world.device)


def trainer_arguments(job: Job, steps: int, output_dir: str) -> dict[str, Any]:
    """Returns arguments that make a trainer take lightseq's steps: its optimizer, clipping, order and logging."""
    return {
        "output_dir": output_dir,
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,  # Unsloth's default is 2
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch_fused",
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": CLIP_NORM,
        "bf16": job.on_gpu,
        "use_cpu": not job.on_gpu,
        "seed": SEED,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_num_workers": int(job.on_gpu),  # makes tensors of the next rows meanwhile
    }


def rows_of(batches: Sequence[Batch], copies: int) -> Iterator[dict[str, list[int]]]:
    """Yields the rows of a dataset. With `copies`, as many data-parallel ranks get the same row in each step."""
    for batch in batches:
        for _ in range(copies):
            yield {"input_ids": batch.input_ids[0].tolist(), "labels": batch.labels[0].tolist()}


def packed_rows_of(batches: Sequence[Batch], copies: int) -> Iterator[dict[str, list[int]]]:
    """Yields rows as TRL packs them: labels not shifted yet, and the length of every document in the row."""
    for batch in batches:
        assert batch.boundaries is not None
        ids, sizes = batch.input_ids[0].tolist(), [b - a for a, b in pairwise(batch.boundaries)]
        for _ in range(copies):
            yield {"input_ids": ids, "labels": ids, "seq_lengths": sizes}


def lora_arguments(lora: Lora) -> dict[str, Any]:
    """Returns lightseq's adapters as arguments of peft and of Unsloth."""
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def collate(rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
    """Stacks rows whose labels are already shifted, so that the last token has a target too, as in lightseq."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "labels": labels, "shift_labels": labels.clone(), "attention_mask": torch.ones_like(ids)}


def tokenizer_of(vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer for trainers that refuse to start without one. Rows are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"<{index}>": index for index in range(min(vocab_size, 3))}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<0>")), pad_token="<0>", eos_token="<2>"
    )
