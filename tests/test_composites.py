"""Models with images or audio, trained on text: their parts, and the layout of their files."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_except
from safetensors.torch import load_file, save_file
from test_architectures import ROOT
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, Llama4ForConditionalGeneration, PreTrainedModel
from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModel

from benchmarks import tiny_models
from benchmarks.architectures import compare_training
from benchmarks.tiny_models import plain_model, tiny_config
from lightseq.data.tokenizer import ByteTokenizer
from lightseq.models import weight_files, weights
from lightseq.models.published_layout import layout_of_files
from lightseq.parts import adapters
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.head import known_logit_transform
from lightseq.parts.probes import find_logit_transform
from lightseq.tools import generate
from lightseq.utils.logit_transform import LogitTransform

CPU = torch.device("cpu")
IDS = torch.arange(3, 20)[None]


def saved(model_type: str, folder: Path) -> PreTrainedModel:
    """Saves a tiny model as published: by a model that was loaded, because a new one's prefixes may differ."""
    new = plain_model(tiny_config(model_type))
    new.save_pretrained(folder / "new")
    model: PreTrainedModel = type(new).from_pretrained(folder / "new").eval()
    model.save_pretrained(folder / "published")
    if model_type == "gemma3":  # the published names, which transformers writes only if it has read them
        file = folder / "published" / weight_files.WEIGHTS
        renamed = {
            name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in load_file(file).items()
        }
        save_file(renamed, file, metadata={"format": "pt"})
    return model


