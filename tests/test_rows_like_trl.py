"""Rows in the shapes of popular data sets: the same tokens and targets as TRL's SFT makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from byte_level import byte_level, published, read_rows

from lightseq.utils.tensors import IGNORE_INDEX

pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("rendered_here")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches flights.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"type": "function", "function": {"name": "search", "arguments": {"city": "Paris"}}}
# Functions and their results, as in agentic data sets.
AGENT = {
    "messages": [
        {"role": "system", "content": "You book flights."},
        {"role": "user", "content": "To Paris, please."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"price": 90}', "name": "search"},
        {"role": "assistant", "content": "There is one for 90 euros."},
        {"role": "user", "content": "Book it."},
        {"role": "assistant", "content": "Booked."},
    ],
    "tools": TOOLS,
    "source": "synthetic",
    "uuid": "3f",
}
# Reasoning in the content, as distilled data sets have it, with the problem in a column of its own.
REASONING = {
    "problem": "What is 2 + 2?",
    "messages": [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "<think>\nTwo and two are four.\n</think>\n\n4"},
    ],
    "difficulty": "easy",
}
# Several turns, with an identifier and the first prompt again.
TURNS = {
    "prompt": "Tell me a story.",
    "prompt_id": "9a",
    "messages": [
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": "Once upon a time."},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "The end."},
    ],
}


def read_by_trl(folder: Path, row: dict[str, Any], template: str) -> tuple[list[int], list[bool]]:
    """Returns the ids and mask that TRL's SFT makes of a row when it trains on the answers."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        folder, use_cpu=True, bf16=False, report_to="none", assistant_only_loss="messages" in row, max_length=None
    )
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes))
    data = Dataset.from_list([row])
    found = SFTTrainer(
        model, arguments, train_dataset=data, processing_class=byte_level(template).backend
    ).train_dataset[0]
    return found["input_ids"], [label != IGNORE_INDEX for label in found["labels"]]


@pytest.mark.parametrize("template", ["qwen3_training", "qwen2_5_training", "qwen3_5_think_training"])
@pytest.mark.parametrize("row", [AGENT, REASONING, TURNS], ids=["tools", "reasoning", "turns"])
def test_chats_give_the_tokens_and_targets_of_trl(tmp_path: Path, row: dict[str, Any], template: str) -> None:
    (mine,) = read_rows(tmp_path, byte_level(published(template)), row)
    columns = {name: value for name, value in row.items() if name in ("messages", "tools")}  # TRL takes `prompt` first
    ids, mask = read_by_trl(tmp_path, columns, published(template))
    assert mine.ids == ids and mine.mask == mask and any(mask)


@pytest.mark.parametrize("template", ["llama3", "qwen3", "gptoss", "phi3", "deepseek_r1_distill", "gemma3"])
def test_a_prompt_with_its_completion_gives_the_tokens_and_targets_of_trl(tmp_path: Path, template: str) -> None:
    row = {"prompt": TURNS["messages"][:3], "completion": TURNS["messages"][3:]}
    (mine,) = read_rows(tmp_path, byte_level(published(template)), row)
    ids, mask = read_by_trl(tmp_path, row, published(template))
    assert mine.ids == ids and mine.mask == mask and any(mask)


def test_tokenized_rows_give_the_targets_of_trl(tmp_path: Path) -> None:
    row = {"input_ids": list(range(40, 50)), "completion_mask": [0] * 4 + [1] * 6, "assistant_masks": [0] * 6 + [1] * 4}
    (mine,) = read_rows(tmp_path, byte_level(), row)
    ids, mask = read_by_trl(tmp_path, row, published("llama3"))
    assert mine.ids == ids and mine.mask == mask
