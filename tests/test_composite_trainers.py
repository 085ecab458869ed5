"""Models with images or audio, trained on text in Trainer and in TRL's SFTTrainer: the numbers of one process."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from cases import slow_except
from datasets import Dataset
from trainer_numbers import Numbers, assert_equal, documents, trained
from transformers import PreTrainedModel, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from worlds import spawn

from benchmarks.tiny_models import plain_model, tiny_config
from lightseq.integrations import SequenceParallel, SequenceParallelSFTTrainer, SequenceParallelTrainer

FAMILIES = ("gemma3", "qwen3_vl", "mistral3")
CASES: Mapping[str, dict[str, Any]] = {
    "padded": {"max_length": 64},
    "packed": {"max_length": 64, "packing": True},
    "recomputed": {"max_length": 64, "gradient_checkpointing": True},
    "accumulated": {"max_length": 64, "gradient_accumulation_steps": 2},
    "with encoders": {"max_length": 64, "gradient_checkpointing": True, "ddp_find_unused_parameters": None},
}


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return plain_model(tiny_config(kind))


def train(_rank: int, kind: type[Trainer], family: str, changes: Mapping[str, Any], **options: Any) -> Numbers:
    model = model_of(family)
    images = {value for name, value in vars(model.config).items() if name.endswith(("token_id", "token_index"))}
    rows = Dataset.from_list([{"input_ids": [i for i in ids if i not in images]} for ids in documents()])
    settings = {"learning_rate": 0.02, **changes}
    if "ddp_find_unused_parameters" in changes:
        if not issubclass(kind, SequenceParallel):
            settings["ddp_find_unused_parameters"] = True
    else:  # without the encoders, which get no gradient, so that DDP waits for none
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("language_model" in name or "lm_head" in name)
    if issubclass(kind, SFTTrainer):
        return trained(kind, SFTConfig, settings, 1, model, rows, **options)
    settings.pop("max_length"), settings.pop("packing", None)
    return trained(kind, TrainingArguments, settings, 1, model, rows, **options)


def train_all(rank: int, families: tuple[str, ...], case: str, split: bool) -> list[Numbers]:
    found = []
    for family in families:
        for kinds in ((Trainer, SequenceParallelTrainer), (SFTTrainer, SequenceParallelSFTTrainer)):
            if case != "packed" or kinds[0] is SFTTrainer:
                found.append(train(rank, kinds[split], family, CASES[case]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "world", "families"),
    slow_except([("packed", 2, ("qwen3_vl",))], [("packed", 2, ("qwen3_vl",)), *product(CASES, (2, 3), (FAMILIES,))]),
)
def test_text_trains_as_on_one_process(case: str, world: int, families: tuple[str, ...]) -> None:
    wanted = spawn(1, train_all, families, case, False)[0]
    for got in spawn(world, train_all, families, case, True):
        for ours, theirs in zip(got, wanted, strict=True):
            assert_equal(ours, theirs)
