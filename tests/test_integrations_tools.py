"""Trainers whose completions call tools give the numbers of TRL on one process for each group of ranks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_except
from trainer_numbers import Numbers, UsesFsdp2, assert_equal, common, numbers, runs
from worlds import spawn

pytest.importorskip("trl")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Trainer
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer
from trl_hub import SIZES, chat_template, save_tokenizer, train_tokenizer, vocabulary

from lightseq.integrations import SequenceParallel, SequenceParallelDistillationTrainer, SequenceParallelGRPOTrainer

ANSWERS = (  # to a prompt, by the number of its full stops
    {"name": "multiply", "arguments": {"a": 3, "b": 4}},
    {"name": "multiply", "arguments": {"a": 3, "c": 4}},  # fails
    "I know no tool.",
    {"name": "multiply", "arguments": {"a": 12, "b": 12}},
    "It is 12.",
)
PROMPTS = ("Three times four?", "Multiply!", "What is the product of 12 and 12?", "Hello.")
ROWS = 8


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


class Indexed:
    """Mixin that tells the completions of a prompt apart, by a last word with the completion's index."""

    def _generate(self, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        numbered = [[{**p[0], "content": f"{p[0]['content']} {'.' * i}"}] for i, p in enumerate(prompts)]
        return super()._generate(numbered, *args, **kwargs)  # type: ignore[misc]


class Grpo(Indexed, GRPOTrainer):
    pass


class SplitGrpo(Indexed, SequenceParallelGRPOTrainer):
    pass


class Distillation(Indexed, DistillationTrainer):
    pass


class SplitDistillation(Indexed, SequenceParallelDistillationTrainer):
    pass


def write_model(folder: Path) -> None:
    tokenizer = train_tokenizer([*PROMPTS, chat_template("qwen3"), json.dumps(ANSWERS)])
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4, **vocabulary(tokenizer))).save_pretrained(folder)
    save_tokenizer(folder, tokenizer, "qwen3")


def answer(text: str) -> str:
    """Returns what the model says next, which depends on the row alone."""
    if "<tool_response>" in text:
        return f"Done with {len(text) % 3}.<|im_end|>"
    told = ANSWERS[text.count(".") % len(ANSWERS)]
    return (
        f"{told if isinstance(told, str) else f'<tool_call>{chr(10)}{json.dumps(told)}{chr(10)}</tool_call>'}<|im_end|>"
    )


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) % 7 / 7 for ids in completion_ids]


def run(rank: int, kind: type[Trainer], folder: str, data_ranks: int, **options: Any) -> Numbers:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        texts = [tokenizer.decode(ids[mask != 0]) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        told = tokenizer([answer(text) for text in texts], padding=True, padding_side="right", return_tensors="pt")
        return torch.cat([input_ids, told["input_ids"]], 1)

    model.generate = generate
    is_grpo = issubclass(kind, GRPOTrainer)
    more = {"num_generations": 4} if is_grpo else {}
    arguments = (GRPOConfig if is_grpo else DistillationConfig)(
        **common(f"{folder}/out", max_completion_length=128, learning_rate=0.1, eval_strategy="no", **more)
        | {"per_device_train_batch_size": ROWS // data_ranks, "per_device_eval_batch_size": ROWS // data_ranks}
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS * 4])
    judge = {"reward_funcs": lengths} if is_grpo else {"teacher_model": teacher(folder)}
    trainer = kind(
        model, args=arguments, train_dataset=rows, eval_dataset=rows.select(range(ROWS)), processing_class=tokenizer,
        tools=[multiply], **judge, **options,
    )  # fmt: skip
    return numbers(trainer)


def teacher(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


KINDS: Mapping[str, tuple[type[Trainer], type[Trainer]]] = {
    "GRPO": (Grpo, SplitGrpo),
    "Distillation": (Distillation, SplitDistillation),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_except(["GRPO"], KINDS))
def test_tool_calls_give_the_numbers_of_one_process(name: str, world: int, tmp_path: Path) -> None:
    plain, ours = KINDS[name]
    write_model(tmp_path)
    for found, wanted in runs(run, plain, ours, str(tmp_path), world):
        calls = [record["tools/call_frequency"] for record in wanted["history"] if "tools/call_frequency" in record]
        assert calls and 0 < min(calls) < 1
        for got in found:
            assert_equal(got, wanted)


class SplitShardedGrpo(Indexed, SequenceParallel, UsesFsdp2, GRPOTrainer):
    pass


def refused(rank: int, folder: str) -> str:
    with pytest.raises(ValueError) as error:
        run(rank, SplitShardedGrpo, folder, 1, sequence_parallel_size=2)
    return str(error.value)


def test_tools_are_refused_where_each_rank_would_gather_weights_another_number_of_times(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert {line.partition(":")[0] for line in spawn(2, refused, str(tmp_path))} == {"tools with FSDP2"}
