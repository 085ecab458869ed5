"""Common parts of peers that train with a trainer of transformers: its rows, its batches and its numbers."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainerCallback

from benchmarks.step_peers.peer import CLIP_NORM, SEED, Job, reset_peak_memory, step_numbers
from lightseq.data.batches import Batch
from lightseq.distributed.stopwatch import DeviceTimestamp
from lightseq.models.adapters import Lora


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