def loaded(directory: Path) -> PreTrainedModel:
    model = build_to_train(AutoConfig.from_pretrained(directory))
    weights.materialize(model, CPU)
    weights.load(model, directory)
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def check_saved_as_published(model: Any, folder: Path, **tensors: Any) -> None:
    weights.save_pretrained(model, folder / "out", torch.float32, trained_from=folder / "published", **tensors)
    before, after = (load_file(folder / name / weight_files.WEIGHTS) for name in ("published", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture
def without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empties towers of timm until the end of a test."""
    monkeypatch.setattr(TimmWrapperModel, "__init__", TimmWrapperModel.__init__)
    tiny_models.empty_timm_towers()


def test_towers_are_not_in_memory() -> None:
    model = build_to_train(tiny_config("gemma3"))
    assert not [name for name, _ in model.named_parameters() if "language_model" not in name]


def test_unknown_and_missing_tensors_are_refused_by_name() -> None:
    model = build_to_train(tiny_config("gemma3"))
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"missing tensors \['model.language_model.norm.weight'\]"):
        layout_of_files(model, names, [name for name in names if not name.endswith("language_model.norm.weight")])
    with pytest.raises(ValueError, match=r"unknown tensors \['model.language_model.layers.0.mlp.extra'\]"):
        layout_of_files(model, names, [*names, "model.language_model.layers.0.mlp.extra"])
    tower = "model.vision_tower.vision_model.post_layernorm.weight"
    assert layout_of_files(model, names, [*names, tower]).untouched == (tower,)


def expert_files(folder: Path, transposed: bool) -> Any:
    """Saves a tiny Qwen3-VL-MoE, with its experts as published or as transformers writes them. Returns the model."""
    config = tiny_config("qwen3_vl_moe")
    config.text_config.moe_intermediate_size = 24  # no weight is square
    new = plain_model(config)
    new.save_pretrained(folder / "new")
    model = type(new).from_pretrained(folder / "new").eval()
    model.save_pretrained(folder / "published")
    file = folder / "published" / weight_files.WEIGHTS
    tensors = {name: x.mT if transposed and ".experts." in name else x for name, x in load_file(file).items()}
    assert tensors["model.language_model.layers.1.mlp.experts.gate_up_proj"].shape[1] == (32 if transposed else 48)
    save_file({name: x.contiguous() for name, x in tensors.items()}, file, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("transposed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_experts_keep_the_orientation_of_the_files(transposed: bool, tmp_path: Path, alone: None) -> None:
    want = expert_files(tmp_path, transposed)
    model = loaded(tmp_path / "published")
    assert torch.equal(logits(model), logits(want))
    check_saved_as_published(model, tmp_path)


@pytest.mark.parametrize("transposed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_experts_with_adapters_are_loaded(transposed: bool, tmp_path: Path) -> None:
    want = dict(expert_files(tmp_path, transposed).named_parameters())
    model = build_to_train(AutoConfig.from_pretrained(tmp_path / "published"))
    lora = adapters.Lora(2, 4.0, (), parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
    adapters.add_adapters(model, lora, torch.float32)
    weights.materialize(model, CPU)
    weights.load(model, tmp_path / "published")
    found = weights.base_parameters(model)
    assert sum(".experts." in name for name in found) == 4
    assert all(torch.equal(parameter, want[name]) for name, parameter in found.items())


@pytest.mark.parametrize("transposed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_experts_of_parameters_without_a_shape_are_loaded_and_saved(
    transposed: bool, tmp_path: Path, alone: None
) -> None:
    """ZeRO-3 leaves a parameter empty, and its shape in `ds_shape`."""
    want = dict(expert_files(tmp_path, transposed).named_parameters())
    model = build_to_train(AutoConfig.from_pretrained(tmp_path / "published"))
    weights.materialize(model, CPU)
    names = {}
    for name, parameter in model.named_parameters():
        names[parameter], parameter.ds_shape, parameter.data = name, parameter.shape, torch.empty(0)
    whole: dict[str, Tensor] = {}
    weights.load(model, tmp_path / "published", lambda parameter, read: whole.update({names[parameter]: read(())}))
    assert all(torch.equal(tensor, want[name]) for name, tensor in whole.items())
    check_saved_as_published(model, tmp_path, tensors=whole.items())


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_positions_of_an_encoder_in_older_files_are_kept(model_type: str, tmp_path: Path, alone: None) -> None:
    want = saved(model_type, tmp_path)
    file = tmp_path / "published" / weight_files.WEIGHTS
    positions = {"vision_tower.vision_model.embeddings.position_ids": torch.arange(4)[None]}
    save_file(load_file(file) | positions, file, metadata={"format": "pt"})
    model = loaded(tmp_path / "published")
    assert torch.equal(logits(model), logits(want))
    check_saved_as_published(model, tmp_path)


def test_a_save_fails_if_the_towers_are_gone(tmp_path: Path, alone: None) -> None:
    model = build_to_train(tiny_config("gemma3"))
    weights.materialize(model, CPU)
    with pytest.raises(FileNotFoundError, match="is gone, which has the parts of the model that do not train"):
        weights.save_pretrained(model, tmp_path / "out", torch.float32, trained_from=tmp_path / "gone")


@pytest.mark.parametrize(
    ("model_type", "packed"),
    slow_except([("gemma3", False), ("llama4", True)], product(("gemma3", "gemma3n", "llama4"), (False, True))),
)
def test_text_trains_as_in_the_whole_model(model_type: str, packed: bool, without_timm: None, alone: None) -> None:
    assert "gradients within" in compare_training(tiny_config(model_type), packed)


def test_tables_that_text_passes_on_its_way_to_the_decoder_are_kept_as_they_are(
    tmp_path: Path, without_timm: None, alone: None
) -> None:
    """The forward pass of Gemma 3n reads the tables for tokens of images and audio also if there are none."""
    want = saved("gemma3n", tmp_path)
    model = loaded(tmp_path / "published")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {name.split(".")[1] for name in frozen} == {"embed_vision", "embed_audio"}
    assert not [name for name, _ in model.named_parameters() if "tower" in name]
    assert torch.equal(logits(model), logits(want))
    check_saved_as_published(model, tmp_path)


def test_a_composite_that_changes_the_logits_of_the_language_model_inside_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = 2 * output.logits
        return output

    forward = Llama4ForConditionalGeneration.forward
    model = build_to_train(tiny_config("llama4"))
    assert known_logit_transform(model) == LogitTransform(1.0, None)
    model.language_model.register_forward_hook(lambda *_: None)
    assert known_logit_transform(model) is None
    monkeypatch.setattr(Llama4ForConditionalGeneration, "forward", scaled)
    with pytest.raises(ValueError, match="changes the logits of its Llama4ForCausalLM"):
        find_logit_transform(build_to_train(tiny_config("llama4")))


def test_a_model_with_images_generates_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_models.SIZES, "vocab_size", 320)
    saved("qwen3_vl", tmp_path)
    ByteTokenizer().as_transformers().save_pretrained(tmp_path / "published")
    words = [str(tmp_path / "published"), "--prompt", "def ", "--max_new_tokens", "3"]
    assert generate.continuations(generate.parser().parse_args(words))[0].startswith("def ")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_trains_resumes_and_merges_with_its_towers_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny_models.SIZES, "vocab_size", 320)
    saved("gemma3", tmp_path)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"row {i} " * 40}) + "\n" for i in range(20)))
    model = tmp_path / "published"

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "lightseq", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    flags = f"--model_name_or_path {model} --data_path {text} --tokenizer byte --model_max_length 96".split()
    flags += ["--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2", "--learning_rate", "1e-2"]
    flags += ["--lr_scheduler_type", "constant", "--nproc_per_node", "2"]
    run("train", *flags, "--output_dir", str(tmp_path / "out"))
    run("train", *flags, "--output_dir", str(tmp_path / "two"), "--max_steps", "2")
    resumed = ["--resume_from_checkpoint", str(tmp_path / "two" / "checkpoint-2")]
    run("train", *flags, "--output_dir", str(tmp_path / "again"), *resumed)
    run("train", *flags, "--output_dir", str(tmp_path / "lora"), "--lora_rank", "2")
    run("merge", "--adapter", str(tmp_path / "lora" / "checkpoint-4"), "--output_dir", str(tmp_path / "merged"))
    before = load_file(model / weight_files.WEIGHTS)
    whole, again = (load_file(tmp_path / name / "checkpoint-4" / weight_files.WEIGHTS) for name in ("out", "again"))
    merged = load_file(tmp_path / "merged" / weight_files.WEIGHTS)
    for name, tensor in before.items():
        trains, is_linear = name.startswith("language_model"), name.endswith("_proj.weight")
        assert torch.equal(whole[name], again[name]), name
        assert torch.equal(whole[name], tensor) != trains or not tensor.any(), name
        assert torch.equal(merged[name], tensor) != (trains and is_linear), name
    settings = json.loads((tmp_path / "lora" / "checkpoint-4" / "adapter_config.json").read_text())
    assert settings["target_modules"].startswith(r"model\.language_model\.layers\.")
    for folder in (tmp_path / "out" / "checkpoint-4", tmp_path / "merged"):
        AutoModelForImageTextToText.from_pretrained(folder)
