"""Merging of LoRA adapters: the weights of peft's own merge, or one line that names what is not plain LoRA."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightseq.checkpoint.model_differences import check_model
from lightseq.cli import main as lightseq
from lightseq.config.train_config import TrainConfig
from lightseq.parts.adapter_files import CONFIG, read_config
from lightseq.parts.adapters import Lora

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "down_proj"]
IDS = torch.arange(40).reshape(2, 20) % 32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("merge") / "base"
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A plain adapter of the base, untrained, to change files of."""
    wrap(base).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def refusal(adapter: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Returns the line with which an adapter is refused."""
    capsys.readouterr()
    output = adapter.parent / "merged"
    assert lightseq(["merge", "--adapter", str(adapter), "--output_dir", str(output), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and not output.exists()
    return said


def wrap(base: Path, **settings: Any) -> Any:
    """Returns a peft model of the base."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | settings
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**settings))


def train(model: Any) -> None:
    """Changes the adapters as training would."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)


def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits.detach()  # type: ignore[no-any-return]


def merged(adapter: Path, output: Path) -> torch.Tensor:
    assert lightseq(["merge", "--adapter", str(adapter), "--output_dir", str(output)]) == 0
    return logits(AutoModelForCausalLM.from_pretrained(output))


def change_config(adapter: Path, **values: Any) -> None:
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.compat
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False, "lora_dropout": 0.1},
        {"init_lora_weights": "orthogonal"},
        {"use_rslora": True},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["lm_head", "q_proj"]},  # peft saves the head's own weight, too
    ],
    ids=str,
)
def test_plain_adapters_merge_like_peft(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    model = wrap(base, **settings)
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    found = merged(tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(found, logits(model.merge_and_unload()), rtol=1e-5, atol=1e-5)
    assert (found - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.01


@pytest.mark.parametrize(
    ("targets", "tied", "line"),
    [
        (["embed_tokens"], False, "embed_tokens.lora_embedding_A does not belong to a linear layer; use peft's merge"),
        (["lm_head"], True, "which {base} ties to the embeddings; use peft's merge_and_unload"),
        (["lm_head"], False, "lm_head.weight differs from {base}; give its base model with --model_name_or_path"),
    ],
)
def test_an_adapter_of_embeddings_or_of_another_head_is_refused(
    targets: list[str], tied: bool, line: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoConfig.from_pretrained(base, tie_word_embeddings=tied)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    wrap(tmp_path / "base", target_modules=targets).save_pretrained(tmp_path / "adapter")
    if "differs" in line:
        LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    assert line.format(base=tmp_path / "base") in refusal(tmp_path / "adapter", capsys)


def test_a_pissa_adapter_that_peft_converted_is_merged(base: Path, tmp_path: Path) -> None:
    model = wrap(base, init_lora_weights="pissa")
    model.peft_config["default"].init_lora_weights = True  # as peft's guide on PiSSA does
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    train(model)
    trained = logits(model)
    model.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    torch.testing.assert_close(merged(tmp_path / "adapter", tmp_path / "merged"), trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("init_lora_weights", x) for x in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "eva", "lora_ga")),
        ("init_lora_weights", "invented tomorrow"),
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("fan_in_fan_out", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("use_qalora", True),
        ("alora_invocation_tokens", [5]),
        ("megatron_config", {"tensor_model_parallel_size": 2}),
        ("arrow_config", {"top_k": 3}),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"beta": 1e-4}),
        ("monteclora_config", {"num_samples": 8}),
        ("velora_config", {"num_groups": 2}),
        ("ensure_weight_tying", True),
        ("a_key_of_tomorrow", 1.5),
        ("revision", "a1b2c3"),
    ],
)
def test_the_key_that_makes_an_adapter_more_than_plain_lora_is_named(
    adapter: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any
) -> None:
    change_config(adapter, **{key: value})
    assert f"{CONFIG}: {key} is {value!r}" in refusal(adapter, capsys)


def test_unknown_keys_that_are_off_are_accepted(adapter: Path) -> None:
    change_config(adapter, lora_dtype=None, enable_lora=None, merge_weights=False, a_key_of_tomorrow={})
    assert read_config(adapter)["r"] == 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_quantized_base_model_is_refused(
    base: Path, adapter: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    quantized = adapter.parent / "quantized"
    quantized.mkdir()
    weights = load_file(base / "model.safetensors")
    save_file({name: x.to(dtype) for name, x in weights.items()}, quantized / "model.safetensors")
    said = refusal(adapter, capsys, "--model_name_or_path", str(quantized))
    assert f"is {dtype}, which is quantized; give a model in" in said


def test_a_run_does_not_resume_an_adapter_that_is_not_plain_lora(base: Path, adapter: Path) -> None:
    change_config(adapter, use_dora=True)
    config = TrainConfig(str(base), data_path="x", output_dir="x", lora_rank=4)
    with pytest.raises(ValueError, match="use_dora is True, which is not plain LoRA"):
        check_model(adapter, config, AutoConfig.from_pretrained(base), Lora(4, 6.0, tuple(TARGETS)))


@pytest.mark.parametrize(
    ("file", "change", "line"),
    [
        (CONFIG, {"r": 8}, "not of rank 8; copy the adapter again"),
        (CONFIG, {"lora_alpha": math.nan}, "not a number above 0; copy the adapter again"),
        (CONFIG, {"lora_alpha": math.inf}, "not a number above 0; copy the adapter again"),
        (CONFIG, {"lora_alpha": True}, "not a number above 0; copy the adapter again"),
        (CONFIG, {"peft_type": ...}, "has no peft_type, so it may not be LoRA"),  # removed
        ("adapter_rope.json", {"hidden_size": 7}, "sets 'hidden_size', which is no setting of RoPE"),
    ],
)
def test_damaged_settings_of_an_adapter_are_refused(
    adapter: Path, capsys: pytest.CaptureFixture[str], file: str, change: dict[str, Any], line: str
) -> None:
    path = adapter / file
    settings = (json.loads(path.read_text()) if path.exists() else {}) | change
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))
    assert line in refusal(adapter, capsys)


def test_transposed_base_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "base")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["attn.c_proj"], fan_in_fan_out=True)
    peft.get_peft_model(model, settings).save_pretrained(str(tmp_path / "adapter"))
    change_config(tmp_path / "adapter", fan_in_fan_out=False, base_model_name_or_path=str(tmp_path / "base"))
    assert "attn.c_proj.weight is transposed, as in GPT-2" in refusal(tmp_path / "adapter", capsys)


def test_a_merged_model_has_every_file_of_the_tokenizer_and_no_unused_index(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    files = ("added_tokens.json", "vocab.json", "merges.txt", "additional_chat_templates/tool_use.jinja")
    for file in (*files, "chat_template.jinja", "model.safetensors.index.json", "tokenizer_config.json"):
        (tmp_path / "base" / file).parent.mkdir(exist_ok=True)
        (tmp_path / "base" / file).write_text('{"tokenizer_class": "GPT2Tokenizer", "weight_map": {}}')
    wrap(tmp_path / "base").save_pretrained(tmp_path / "adapter")
    merged(tmp_path / "adapter", tmp_path / "merged")
    assert all((tmp_path / "merged" / file).is_file() for file in files)
    assert not (tmp_path / "merged" / "model.safetensors.index.json").exists()
    for file in ("tokenizer_config.json", "chat_template.jinja"):  # the adapter trained with another template
        shutil.copyfile(tmp_path / "base" / file, tmp_path / "adapter" / file)
    merged(tmp_path / "adapter", tmp_path / "again")
    assert not (tmp_path / "again" / "additional_chat_templates").exists()
    assert (tmp_path / "again" / "chat_template.jinja").is_file()
