"""A small model, data with a pattern to learn, and the command line that trains the one on the other, or plain SGD."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from lightseq.training.metrics import read_records

VOCABULARY, HIDDEN, INTERMEDIATE, LENGTH = 64, 128, 256, 48
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64,
)  # fmt: skip


def write_inputs(folder: Path) -> Path:
    """The model's config and 16 sequences, some with few targets, into a folder."""
    CONFIG.save_pretrained(folder / "model")
    starts = np.random.default_rng(0).integers(0, VOCABULARY, 16)
    lengths = [LENGTH if i % 3 else 5 + i for i in range(16)]
    ids = [((s + 5 * np.arange(n)) % VOCABULARY).tolist() for s, n in zip(starts, lengths, strict=True)]
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": ids}))
    return folder


def words(files: Path, output: str, more: str = "") -> str:
    """A command line; later words win."""
    return (
        f"--model_name_or_path {files}/model --random_init --data_path {files}/data.pkl --output_dir {files}/{output} "
        f"--model_max_length {LENGTH} --learning_rate 1e-3 --lr_scheduler_type cosine --weight_decay 0.1 {more}"
    )


def losses(files: Path, output: str) -> list[float]:
    return [record["loss"] for record in read_records(files / output / "metrics.jsonl") if "loss" in record]


def sgd_steps(model: Any, batches: list[list[list[int]]], rate: float) -> list[float]:
    """Trains with plain SGD on one document after the other. Returns the mean loss over the targets of each batch."""
    losses = []
    for documents in batches:
        total, targets = 0.0, sum(len(ids) - 1 for ids in documents)
        for ids in documents:
            x = torch.tensor([ids])
            loss = model(input_ids=x, labels=x).loss * (len(ids) - 1) / targets
            loss.backward()
            total += loss.item()
        losses.append(total)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
                    parameter.grad = None
    return losses
