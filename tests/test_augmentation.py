"""Random augmentation in a data set is the same on ranks that share a sequence, and differs between groups."""

import random
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from trainer_numbers import common, documents, fresh_model
from transformers import TrainingArguments
from worlds import spawn

from lightseq.integrations import SequenceParallelTrainer
from lightseq.integrations.accelerate import prepare

Seen = list[list[list[int]]]


class Augmented(Dataset[list[int]]):
    """The same row sixteen times, with three tokens replaced by numbers of torch, NumPy and Python."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> list[int]:
        drawn = [int(torch.randint(3, 64, ())), int(np.random.randint(3, 64)), random.randrange(3, 64)]
        return drawn + documents()[0][:13]


def collate(rows: list[list[int]]) -> dict[str, Tensor]:
    ids = torch.tensor(rows)
    return {"input_ids": ids, "labels": ids.clone()}


class Recording(SequenceParallelTrainer):
    seen: Seen

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append(inputs["input_ids"][:, :3].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


def train(_rank: int, size: int, workers: int) -> Seen:
    """Trains for two epochs."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            **common(
                folder, remove_unused_columns=False, dataloader_num_workers=workers, eval_strategy="no",
                num_train_epochs=2, max_steps=-1, per_device_train_batch_size=4,
            )
        )  # fmt: skip
        trainer = Recording(
            fresh_model(), arguments, data_collator=collate, train_dataset=Augmented(), sequence_parallel_size=size
        )
        trainer.seen = []
        trainer.train()
        return trainer.seen


def loop(rank: int, size: int, workers: int) -> Seen:
    """Does so in a loop with accelerate, in which ranks draw other numbers between epochs."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    accelerator, model = Accelerator(cpu=True), fresh_model()
    loader = DataLoader(Augmented(), 4, collate_fn=collate, num_workers=workers)  # type: ignore[arg-type]
    model, loader = prepare(accelerator, model, loader, sequence_parallel_size=size)
    seen = []
    for _ in range(2):
        for batch in loader:
            model(**batch)
            seen.append(batch["input_ids"][:, :3].tolist())
        for _ in range(rank):
            torch.rand(1), np.random.rand(), random.random()
    return seen


def check(ranks: list[Seen], size: int) -> None:
    assert all(seen == ranks[rank // size * size] for rank, seen in enumerate(ranks))
    rows = [tuple(row) for seen in ranks[::size] for batch in seen for row in batch]
    assert len(set(rows)) == len(rows), "no row is drawn twice, neither in another epoch nor by another group"


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("run", [train, pytest.param(loop, marks=pytest.mark.slow)])
def test_ranks_of_a_group_augment_alike(run: Any, workers: int) -> None:
    check(spawn(2, run, 2, workers), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "workers"), [(train, 2), (loop, 0), (loop, 2)])
def test_groups_augment_differently(run: Any, workers: int) -> None:
    check(spawn(4, run, 2, workers), 2)
