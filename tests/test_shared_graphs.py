"""Layers of one kind share compiled code: a model of many layers compiles as fast as one of few."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow_except
from programs import program
from worlds import spawn

from benchmarks.tiny_models import tiny_config

VOCABULARY, LENGTH = 256, 64
# Kinds of layers, and a graph of the last norm. Beneath adapters the first layer's input has no gradient.
CASES = {
    "qwen3_moe": ({"num_hidden_layers": 5}, "", 2),
    "qwen3_moe router loss": ({"num_hidden_layers": 5}, "--router_aux_loss_coef 0.01", 2),
    "deepseek_v3 biases": ({"num_hidden_layers": 5}, "--router_bias_update_rate 0.001", 3),
    "gpt_oss adapters": (
        {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
        "--lora_rank 4",
        4,
    ),
    "qwen3_5_text": ({"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3}, "", 3),
    "granitemoehybrid": ({"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3}, "", 3),
    "llama in four bits": (
        {"num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
        "--lora_rank 4 --load_in_4bit True",
        3,
    ),
    "gemma3_text": ({"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}, "", 3),
}
QUICK = ["qwen3_moe router loss", "deepseek_v3 biases"]


def graphs(rank: int, words: str) -> int:
    """Trains, and returns how many graphs the layers were compiled to."""
    compile_, counters = torch.compile, torch._dynamo.utils.counters

    def eager(*arguments: Any, options: Any = None, **settings: Any) -> Any:
        return compile_(*arguments, **settings, backend="eager")

    torch.compile = eager  # type: ignore[assignment]
    counters.clear()
    end = program(rank, "any", words)
    torch.compile = compile_  # type: ignore[assignment]
    assert end.status == 0, end.err
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("case", slow_except(QUICK, list(CASES)))
def test_layers_of_a_kind_share_a_graph(tmp_path: Path, case: str) -> None:
    changes, flags, wanted = CASES[case]
    tiny_config(case.split()[0], vocab_size=VOCABULARY, **changes).save_pretrained(tmp_path / "model")
    rows = np.random.default_rng(0).integers(3, VOCABULARY, (2, LENGTH)).tolist()
    (tmp_path / "data.pkl").write_bytes(pickle.dumps({"input_ids": rows}))
    words = (
        f"--model_name_or_path {tmp_path}/model --random_init --data_path {tmp_path}/data.pkl --torch_compile True "
        f"--model_max_length {LENGTH} --max_steps 2 --save_strategy no --output_dir {tmp_path}/run {flags}"
    )
    assert spawn(1, partial(graphs, words=words)) == [wanted]
