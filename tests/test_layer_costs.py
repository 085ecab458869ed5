"""Planned costs of layers equal those that running layers have."""

from typing import Any

import pytest
import torch
from cases import slow_except
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from lightseq import hf
from lightseq.architecture.family import preset_config
from lightseq.cli import BOTH
from lightseq.parts.changes import Changes
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.experts import use_grouped_experts
from lightseq.plan.layer_costs import ATTENTION, MLP, OTHERS, LayerTable, Treatment

pytestmark = pytest.mark.usefixtures("alone")
SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 512,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512},
    "phi3": {},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 512},
    "llama4_text": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
EAGER = Treatment("none", compiled=False, tiles_mlp=False)
# The most memory of one layer's backward pass at each point beyond what it saved, read from the allocator's history on
# an H100 with torch 2.11: tensors of the hidden size and of the MLP's. Weights and their gradients are left out.
MEASURED: dict[Treatment, dict[str, tuple[float, float]]] = {
    Treatment("none", True, tiles_mlp=False): {OTHERS: (1, 1)},
    Treatment("attention", True, tiles_mlp=True): {MLP: (4, 0), ATTENTION: (7.5, 0)},
    Treatment("attention", True, tiles_mlp=False): {OTHERS: (3, 6)},
    Treatment("attention+mlp", True, tiles_mlp=False): {MLP: (4, 0)},
    Treatment("attention+linears", True, tiles_mlp=False): {MLP: (3, 0)},
    Treatment("attention", False, tiles_mlp=True): {MLP: (11.5, 0), OTHERS: (18.5, 0)},
    Treatment("attention+mlp", False, tiles_mlp=False): {MLP: (11.5, 0)},
}


def config_of(name: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[name](**SIZES | MODELS[name])


def saved_by_first_layer(model: PreTrainedModel, length: int) -> int:
    """Returns the bytes that a model's first layer saves, without weights and RoPE's tables."""
    layer, saved = model.model.layers[0], dict[int, int]()
    shared = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def save(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in shared:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def before(_layer: Any, args: Any, keywords: dict[str, Any]) -> None:
        shared.update(x.untyped_storage().data_ptr() for x in keywords["position_embeddings"])
        hooks.__enter__()

    hooks = saved_tensors_hooks(save, lambda x: x)
    handles = [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(lambda *_: hooks.__exit__(None, None, None)),
    ]
    ids = torch.zeros(1, length, dtype=torch.long)
    model.model(input_ids=ids, position_ids=torch.arange(length)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return sum(saved.values())


@pytest.mark.parametrize("name", slow_except(["gemma3_text", "qwen3_moe"], MODELS))
def test_an_eager_layer_saves_what_the_plan_says(name: str) -> None:
    config = config_of(name)
    model = build_to_train(config, "cpu")
    hf.enable(model)
    use_grouped_experts(model, Changes())
    per_token = (saved_by_first_layer(model, 256) - saved_by_first_layer(model, 128)) / 128
    assert LayerTable(config, torch.float32).costs(0, EAGER).saved == per_token


@pytest.mark.parametrize("treatment", slow_except([Treatment("attention", True, tiles_mlp=False)], MEASURED), ids=str)
def test_a_backward_pass_holds_what_an_h100_held(treatment: Treatment) -> None:
    config = preset_config(BOTH, "llama3-8b")
    working = LayerTable(config, torch.bfloat16).costs(0, treatment).working
    for point, (hidden, intermediate) in MEASURED[treatment].items():
        expected = 2 * (hidden * config.hidden_size + intermediate * config.intermediate_size)
        assert working[point] == pytest.approx(expected, rel=0.001), point


def test_a_checkpoint_of_a_layer_saves_its_input_and_what_its_policy_stores() -> None:
    config = config_of("qwen3")
    before, table = repr(config), LayerTable(config, torch.float32)

    def saved(policy: str) -> float:
        found = {table.costs(0, Treatment(policy, compiled, tiles_mlp=False)).saved for compiled in (False, True)}
        assert len(found) == 1, "compiled or not, a checkpoint stores the same"
        return found.pop() / 4

    hidden, width, key_value, heads = 32, 4 * 16, 2 * 16, 4
    attention = hidden + width + heads
    assert saved("full") == hidden and saved("attention") == attention
    assert saved("attention+mlp") == attention + 2 * 48
    assert saved("attention+linears") == attention + 2 * 48 + width + 2 * key_value + hidden
    experts = LayerTable(config_of("qwen3_moe"), torch.float32)
    for policy, stored in (("full", hidden), ("attention", attention - width + 4 * 8), ("attention+mlp", None)):
        found = experts.costs(0, Treatment(policy, True, tiles_mlp=False)).saved
        chosen = 2 * (4 + 8)  # scores and indices of two experts
        expected = attention - width + 4 * 8 + 2 * 2 * 16 if stored is None else stored
        assert found == 4 * expected + chosen, policy
    assert repr(config) == before and config._attn_implementation is None, "reading a model's costs changes its config"
