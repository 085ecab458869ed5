"""A config of fewer layers makes the layers that were chosen, whatever its settings say about each layer."""

from typing import Any

import pytest
from cases import slow_except
from test_families import FAMILIES
from transformers import PreTrainedConfig

from benchmarks.architectures import tiny_config
from lightseq.architecture.fewer_layers import places_of_kinds, with_layers, with_layers_at
from lightseq.architecture.inspection import inspect_architecture
from lightseq.models.decoder import text_config


def longer(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a config with three times the layers, by repeating the settings of each layer."""
    text = text_config(config)
    count = text.num_hidden_layers
    lists = {
        name: value * 3
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == count and not name.endswith("multipliers")
    }
    settings = text.to_dict() | lists | {"num_hidden_layers": 3 * count, "attn_layer_indices": [1, 4, 7]}
    settings.pop("per_layer_config", None)
    if config.model_type.startswith("gemma4"):
        settings |= {"global_head_dim": 16}
    made: PreTrainedConfig = type(text).from_dict(settings)
    if text is config:
        return made
    return type(config).from_dict(config.to_dict() | {"text_config": made.to_dict()})


QUICK = [  # one of each kind of layers
    "Gemma 4 E: heads of two sizes, shared keys, embeddings per layer",
    "Llama 4: inside a composite",
    "Youtu: latent attention",
    "gpt-oss: experts with biases, sinks",
    "GPT-NeoX: attention beside the MLP",
    "OPT: learned positions",
    "LFM 2: short convolutions",
    "Qwen 3.5: gated delta rule",
    "Nemotron H: Mamba 2, layers of experts alone",
    "Bamba: Mamba 2",
]


@pytest.mark.parametrize("name", slow_except(QUICK, FAMILIES))
def test_chosen_layers_are_those_of_the_whole_model(name: str) -> None:
    model_type, changes = FAMILIES[name]
    config = longer(tiny_config(model_type, **changes))
    whole = inspect_architecture(config)
    for count in (2, 4):
        places = places_of_kinds(config, count)
        few = inspect_architecture(with_layers_at(config, places))
        assert few.layers == tuple(whole.layers[place] for place in places)
        assert len(few.kinds) == min(count, len(whole.kinds))


def test_every_other_layer_of_experts_stays_one() -> None:
    config = tiny_config("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=3, mlp_only_layers=[2])
    whole, places = inspect_architecture(config), places_of_kinds(config, 2)
    assert places == [0, 5]
    assert inspect_architecture(with_layers_at(config, places)).layers == (whole.layers[0], whole.layers[5])


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_the_first_layers_of_shared_keys_are_those_that_compute_them(model_type: str) -> None:
    config = tiny_config(model_type)
    assert [with_layers(config, count).num_kv_shared_layers for count in (2, 3, 4, 9)] == [0, 1, 2, 2]
    assert len(inspect_architecture(with_layers(config, 2)).layers) == 2


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama4_text", {"moe_layers": [1, 3]}, {"moe_layers": [1], "no_rope_layers": [1, 0]}),
        ("lfm2_moe", {"num_dense_layers": 2, "layer_types": ["conv", "full_attention"] * 2}, {"num_dense_layers": 1}),
        (
            "ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
            {"moe_layer_start_index": 1, "moe_layer_end_index": 0},
        ),
        ("zamba2", {"layers_block_type": ["linear_attention"] * 3 + ["hybrid"]}, {"hybrid_layer_ids": [1]}),
        ("bamba", {"attn_layer_indices": [3]}, {"attn_layer_indices": [1]}),
    ],
)  # fmt: skip
def test_counts_and_lists_of_layers_follow(model_type: str, settings: dict[str, Any], expected: dict[str, Any]) -> None:
    few = with_layers_at(tiny_config(model_type, num_hidden_layers=4, **settings), [0, 3])
    assert {name: getattr(few, name) for name in expected} == expected
