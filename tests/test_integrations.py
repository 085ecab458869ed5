"""Trainers whose sequences are split over ranks give the numbers of the unmodified trainer on one process."""

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from worlds import spawn

from lightseq.integrations import SequenceParallelTrainer

pytestmark = pytest.mark.compat

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
)
LENGTHS = (50, 17, 33, 60, 24, 60, 9, 41, 60, 35, 21, 48)  # of the documents: batches have different numbers of targets
STEPS = 3
Numbers = dict[str, Any]


def documents(count: int = len(LENGTHS), seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, CONFIG.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS[:count]]


def fresh_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp_min(0), "attention_mask": (labels != -100).long(), "labels": labels}


def common(folder: str, **changes: Any) -> dict[str, Any]:
    # Not AdamW and no clipping: they would hide gradients of another scale.
    return {
        "output_dir": folder,
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.0,
        "max_steps": STEPS,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "ddp_find_unused_parameters": False,
        **changes,
    }


def numbers(trainer: Trainer) -> Numbers:
    """Trains, and returns what is logged and the weights."""
    trainer.train()
    timed = ("runtime", "per_second", "flos")
    history = [
        {k: v for k, v in record.items() if not any(t in k for t in timed)} for record in trainer.state.log_history
    ]
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters() if p.requires_grad}
    return {"history": history, "weights": weights, "flos": trainer.state.total_flos}


def assert_equal(got: Numbers, wanted: Numbers) -> None:
    assert len(got["history"]) == len(wanted["history"])
    for ours, theirs in zip(got["history"], wanted["history"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (name, ours["step"])
    assert got["flos"] == pytest.approx(wanted["flos"], rel=1e-6)
    for name, weight in wanted["weights"].items():
        assert np.linalg.norm(got["weights"][name] - weight) <= 1e-5 * np.linalg.norm(weight), name


def sizes(world: int) -> list[int]:
    """Returns the sequence parallel sizes to test. Data parallel runs are compared with the unmodified trainer's."""
    return [size for size in range(2, world + 1) if world % size == 0]


# ---- transformers' Trainer ------------------------------------------------------------------------------------------


def mean_of_squares(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """A loss that is not linear in the tokens' losses and reads whole logits."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses.sum(1) / 50).square().sum() / 4


TRAINER_CASES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "smoothed": {"label_smoothing_factor": 0.1},
    "custom": {"compute_loss_func": mean_of_squares},
    "checkpointed": {"gradient_checkpointing": True},
    "counted": {"include_num_input_tokens_seen": "non_padding", "average_tokens_across_devices": True},
}


def train(rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    case = dict(case)
    loss = case.pop("compute_loss_func", None)
    rows = [{"input_ids": ids} for ids in documents()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**common(folder, remove_unused_columns=False, **case))
        arguments.per_device_train_batch_size = 2 // data_ranks
        trainer = kind(
            fresh_model(), arguments, data_collator=collate, train_dataset=rows, eval_dataset=rows[:5],
            compute_loss_func=loss, **options,
        )  # fmt: skip
        return numbers(trainer)


def train_sequence_parallel(rank: int, case: Mapping[str, Any], size: int, world: int) -> Numbers:
    return train(rank, SequenceParallelTrainer, case, world // size, sequence_parallel_size=size)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", TRAINER_CASES)
def test_trainer_equals_one_process(case: str, world: int) -> None:
    for size in sizes(world):
        data_ranks = world // size
        wanted = spawn(data_ranks, train, Trainer, TRAINER_CASES[case], data_ranks)[0]
        for got in spawn(world, train_sequence_parallel, TRAINER_CASES[case], size, world):
            assert_equal(got, wanted)
