"""Configs with unusual values either train a step or are refused in one line, before the first step."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import alone

from benchmarks.tiny_models import ids, tiny_config

QUICK: list[tuple[str, dict[str, Any], str]] = [  # the last: what the line says; nothing if the model trains
    ("lfm2", {"block_ff_dim": 1}, ""),  # which it rounds to 0
    ("qwen3_5_text", {"linear_num_value_heads": 3}, "a recurrence has 3 heads of values, 2 of queries and 2 of keys"),
    ("gemma4_text", {"vocab_size_per_layer_input": 3}, "looks up ids below 64 in a table of 3; correct its config"),
    ("mistral", {"num_attention_heads": 0}, "has 0 attention heads, not a multiple of its 2 key/value heads"),
]
FAMILIES = ("deepseek_v3", "gemma4_text", "gpt_oss", "granitemoehybrid", "kimi_linear", "lfm2_moe", "qwen3_5_text")
VALUES = (0, 1, 3, None)
SIZES = (
    "size", "dim", "heads", "rank", "experts", "group", "layers", "kernel", "expand", "window", "replace", "d_conv",
)  # fmt: skip


def write(folder: Path, model_type: str, changes: dict[str, Any]) -> str:
    """Writes a config as someone would edit it, and returns the words that train it for a step."""
    tiny_config(model_type).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))
    (folder / "rows.jsonl").write_text(json.dumps({"input_ids": ids()[0].tolist()}) + "\n")
    words = f"--model_name_or_path {folder} --random_init --data_path {folder}/rows.jsonl --model_max_length 50"
    return f"{words} --max_steps 1 --save_strategy no --output_dir {folder}/out --overwrite_output_dir"


@pytest.mark.parametrize(("model_type", "changes", "line"), QUICK)
def test_a_config_trains_or_is_refused_in_one_line(
    model_type: str, changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    ended = alone(write(tmp_path, model_type, changes), "any")
    assert ended.status == (2 if line else 0), ended.err
    assert line in ended.err and ended.err.count("error:") == bool(line)


def test_empty_parameters_compute_in_bfloat16_and_are_refused_by_deepspeed(tmp_path: Path) -> None:
    words = write(tmp_path, "lfm2", {"block_ff_dim": 1})
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert alone(f"{words} --bf16", "any").status == 0
    ended = alone(f"{words} --deepspeed {tmp_path}/ds.json", "any")
    assert ended.status == 2 and "takes no parameters without elements, as Lfm2ForCausalLM has" in ended.err


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_size_in_a_config_ends_in_a_traceback(model_type: str, tmp_path: Path) -> None:
    settings = tiny_config(model_type).to_dict()
    for name in (name for name in settings if any(word in name for word in SIZES)):
        for value in VALUES:
            if value != settings[name]:
                ended = alone(write(tmp_path, model_type, {name: value}), "any")
                assert (ended.status, ended.err.count("error:")) in ((0, 0), (2, 1)), (name, value, ended)
