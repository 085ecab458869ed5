"""Trainers whose sequences are split over ranks give the numbers of the unmodified trainer on one process."""

import tempfile
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_numbers import Numbers, assert_equal, collate, common, documents, fresh_model, numbers, sizes
from transformers import Trainer, TrainingArguments
from worlds import spawn

from lightseq.integrations import SequenceParallelTrainer


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


def plain_after(rank: int, sequence_parallel: bool) -> Numbers:
    rows = [{"input_ids": ids} for ids in documents()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**common(folder, remove_unused_columns=False))
        datasets: dict[str, Any] = {"data_collator": collate, "train_dataset": rows, "eval_dataset": rows[:5]}
        if sequence_parallel:
            SequenceParallelTrainer(fresh_model(), arguments, **datasets)
        return numbers(Trainer(fresh_model(), arguments, **datasets))


def test_plain_trainer_after_ours_gets_batches_of_its_own() -> None:
    wanted = spawn(2, plain_after, False)[0]
    for got in spawn(2, plain_after, True):
        assert_equal(got, wanted)
