"""Trainers whose sequences are split over ranks give the numbers of the unmodified trainer on one process."""

import tempfile
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from trainer_numbers import Numbers, assert_equal, collate, common, documents, fresh_model, numbers, sizes
from transformers import Trainer, TrainerCallback, TrainingArguments
from worlds import spawn

from lightseq.integrations import SequenceParallelTrainer
from lightseq.integrations.accelerate import share_batches


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


def checkpointed_modules(rank: int) -> tuple[int, dict[str, bool]]:
    """Returns how many modules transformers checkpoints during training, and the arguments afterwards."""
    found = []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            found.append(sum(getattr(module, "gradient_checkpointing", False) for module in model.modules()))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**common(folder, remove_unused_columns=False, gradient_checkpointing=True))
        rows = [{"input_ids": ids} for ids in documents()]
        trainer = SequenceParallelTrainer(
            fresh_model(), arguments, data_collator=collate, train_dataset=rows, eval_dataset=rows, callbacks=[Look()]
        )
        trainer.train()
        names = ("gradient_checkpointing", "activation_checkpointing")
        return sum(found), {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def test_gradient_checkpointing_does_not_compute_attention_again() -> None:
    for modules, arguments in spawn(2, checkpointed_modules):
        assert modules == 0 and all(arguments.values())


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------


def policy_of(rank: int) -> MixedPrecisionPolicy:
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    accelerator.state.fsdp_plugin = plugin
    share_batches(accelerator, 2)
    return plugin.mixed_precision_policy


def test_fsdp2_sums_gradients_in_float32_and_rounds_no_loss() -> None:
    for policy in spawn(2, policy_of):
        assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
