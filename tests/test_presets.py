"""Presets, resolution of model names, and RoPE scaling."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from cases import slow_except
from huggingface_hub.errors import GatedRepoError
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.tiny_models import tiny_config
from lightseq.architecture import family
from lightseq.architecture.family import apply_rope, check_config, context_warning, preset_config, resolve
from lightseq.architecture.flops import total_parameters
from lightseq.config.command_line import parse
from lightseq.distributed.world import World
from lightseq.models import hub
from lightseq.models.decoder import text_config
from lightseq.models.presets import FAMILIES, LLAMA2, LLAMA3
from lightseq.training.find_model import find_model
from lightseq.utils import versions

YARN = {"rope_type": "yarn", "factor": 8}
# preset: hidden, intermediate, layers, heads, KV heads, head dim, vocabulary, positions, parameters
PUBLISHED = {
    "llama2-7b": (4096, 11008, 32, 32, 32, 128, 32000, 4096, 6_738_415_616),
    "llama2-13b": (5120, 13824, 40, 40, 40, 128, 32000, 4096, 13_015_864_320),
    "llama2-70b": (8192, 28672, 80, 64, 8, 128, 32000, 4096, 68_976_648_192),
    "llama2-3b": (4096, 11008, 16, 32, 32, 128, 32000, 4096, 3_500_281_856),
    "codellama-7b": (4096, 11008, 32, 32, 32, 128, 32016, 16384, 6_738_546_688),
    "tiny-llama2": (128, 352, 2, 4, 4, 32, 512, 4096, 533_120),
    "llama3-8b": (4096, 14336, 32, 32, 8, 128, 128256, 8192, 8_030_261_248),
    "llama3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256, 131072, 8_030_261_248),
    "llama3-70b": (8192, 28672, 80, 64, 8, 128, 128256, 8192, 70_553_706_496),
    "llama3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256, 131072, 1_235_814_400),
    "llama3.2-3b": (3072, 8192, 28, 24, 8, 128, 128256, 131072, 3_212_749_824),
    "tiny-llama3": (256, 704, 4, 8, 4, 32, 512, 8192, 3_082_496),
}


def config_of(preset: str) -> LlamaConfig:
    return next(preset_config(each, preset) for each in FAMILIES if preset in each.presets)


def save(directory: Path, **fields: Any) -> str:
    plain = config_of("tiny-llama2").to_dict() | fields
    (directory / "config.json").write_text(json.dumps(plain))
    return str(directory)


def test_every_preset_is_listed_here() -> None:
    assert sorted(PUBLISHED) == sorted(preset for each in (LLAMA2, LLAMA3) for preset in each.presets)
    assert all(set(each.aliases.values()) <= set(each.presets) for each in FAMILIES)


@pytest.mark.parametrize(
    "preset", slow_except(["llama2-7b", "tiny-llama2", "llama3.1-8b", "llama3.2-1b", "tiny-llama3"], PUBLISHED)
)
def test_a_preset_has_the_published_architecture(preset: str) -> None:
    config = config_of(preset)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "max_position_embeddings")
    *shape, parameters = PUBLISHED[preset]
    assert [getattr(config, name) for name in names] == shape
    assert config.rms_norm_eps == 1e-5 and check_config(config, preset).model_type == "llama"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == total_parameters(config) == parameters


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        # 256 wide: 262,144 for attention and 3 x 256 x 1024 for the MLP a layer
        ("scaled-all-1", (256, 1024, 8, 8, 8, 32), 8 * (4 * 256**2 + 3 * 256 * 1024 + 512) + 2 * 131072 * 256 + 256),
        (
            "scaled-all-2",
            (512, 1792, 16, 16, 16, 32),
            16 * (4 * 512**2 + 3 * 512 * 1792 + 1024) + 2 * 131072 * 512 + 512,
        ),
        pytest.param(
            "scaled-n_layers-24", (4096, 14336, 216, 32, 8, 128), 48_185_937_920, marks=pytest.mark.slow
        ),  # found as the largest for 94.5 GB
    ],
)
def test_scaled_models_have_any_size(name: str, shape: tuple[int, ...], parameters: int) -> None:
    config = resolve(LLAMA3, name, random_init=True).config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert tuple(getattr(config, name) for name in (*names, "head_dim")) == shape
    assert total_parameters(config) == parameters


def test_the_flags_of_a_scaled_model_make_its_name() -> None:
    words = "--scaling-factor 3 --model_name_or_path scaled --data_path d --output_dir o"
    assert parse(words.split(), "").model_name == "scaled-all-3"


@pytest.mark.parametrize(
    ("preset", "rope_type", "theta", "factor", "original"),
    [
        ("llama2-7b", "default", 1e4, None, None),
        ("codellama-7b", "default", 1e6, None, None),
        ("llama3-8b", "default", 5e5, None, None),
        ("llama3.1-8b", "llama3", 5e5, 8.0, 8192),
        ("llama3.2-1b", "llama3", 5e5, 32.0, 8192),
        ("tiny-llama3", "llama3", 5e5, 8.0, 1024),
    ],
)
def test_a_preset_has_the_published_rotary_positions(
    preset: str, rope_type: str, theta: float, factor: float | None, original: int | None
) -> None:
    rope = config_of(preset).rope_parameters
    assert (rope["rope_type"], rope["rope_theta"]) == (rope_type, theta)
    assert (rope.get("factor"), rope.get("original_max_position_embeddings")) == (factor, original)
    assert factor is None or (rope["low_freq_factor"], rope["high_freq_factor"]) == (1.0, 4.0)


def test_presets_have_the_ids_of_their_tokenizers() -> None:
    assert (config_of("llama2-7b").bos_token_id, config_of("llama2-7b").eos_token_id) == (1, 2)
    assert (config_of("llama3.2-1b").bos_token_id, config_of("llama3.2-1b").eos_token_id) == (128000, 128001)


def test_a_hub_id_with_random_init_is_its_preset_without_asking_the_hub() -> None:
    source = resolve(LLAMA3, "unsloth/Llama-3.2-1B", random_init=True)
    assert source.weights is None
    assert source.config.to_dict() == config_of("llama3.2-1b").to_dict()


def test_a_hub_id_without_random_init_is_read_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama3.2-1b")
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr(family.AutoConfig, "from_pretrained", lambda name, **options: config)
    assert resolve(LLAMA3, "unsloth/Llama-3.2-1B", False) == family.ModelSource(config, "unsloth/Llama-3.2-1B")


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def hub_error(url: str, timeout: float) -> None:
        assert timeout < 60
        raise RuntimeError("We couldn't connect.\nCheck your connection.")

    monkeypatch.setattr(hub, "get_hf_file_metadata", hub_error)
    for name, remedy in (("a/b", "give --random_init and a preset"), ("unsloth/Llama-3.2-1B", "add --random_init")):
        with pytest.raises(ValueError, match=rf"^--model_name_or_path {name} .*couldn't connect\).*{remedy}.*$"):
            resolve(LLAMA3, name, False)


def test_a_gated_model_says_how_to_get_access(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(url: str, timeout: float) -> None:
        raise GatedRepoError("403 Client Error", response=MagicMock())

    monkeypatch.setattr(hub, "get_hf_file_metadata", gated)
    with pytest.raises(ValueError, match=r"gated: accept its terms at https://huggingface.co/a/b, then run `hf auth"):
        resolve(LLAMA3, "a/b", False)


@pytest.mark.parametrize(
    ("name", "random_init", "line"),
    [
        ("llama3-8c", True, "did you mean llama3-8b or llama3.1-8b or llama3-70b?"),
        (
            "b",
            True,
            "of llama3 (llama3-8b, llama3.1-8b, llama3-70b, llama3.2-1b, llama3.2-3b, tiny-llama3). A directory",
        ),
        ("scaled-all-0", True, "scaled-all-0 is not a directory, hub id or preset of llama3"),
        ("lama2-13b", True, "preset of llama3; did you mean llama2-13b, of llama2/train.py or "),
        ("tiny-llama", True, "did you mean tiny-llama3 or tiny-llama2, of llama2/train.py"),
        ("qwen3-8b", True, "qwen3-8b is a preset of other families: use lightseq train"),
        ("Qwen3-8C", True, "did you mean qwen3-8b, of lightseq train or qwen3-4b, of lightseq train"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_preset(name: str, random_init: bool, line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        resolve(LLAMA3, name, random_init)
    assert line in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"model_type": "gpt2"}, "GPT2LMHeadModel has attn_pdrop 0.1; set it to 0"),
        ({"model_type": "ctrl"}, "CTRLLMHeadModel does not consist of"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "has sliding_attention layers"),
        ({"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}}, "rope_type 'nonsense' is unknown"),
    ],
)
def test_an_unsupported_architecture_is_refused(tmp_path: Path, fields: dict, line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        resolve(LLAMA2, save(tmp_path, **fields), random_init=True)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)


def test_quantized_weights_are_refused_by_their_format(tmp_path: Path) -> None:
    directory = save(tmp_path)
    file = Path(directory) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ValueError, match=r"has quantized weights \(awq in its config.json\); give a version"):
        resolve(LLAMA2, directory, random_init=False)
    fresh = resolve(LLAMA2, directory, random_init=True)
    assert fresh.quantization == "awq" and not hasattr(fresh.config, "quantization_config")


def test_theta_and_scaling_change_nothing_else() -> None:
    original = config_of("llama3.1-8b")
    assert apply_rope(original, rope_theta=8e6).rope_parameters == original.rope_parameters | {"rope_theta": 8e6}
    changed = apply_rope(original, rope_scaling={"type": "linear", "factor": 2})
    assert changed.rope_parameters == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2}
    axes = tiny_config("qwen2_5_vl")  # a composite, whose text has positions of three axes
    scaled = text_config(apply_rope(axes, rope_scaling={"rope_type": "yarn", "factor": 4}))
    assert scaled.rope_parameters["mrope_section"] == text_config(axes).rope_parameters["mrope_section"] == [1, 1, 2]
    ministral = tiny_config("ministral3")
    scaled = apply_rope(ministral, rope_scaling={"rope_type": "linear", "factor": 4})
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        assert scaled.rope_parameters[key] == ministral.rope_parameters[key]
    assert original.to_dict() == config_of("llama3.1-8b").to_dict()


@pytest.mark.parametrize(
    ("preset", "scaling", "covered"),
    [
        ("llama3-8b", None, 8192),
        ("llama3.1-8b", None, 131072),
        ("llama3-8b", {"rope_type": "linear", "factor": 4.0}, 32768),
        ("llama3-8b", {"rope_type": "dynamic", "factor": 4.0}, 32768),
        ("llama3-8b", {"rope_type": "yarn", "factor": 4.0}, 32768),
        ("llama3-8b", {"rope_type": "longrope", "factor": 4, "short_factor": [1] * 64, "long_factor": [4] * 64}, 32768),
        ("llama3-8b", {"rope_type": "proportional", "factor": 4}, 32768),
        ("llama3.1-8b", {"rope_type": "yarn", "factor": 32.0}, 262144),
        ("llama3-8b", {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4}, 32768),
        ("llama3.1-8b", {"rope_type": "default"}, 8192),
        ("llama3.1-8b", {"rope_type": "linear", "factor": 2}, 16384),
        ("llama3.1-8b", LLAMA3.presets["llama3.1-8b"]["rope_parameters"], 131072),
    ],
)
def test_a_length_beyond_what_scaling_covers_warns(preset: str, scaling: dict | None, covered: int) -> None:
    config = apply_rope(config_of(preset), rope_scaling=scaling)
    assert context_warning(config, covered) is None
    warning = context_warning(config, covered + 1)
    assert warning is not None and f"{covered + 1} tokens exceed the {covered} positions" in warning


@pytest.mark.parametrize(
    ("preset", "scaling", "length", "said"),
    [
        ("llama3.2-1b", YARN, 2048, "model covers from 131072 to 65536; the factor of"),
        ("llama3.2-1b", YARN, 100_000, "to 65536, and sequences have 100000 tokens; the factor of --rope_scaling"),
        ("llama3.2-1b", YARN, 131_072, "multiplies 8192: give 16 for 131072, or leave it out"),
        ("llama3.2-1b", YARN, 200_000, "multiplies 8192: give 24.42 for 200000"),
        ("llama3.1-8b", {"rope_type": "linear", "factor": 2}, 64, "multiplies 8192: give 16 for 131072, or leave it"),
        ("llama3.1-8b", {"rope_type": "default"}, 64, "no factor: give yarn with factor 16 for 131072, or leave it"),
        ("llama3-8b", YARN, 65_537, "exceed the 65536 positions that the model covers; the factor of --rope_scaling"),
        ("llama3-8b", YARN, 65_537, "multiplies 8192: give 8.01 for 65537, or give 65536 or less"),
        ("llama3-8b", YARN, 65_536, None),
        ("llama3.2-1b", YARN | {"factor": 16}, 131_072, None),
        ("llama3.2-1b", YARN | {"factor": 24.42}, 200_000, None),
        ("llama3-8b", YARN | {"factor": 8.01}, 65_537, None),
    ],
)
def test_too_small_a_scaling_warns_with_the_needed_factor(
    preset: str, scaling: dict[str, Any], length: int, said: str | None
) -> None:
    before = config_of(preset)
    warning = context_warning(apply_rope(before, rope_scaling=scaling), length, before)
    assert warning is None if said is None else said in str(warning)


def test_a_run_warns_of_a_shortened_context_and_of_untested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--random_init", "--data_path", "d", "--output_dir", "o", "--model_name_or_path", "llama3.2-1b"]

    def warnings(*more: str) -> tuple[str, ...]:
        return find_model(parse([*words, *more], ""), LLAMA3, World(0, 1, 0, 1, torch.device("cpu"))).warnings

    assert warnings() == ()
    (warning,) = warnings("--rope_scaling", json.dumps(YARN))
    assert "warning: --rope_scaling reduces the positions that the model covers from 131072 to 65536" in warning
    monkeypatch.setattr(versions, "NEWEST_TESTED", {"torch": "99.0", "transformers": "5.9"})
    (warning,) = warnings()
    assert warning.startswith("warning: transformers") and "is newer than" in warning


def test_a_larger_base_covers_the_training_length() -> None:
    config = apply_rope(config_of("llama3-8b"), rope_theta=8e6, length=65536)
    assert config.max_position_embeddings == 65536 and context_warning(config, 65536) is None
    assert apply_rope(config_of("llama3-8b"), rope_theta=8e6, length=64).max_position_embeddings == 8192
    assert apply_rope(config_of("llama3-8b"), rope_theta=1e4, length=65536).max_position_embeddings == 8192


@pytest.mark.parametrize("rope_type", ["yarn", "linear"])  # which keep the length they reach, and do not
def test_a_fractional_factor_reaches_the_last_position(rope_type: str) -> None:
    context, length = 10_000, 10_010
    config = config_of("llama3-8b")
    config.max_position_embeddings = context
    assert int(context * (length / context)) < length
    scaled = apply_rope(config, rope_scaling={"rope_type": rope_type, "factor": length / context})
    assert context_warning(scaled, length) is None
    assert (scaled.max_position_embeddings == length) == (rope_type == "yarn")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        *({"rope_type": name, "factor": 16.0} for name in ("linear", "dynamic", "yarn", "proportional")),
        {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "factor": 16.0, "short_factor": [2.0] * 16, "long_factor": [16.0] * 16},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_a_scaled_config_builds_a_model_whose_frequencies_change(scaling: dict[str, Any]) -> None:
    config = config_of("tiny-llama3")
    scaled = apply_rope(config, rope_scaling=scaling)
    before, after = (LlamaForCausalLM(each).model.rotary_emb.inv_freq for each in (config, scaled))
    assert before.shape == after.shape == (16,) and not torch.equal(before, after)


@pytest.mark.parametrize(
    ("theta", "scaling", "line"),
    [
        (None, {"rope_type": "nonsense"}, "rope_type 'nonsense' is unknown; choose from default, linear"),
        (None, {"factor": 4.0}, "rope_type None is unknown"),
        (None, {"rope_type": "linear"}, "factor is None; give a number of at least 1"),
        (None, {"rope_type": "linear", "factor": 0.5}, "factor is 0.5; give a number of at least 1"),
        *((None, {"rope_type": "dynamic", "factor": x}, "give a number") for x in ("4", math.inf, math.nan, True)),
        (None, {"rope_type": "default", "rope_theta": "5e5"}, "rope_theta is '5e5'; give a number"),
        (None, {"rope_type": "llama3", "factor": 4.0}, "low_freq_factor"),
        (None, {"rope_type": "longrope", "factor": 4}, "short_factor of longrope is None; give a list of 64 numbers"),
        (
            None,
            {"rope_type": "longrope", "factor": 4, "short_factor": [1] * 64, "long_factor": [1]},
            "long_factor of longrope is 1 numbers",
        ),
        (1e6, {"rope_type": "default", "rope_theta": 5e5}, "differ; give one"),
    ],
)
def test_an_invalid_scaling_is_refused(theta: float | None, scaling: dict, line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        apply_rope(config_of("llama3-8b"), theta, scaling)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_rope_per_layer_type_cannot_be_changed() -> None:
    config = Gemma3TextConfig(max_position_embeddings=1024)
    assert apply_rope(config).rope_parameters == config.rope_parameters
    for settings in ({"rope_theta": 5e6}, {"rope_scaling": YARN}):
        with pytest.raises(ValueError, match="gemma3_text has a RoPE for each type of layer"):
            apply_rope(config, **settings)
    assert "--rope_scaling" not in (context_warning(config, 2048) or "--rope_scaling")
