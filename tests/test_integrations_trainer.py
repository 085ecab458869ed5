"""Trainers whose sequences are split over ranks give the numbers of the unmodified trainer on one process."""

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.trainer
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from cases import slow_except
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import IterableDataset
from trainer_numbers import (
    ADAPTERS,
    Numbers,
    UsesFsdp2,
    assert_equal,
    check_equal,
    collate,
    common,
    documents,
    fresh_model,
    make_trainer,
    numbers,
    packed_ids,
    shared_folder,
)
from transformers import DataCollatorWithFlattening, EvalPrediction, Trainer, TrainerCallback, TrainingArguments
from worlds import spawn

from lightseq.integrations import SequenceParallel, SequenceParallelTrainer
from lightseq.integrations.accelerate import share_batches


def mean_of_squares(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """A loss that is not linear in the tokens' losses and reads whole logits."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses.sum(1) / 50).square().sum() / 4


def accuracy(evaluated: EvalPrediction) -> dict[str, float]:
    """Returns the share of targets that have the largest logit."""
    labels = evaluated.label_ids[:, 1:]
    return {"accuracy": float((evaluated.predictions[:, :-1].argmax(-1) == labels)[labels != -100].mean())}


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


separated = DataCollatorWithFlattening(separator_id=7)  # a token, which the last token of each document has to predict


class FullyShardedTrainer(SequenceParallel, UsesFsdp2, Trainer):
    pass


TRAINER_CASES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "smoothed": {"label_smoothing_factor": 0.1},
    "custom": {"compute_loss_func": mean_of_squares},
    "checkpointed": {"gradient_checkpointing": True},
    "iterable": {"iterable": True, "accelerator_config": {"dispatch_batches": False}},
    "FSDP2": {"fully_sharded": True},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "adapters": {"adapters": True, "gradient_checkpointing": True},
    "best": {
        "compute_metrics": accuracy,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    },
    "counted": {"include_num_input_tokens_seen": "non_padding", "average_tokens_across_devices": True},
    "counted alone": {"average_tokens_across_devices": False},
    "evaluated first": {"evaluate_first": True},
    "metrics": {"compute_metrics": whole_evaluation, "include_for_metrics": ["inputs", "loss"]},
    "streamed": {"train_dataset": Stream()},
    "packed": {"collate": separated, "gradient_accumulation_steps": 2},
    "packed ids": {"collate": packed_ids, "label_smoothing_factor": 0.1},
    "packed, counted alone": {"collate": packed_ids, "average_tokens_across_devices": False},
    "packed, custom": {"collate": packed_ids, "compute_loss_func": mean_of_squares},
    "without targets": {"train_dataset": [{"input_ids": ids[:1]} for ids in documents()]},
}

QUICK = ("accumulated", "custom", "FSDP2", "adapters", "best", "packed")  # by kind


def all_rows() -> Dataset:
    return Dataset.from_list([{"input_ids": ids} for ids in documents()])


def train(rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    case = {"per_device_train_batch_size": 2 // data_ranks, **case}
    options |= {name: case.pop(name, None) for name in ("compute_loss_func", "compute_metrics")}
    evaluates_first = case.pop("evaluate_first", False) and kind is SequenceParallelTrainer  # Trainer has a bug here
    if kind is Trainer:
        case["accelerator_config"] = {"dispatch_batches": False}  # as ours: batches of a stream differ in length
    options["data_collator"], rows = case.pop("collate", collate), all_rows()
    train_rows = case.pop("train_dataset", rows)
    if case.pop("iterable", False):
        train_rows = rows.to_iterable_dataset(num_shards=2)
    if case.pop("fully_sharded", False) and kind is SequenceParallelTrainer:
        kind = FullyShardedTrainer
    options["eval_dataset"] = rows.select(range(5))
    with shared_folder() as folder:
        trainer = make_trainer(kind, TrainingArguments, folder, case, fresh_model(), train_rows, **options)
        if evaluates_first:
            trainer.evaluate()
        return numbers(trainer)


@pytest.mark.compat("5.16")
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_except(QUICK, TRAINER_CASES))
def test_trainer_equals_one_process(case: str, world: int) -> None:
    check_equal(train, Trainer, SequenceParallelTrainer, TRAINER_CASES[case], world)


def trainer_of(kind: type[Trainer], folder: str, model: Any = None, looks: Any = None, **case: Any) -> Any:
    return make_trainer(kind, TrainingArguments, folder, case, model or fresh_model(), all_rows(), callbacks=looks)


def plain_after(rank: int, sequence_parallel: bool) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        if sequence_parallel:
            trainer_of(SequenceParallelTrainer, folder)
        return numbers(trainer_of(Trainer, folder))


@pytest.mark.slow
def test_a_plain_trainer_after_ours_gets_its_own_batches() -> None:
    wanted = spawn(2, plain_after, False)[0]
    for got in spawn(2, plain_after, True):
        assert_equal(got, wanted)


def checkpointed_modules(rank: int) -> tuple[int, dict[str, bool], list[str]]:
    """Returns how many modules transformers checkpoints in training, the arguments afterwards, and its warnings."""
    found = []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            found.append(sum(getattr(module, "gradient_checkpointing", False) for module in model.modules()))

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(SequenceParallelTrainer, folder, looks=[Look()], gradient_checkpointing=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
    names = [name for name in ("gradient_checkpointing", "activation_checkpointing") if hasattr(trainer.args, name)]
    warned = [str(x.message) for x in caught if "_checkpointing" in str(x.message)]
    return sum(found), {name: getattr(trainer.args, name) for name in names}, warned


def test_gradient_checkpointing_does_not_compute_attention_again_and_calls_nothing_deprecated() -> None:
    for modules, arguments, warned in spawn(2, checkpointed_modules):
        assert modules == 0 and all(arguments.values()) and not warned


def dropped_out(rank: int, recomputes: bool) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        model = get_peft_model(fresh_model(), LoraConfig(**ADAPTERS, lora_dropout=0.5))
        return numbers(trainer_of(SequenceParallelTrainer, folder, model, gradient_checkpointing=recomputes))


@pytest.mark.slow
def test_recomputed_layers_repeat_their_dropout() -> None:
    wanted, got = spawn(2, dropped_out, False)[0], spawn(2, dropped_out, True)[0]
    assert_equal(got, wanted)


# ---- saving and resuming --------------------------------------------------------------------------------------------


def resume(rank: int, kind: type[Trainer], adapters: bool) -> tuple[Numbers, Numbers]:
    """Returns the numbers of an uninterrupted run, and of one that continues from its checkpoint of step 2."""
    found = []
    with shared_folder() as folder:
        for checkpoint in (None, f"{folder}/checkpoint-2"):
            changes = {
                "max_steps": 4,
                "eval_steps": 4,
                "save_strategy": "steps",
                "save_steps": 2,
                "learning_rate": 0.01,
            }
            model = get_peft_model(fresh_model(), LoraConfig(**ADAPTERS)) if adapters else fresh_model()
            trainer = trainer_of(kind, folder, model, optim="adamw_torch", **changes)
            found.append(numbers(trainer, checkpoint))
    return found[0], found[1]


@pytest.mark.compat("5.16")
@pytest.mark.parametrize(
    ("kind", "adapters"),
    [
        (FullyShardedTrainer, False),
        pytest.param(SequenceParallelTrainer, False, marks=pytest.mark.slow),
        pytest.param(SequenceParallelTrainer, True, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(kind: type[Trainer], adapters: bool) -> None:
    for whole, resumed in spawn(2, resume, kind, adapters):
        assert [record["step"] for record in resumed["history"]] == [1, 2, 3, 4, 4, 4, 4]
        for numbers_of in (whole, resumed):  # the mean loss of a resumed run counts its own steps only
            numbers_of["history"] = [x for x in numbers_of["history"] if "train_loss" not in x]
        assert_equal(resumed, whole)


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


class Hub:
    """Stands in for the hub, and records what is pushed."""

    def __init__(self) -> None:
        self.pushed: list[str] = []

    def create_repo(self, repo_name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=f"me/{repo_name}")

    def upload_folder(self, *, folder_path: str, **_: Any) -> str:
        self.pushed += sorted(path.name for path in Path(folder_path).iterdir())
        return "url"


def push(rank: int) -> list[str]:
    """Trains a step and pushes. Returns the names of the files that this rank pushed."""
    hub = Hub()
    with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.trainer, "hf_api", lambda: hub)
        trainer = trainer_of(SequenceParallelTrainer, folder, push_to_hub=True, hub_model_id="tiny", max_steps=1)
        trainer.train()
        trainer.push_to_hub()
    return hub.pushed


@pytest.mark.slow
def test_one_rank_pushes_the_model() -> None:
    first, second = spawn(2, push)
    assert {"model.safetensors", "config.json", "README.md"} <= {*first} and second == []


def refusal_of(rank: int, arguments: dict[str, Any], makes_model: bool) -> str:
    model = {"model_init": fresh_model} if makes_model else {"model": fresh_model()}
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError) as refused:
        SequenceParallelTrainer(args=TrainingArguments(**common(folder, eval_strategy="no", **arguments)), **model)
    return str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "makes_model", "start"),
    [
        ({}, True, "model_init makes another model"),
        ({"neftune_noise_alpha": 5}, False, "neftune_noise_alpha=5 scales"),
        ({"train_sampling_strategy": "batch_rebalance"}, False, "train_sampling_strategy='batch_rebalance' gives"),
        ({"eval_use_gather_object": True}, False, "eval_use_gather_object=True does not work"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_group_cannot_share_is_refused(arguments: dict[str, Any], makes_model: bool, start: str) -> None:
    for said in spawn(2, refusal_of, arguments, makes_model):
        assert said.startswith(start)
