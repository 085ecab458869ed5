"""A call of a split model on some ranks only is named within seconds, and calls of all ranks are not disturbed."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from trainer_numbers import collate, common, documents, fresh_model, shared_folder
from transformers import TrainerCallback, TrainingArguments
from worlds import spawn

from lightseq import hf
from lightseq.distributed import roll_call
from lightseq.distributed.roll_call import RollCall
from lightseq.integrations import SequenceParallelTrainer
from lightseq.integrations.accelerate import prepare

EVERY_RANK = "every rank must make the same calls"


def named(world: int, function: Callable[..., Any], *arguments: Any, line: str) -> None:
    """The first rank to fail says the line."""
    began = time.monotonic()
    with pytest.raises(AssertionError, match=line) as failed:
        spawn(world, function, *arguments)
    assert EVERY_RANK in str(failed.value) and time.monotonic() - began < 60


def batch() -> dict[str, Tensor]:
    return collate([{"input_ids": ids} for ids in documents(2)])


# ---- a loop around hf.enable ---------------------------------------------------------------------------------------


def call_alone(rank: int, alone: int, how: str) -> None:
    model, ids = fresh_model(), torch.arange(40)[None]
    context = hf.enable(model)
    inputs = hf.shard_batch(context, ids, ids)
    for _ in range(2):
        model(**inputs).loss.backward()
    if rank != alone:
        model(**inputs).loss.backward()
    elif how == "without gradients":
        with torch.no_grad():
            model(**inputs)
    elif how == "in eval mode":
        model.eval()(**inputs)
    else:
        model(**hf.shard_batch(context, ids[:, :9], ids[:, :9]))


@pytest.mark.parametrize(
    ("world", "alone", "how", "says"),
    [
        (2, 0, "without gradients", "rank 0 runs the model without training it on 1 x 40 tokens, but rank 1 trains on"),
        pytest.param(
            2,
            1,
            "in eval mode",
            "rank 1 runs the model without training it on 1 x 40 tokens, but rank 0 trains on",
            marks=pytest.mark.slow,
        ),
        (3, 2, "on a sample", r"rank \d trains on 1 x \d+ tokens, but rank \d trains on 1 x \d+ tokens"),
    ],
)
def test_a_forward_pass_on_one_rank_is_named(world: int, alone: int, how: str, says: str) -> None:
    named(world, call_alone, alone, how, line=says)


def call_after_the_end(rank: int) -> None:
    model, ids = fresh_model(), torch.arange(40)[None]
    context = hf.enable(model)
    inputs = hf.shard_batch(context, ids, ids)
    model(**inputs).loss.backward()
    if rank == 1:
        hf.disable(model)
        del context, inputs
        time.sleep(20)
    with torch.no_grad():
        model(**inputs)


def test_a_rank_that_has_disabled_its_model_is_named() -> None:
    named(2, call_after_the_end, line="but rank 1 has ended, or does not split its model any more")


# ---- trainers and accelerate ---------------------------------------------------------------------------------------


class Samples(TrainerCallback):
    def on_step_end(self, _args: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and state.global_step == 2:
            model(**batch())


def trainer_calls(rank: int, call: str) -> None:
    rows = [{"input_ids": ids} for ids in documents()]
    with shared_folder() as folder:
        arguments = TrainingArguments(**common(folder, remove_unused_columns=False, eval_strategy="no"))
        callbacks = [Samples()] if call == "sample" else []
        trainer = SequenceParallelTrainer(
            fresh_model(), arguments, data_collator=collate, train_dataset=rows, eval_dataset=rows, callbacks=callbacks
        )
        trainer.train()
        if call == "evaluate" and rank == 0:
            trainer.evaluate()
        if call == "predict" and rank == 1:
            trainer.predict(rows)
        dist.barrier()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("sample", "rank 0 trains on 2 x 50 tokens, but rank 1 waits in"),
        pytest.param("evaluate", r"rank 0 calls evaluate\(\), but rank 1 waits in barrier", marks=pytest.mark.slow),
        pytest.param("predict", r"rank 1 calls predict\(\), but rank 0 waits in barrier", marks=pytest.mark.slow),
    ],
)
def test_what_one_rank_of_a_trainer_calls_is_named(call: str, says: str) -> None:
    named(2, trainer_calls, call, line=says)


def loop_with_accelerate(rank: int, reads: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = fresh_model()
    model, _optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        output = model(**batch())
        if reads and step == 1 and rank == 0:
            output.logits.argmax(-1)
        accelerator.backward(output.loss)
        if not reads and step == 1 and rank == 1:
            with torch.no_grad():
                model(**batch())
        accelerator.wait_for_everyone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reads", "says"),
    [
        pytest.param(True, "rank 0 reads logits", marks=pytest.mark.slow),
        (False, "rank 1 runs the model without training it"),
    ],
)
def test_what_one_rank_of_a_loop_with_accelerate_does_is_named(reads: bool, says: str) -> None:
    named(2, loop_with_accelerate, reads, line=says)


# ---- calls of all ranks --------------------------------------------------------------------------------------------


def slow_rank(rank: int) -> list[str]:
    model, ids = fresh_model(), torch.arange(40)[None]
    context = hf.enable(model)
    inputs = hf.shard_batch(context, ids, ids)
    model(**inputs).loss.backward()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setattr(roll_call, "WARN_SECONDS", 1.0)
        if rank == 1:
            time.sleep(6)
        with torch.no_grad():
            model(**inputs)
    return [str(x.message) for x in caught if EVERY_RANK in str(x.message)]


@pytest.mark.slow
def test_a_slow_rank_is_waited_for_with_a_warning() -> None:
    first, second = spawn(2, slow_rank)
    assert len(first) == 1 and not second and "has waited" in first[0]


def many_calls(rank: int) -> None:
    calls = RollCall(dist.group.WORLD)
    for number in range(300):  # far more than are kept; ranks run ahead of each other
        calls.make(f"trains on {number % 3}", is_training_step=number % 7 > 0)
    if rank == 0:
        time.sleep(1)


def test_calls_of_ranks_that_run_ahead_are_taken() -> None:
    spawn(3, many_calls)
