"""Random augmentation in a data set is the same on ranks that share a sequence, and differs between groups."""

import random
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from cases import slow_except
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


def draw(workers: int, loader: Any) -> Seen:
    """Returns the tokens that two epochs draw. Seeds workers here, where ranks of tests may have no children."""
    if not workers:
        return [batch["input_ids"][:, :3].tolist() for _ in range(2) for batch in loader]
    seen = []
    for _ in range(2):
        loader.begin()
        seed = int(torch.empty((), dtype=torch.int64).random_())  # as torch draws it for the workers of an epoch
        for worker in range(workers):
            for seed_this in (torch.manual_seed, random.seed, lambda x: np.random.seed(x % 2**32)):
                seed_this(seed + worker)
            if loader.worker_init_fn is not None:
                loader.worker_init_fn(worker)
            seen.append([Augmented()[0][:3]])
        loader.end()
    return seen


def train(_rank: int, size: int, workers: int) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            **common(
                folder, remove_unused_columns=False, dataloader_num_workers=workers, eval_strategy="no",
                per_device_train_batch_size=4,
            )
        )  # fmt: skip
        rows = Augmented()
        trainer = SequenceParallelTrainer(
            fresh_model(), arguments, data_collator=collate, train_dataset=rows, sequence_parallel_size=size
        )
        return draw(workers, trainer.get_train_dataloader())


def loop(rank: int, size: int, workers: int) -> Seen:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    loader = DataLoader(Augmented(), 4, collate_fn=collate, num_workers=workers)  # type: ignore[arg-type]
    _, loader = prepare(Accelerator(cpu=True), fresh_model(), loader, sequence_parallel_size=size)
    return draw(workers, loader)


def check(ranks: list[Seen], size: int) -> None:
    assert all(seen == ranks[rank // size * size] for rank, seen in enumerate(ranks))
    rows = [tuple(row) for seen in ranks[::size] for batch in seen for row in batch]
    assert len(set(rows)) == len(rows), "no row is drawn twice, neither in another epoch nor by another group"


@pytest.mark.parametrize(
    ("run", "workers"), slow_except([(train, 2), (loop, 0)], [(train, 0), (train, 2), (loop, 0), (loop, 2)])
)
def test_ranks_of_a_group_augment_alike(run: Any, workers: int) -> None:
    check(spawn(2, run, 2, workers), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "workers"), [(train, 2), (loop, 0), (loop, 2)])
def test_groups_augment_differently(run: Any, workers: int) -> None:
    check(spawn(4, run, 2, workers), 2)
