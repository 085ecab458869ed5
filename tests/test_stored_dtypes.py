"""A checkpoint stores every tensor in the dtype in which the base's files hold it, from float32 weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import VOCABULARY
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.tiny_models import plain_model, tiny_config
from lightseq.models import random_weights, weight_files, weights
from lightseq.parts.chosen_experts import build_to_train

CPU = torch.device("cpu")
# Router biases in buffers and in frozen parameters, recurrences, stacked experts.
QUICK = ("minimax_m2", "laguna", "kimi_linear")
MORE = (
    *("minimax_m3_vl_text", "longcat_flash", "step3p7", "deepseek_v3", "glm4_moe", "gpt_oss", "gemma4_text"),
    *("qwen3_next", "qwen3_5_text", "nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "zamba2", "olmo_hybrid"),
    *("afmoe", "hy_v3", "gemma3", "qwen3_vl_moe", "ernie4_5_moe", "llama"),
)


def published(config: PreTrainedConfig, folder: Path, float32: bool = False) -> dict[str, Tensor]:
    """Saves a tiny model whose vectors, and one matrix, are in float32 and the rest in bfloat16. Returns its tensors.

    `float32`: all of it is.
    """
    model = plain_model(config)
    for buffer in weights.stored_buffers(model).values():
        if buffer.is_floating_point():
            buffer.copy_(6.94 + 0.12 * torch.rand(buffer.shape))
    model.save_pretrained(folder)
    tensors = load_file(folder / weight_files.WEIGHTS)
    kept = next((name for name in tensors if ".experts.1." in name), max(tensors))
    if not float32:
        tensors = {
            name: x.bfloat16() if x.squeeze().ndim > 1 and x.is_floating_point() and name != kept else x
            for name, x in tensors.items()
        }
        save_file(tensors, folder / weight_files.WEIGHTS, metadata={"format": "pt"})
    return tensors


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Loads a model to compute in a dtype."""
    model = build_to_train(AutoConfig.from_pretrained(folder / "base"))
    weights.materialize(model, CPU, dtype=dtype)
    weights.load(model, folder / "base")
    return model


def saved(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    weights.save_pretrained(model, folder / "out", dtype, trained_from=folder / "base")
    return load_file(folder / "out" / weight_files.WEIGHTS)


def trained(folder: Path, change: float = 0.0) -> dict[str, Tensor]:
    """Loads a model, changes its weights, and saves it. Returns the new tensors."""
    model = loaded(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter *= 1 + change
    return saved(model, folder)


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_every_tensor_keeps_its_dtype_and_its_bits(family: str, tmp_path: Path, alone: None) -> None:
    before = published(tiny_config(family), tmp_path / "base")
    after = trained(tmp_path)
    assert before.keys() == after.keys()
    assert {x.dtype for x in before.values()} >= {torch.float32, torch.bfloat16}
    different = [name for name, x in before.items() if x.dtype != after[name].dtype or not torch.equal(x, after[name])]
    assert different == []


def test_a_float32_base_is_stored_in_float32_and_its_config_names_the_dtype_of_training(
    tmp_path: Path, alone: None
) -> None:
    before = published(tiny_config("minimax_m2"), tmp_path / "base", float32=True)
    after = trained(tmp_path, change=2.0**-20)
    assert {x.dtype for x in after.values()} == {torch.float32}
    moved = [name for name, x in before.items() if not torch.equal(x, after[name])]
    assert len(moved) > 10 and not any("e_score_correction_bias" in name for name in moved)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_training_in_float32_narrows_no_weight(tmp_path: Path, alone: None) -> None:
    published(tiny_config("llama"), tmp_path / "base")
    after = saved(loaded(tmp_path, torch.float32), tmp_path, torch.float32)
    assert {x.dtype for x in after.values()} == {torch.float32}


def test_a_changed_bias_of_a_router_keeps_its_small_steps(tmp_path: Path, alone: None) -> None:
    published(tiny_config("deepseek_v3"), tmp_path / "base")
    path = tmp_path / "base" / weight_files.WEIGHTS
    save_file({name: x.bfloat16() for name, x in load_file(path).items()}, path, metadata={"format": "pt"})
    model = loaded(tmp_path)
    name, bias = next((name, x) for name, x in weights.stored_buffers(model).items() if "e_score" in name)
    bias += 0.001
    assert torch.equal(saved(model, tmp_path)[name], bias)


def test_random_weights_are_stored_as_the_class_says(tmp_path: Path, alone: None) -> None:
    for family, wide in (("gpt_oss", "layernorm"), ("deepseek_v3", "gate.weight")):
        config = tiny_config(family, vocab_size=VOCABULARY)
        model = build_to_train(config)
        weights.materialize(model, CPU, dtype=torch.bfloat16)
        random_weights.initialize(model, seed=0)
        weights.save_pretrained(model, tmp_path / family, torch.bfloat16)
        found = load_file(tmp_path / family / weight_files.WEIGHTS)
        assert {x.dtype for name, x in found.items() if wide in name} == {torch.float32}
        assert {x.dtype for name, x in found.items() if "proj" in name} == {torch.bfloat16}


def test_the_config_of_a_composite_names_one_dtype(tmp_path: Path, alone: None) -> None:
    published(tiny_config("gemma3"), tmp_path / "base")
    trained(tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {config["dtype"], config["text_config"]["dtype"], config["vision_config"]["dtype"]} == {"bfloat16"}


def test_an_index_beside_a_single_file_is_not_read(tmp_path: Path, alone: None) -> None:
    before = published(tiny_config("llama"), tmp_path / "base")
    other = {name: x + 1 for name, x in before.items()}
    save_file(other, tmp_path / "base" / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    (tmp_path / "base" / weight_files.INDEX).write_text(json.dumps(index))
    assert all(torch.equal(x, before[name]) for name, x in trained(tmp_path).items())
