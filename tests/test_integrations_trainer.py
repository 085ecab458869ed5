"""Trainers whose sequences are split over ranks give the numbers of the unmodified trainer on one process."""

import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from trainer_numbers import Numbers, assert_equal, collate, common, documents, fresh_model, numbers, sizes
from transformers import EvalPrediction, Trainer, TrainingArguments
from worlds import spawn

from lightseq.integrations import SequenceParallelTrainer


def mean_of_squares(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """A loss that is not linear in the tokens' losses and reads whole logits."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses.sum(1) / 50).square().sum() / 4


def whole_evaluation(found: EvalPrediction) -> dict[str, float]:
    """Metrics of all that Trainer passes: logits, labels, inputs and losses."""
    targets = torch.from_numpy(found.label_ids[:, 1:])
    logits = torch.from_numpy(found.predictions[:, :-1]).transpose(1, 2)
    return {
        "token_loss": torch.nn.functional.cross_entropy(logits, targets).item(),
        "rows": len(found.predictions),
        "inputs": float(found.inputs.sum()),
        "row_loss": float(found.losses.mean()),
    }


class Stream(IterableDataset[dict[str, list[int]]]):
    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return ({"input_ids": ids} for ids in documents())


TRAINER_CASES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "smoothed": {"label_smoothing_factor": 0.1},
    "custom": {"compute_loss_func": mean_of_squares},
    "checkpointed": {"gradient_checkpointing": True},
    "counted": {"include_num_input_tokens_seen": "non_padding", "average_tokens_across_devices": True},
    "counted alone": {"average_tokens_across_devices": False},
    "evaluated first": {"evaluate_first": True},
    "metrics": {"compute_metrics": whole_evaluation, "include_for_metrics": ["inputs", "loss"]},
    "streamed": {"train_dataset": Stream()},
    "without targets": {"train_dataset": [{"input_ids": ids[:1]} for ids in documents()]},
}


def train(rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    case = dict(case)
    own = {name: case.pop(name, None) for name in ("compute_loss_func", "compute_metrics")}
    evaluates_first = case.pop("evaluate_first", False) and kind is SequenceParallelTrainer  # Trainer has a bug here
    if kind is Trainer:
        case["accelerator_config"] = {"dispatch_batches": False}  # as ours: batches of a stream differ in length
    rows = [{"input_ids": ids} for ids in documents()]
    train_dataset = case.pop("train_dataset", rows)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**common(folder, remove_unused_columns=False, **case))
        arguments.per_device_train_batch_size = 2 // data_ranks
        trainer = kind(
            fresh_model(), arguments, data_collator=collate, train_dataset=train_dataset, eval_dataset=rows[:5],
            **own, **options,
        )  # fmt: skip
        if evaluates_first:
            trainer.evaluate()
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
