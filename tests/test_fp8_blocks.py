"""Bases whose files have FP8 in blocks train beneath adapters as the same numbers in 32 bits do, in their own bytes."""

import json
import pickle
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow_except
from packed_weights import bytes_of_run, check_copies, check_gathers
from programs import programs, refusal
from safetensors.torch import load_file, save_file
from test_plan_weights import parsed
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, PreTrainedConfig
from worlds import spawn

from benchmarks.tiny_models import tiny_config
from lightseq.architecture.family import resolve
from lightseq.cli import main as lightseq
from lightseq.models import weights
from lightseq.models.fp8_blocks import BLOCK, Fp8Bytes
from lightseq.models.packed import PackedWeight
from lightseq.models.presets import LLAMA3
from lightseq.parts import adapters
from lightseq.parts.adapters import add_adapters, lora_from_config
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.packed_base import mark, pack_layers
from lightseq.plan.weights import held_weights
from lightseq.tools import pretrained
from lightseq.tools.merged_weights import merge
from lightseq.tools.pretrained import load_pretrained
from lightseq.training.metrics import read_records

peft = pytest.importorskip("peft")

LENGTH, STEPS = 43, 3
LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False,
)  # fmt: skip
MOE = tiny_config("qwen3_moe", hidden_size=128, moe_intermediate_size=128)
MODELS = {"llama": LLAMA, "qwen3_moe": MOE}
DENSE = ["lm_head", "model.layers.1.mlp.down_proj", *(f"model.layers.{i}.mlp.gate" for i in range(9))]
SHAPES = ((300, 200), (2, 192), (5, 130, 64))  # shards begin inside blocks, and fewer rows than ranks
EXPERTS = "--lora_target_parameters experts.gate_up_proj,experts.down_proj"


def in_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a matrix, or stacked ones, in FP8, and its scales."""
    *_, rows, columns = weight.shape
    padded = nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scales = blocks.abs().amax((-3, -1)) / 448
    spread = scales.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., :rows, :columns]
    return (weight.float() / spread).to(torch.float8_e4m3fn), scales


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[PackedWeight, Tensor]:
    """Returns a weight in FP8, and its values."""
    codes, scales = in_fp8(torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])))
    spread = scales.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., : shape[-2], : shape[-1]]
    raw = Fp8Bytes(codes.view(torch.uint8).flatten(), scales)
    return PackedWeight(raw, shape, dtype, torch.Size(shape)), (codes.float() * spread).to(dtype)


def write(directory: Path, config: PreTrainedConfig) -> None:
    """Writes a random model in FP8 as they are published, in two files."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    parts: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for key, x in load_file(directory / "model.safetensors").items():
        if ".layers." not in key or x.ndim < 2 or key.removesuffix(".weight") in DENSE:
            parts[0][key] = x.bfloat16()
        else:
            parts[0][key], parts[1][f"{key}_scale_inv"] = in_fp8(x)
    (directory / "model.safetensors").unlink()
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    settings |= {"activation_scheme": "dynamic", "modules_to_not_convert": DENSE}
    told = json.loads((directory / "config.json").read_text())
    told |= {"quantization_config": settings, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(told))
    files = {f"model-0000{i + 1}-of-00002.safetensors": part for i, part in enumerate(parts)}
    for file, part in files.items():
        save_file(part, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, part in files.items() for key in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in FP8, and `-dense` with the values that transformers reads."""
    folder = tmp_path_factory.mktemp("fp8")
    for name, config in MODELS.items():
        write(folder / name, config)
        theirs(folder / name, torch.float32).save_pretrained(folder / f"{name}-dense")
    data = np.random.default_rng(3).integers(3, 64, (STEPS + 1, LENGTH)).tolist()
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": data}))
    return folder


def theirs(directory: Path, dtype: torch.dtype) -> Any:
    """Returns the model as transformers dequantizes it."""
    settings = FineGrainedFP8Config(dequantize=True)
    found = AutoModelForCausalLM.from_pretrained(directory, quantization_config=settings, dtype=dtype)
    found.config.__dict__.pop("quantization_config", None)
    found.hf_quantizer, found.is_quantized = None, False
    return found


def packed_model(directory: Path, dtype: torch.dtype) -> Any:
    source = resolve(LLAMA3, str(directory), False)
    model = build_to_train(source.config)
    adapters.freeze(model, dtype)
    pack_layers(model, directory)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", slow_except(MODELS, [*MODELS, "deepseek_v3", "glm4_moe"]))
def test_values_are_those_of_transformers(folder: Path, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    directory = folder / name if name in MODELS else tmp_path
    if name not in MODELS:
        write(directory, tiny_config(name, hidden_size=128, moe_intermediate_size=128, intermediate_size=128))
    model = packed_model(directory, dtype)
    weights.materialize(model, torch.device("cpu"), dtype=dtype)
    weights.load(model, directory)
    wanted = theirs(directory, dtype)
    for where, x in model.named_parameters():
        in_float32 = name not in MODELS and where.endswith("mlp.gate.weight")  # a router that stays in it
        assert x.dtype == (torch.float32 if in_float32 else dtype) and x.equal(wanted.get_parameter(where)), where
        is_packed = x.ndim > 1 and ".layers." in where and where.removesuffix(".weight") not in DENSE
        assert isinstance(x, PackedWeight) == is_packed, where


def test_values_of_rows_are_those_of_their_blocks() -> None:
    for shape in (*SHAPES, (256, 128)):
        for dtype in (torch.float32, torch.bfloat16):
            packed, dense = drawn(shape, dtype)
            assert packed.dense().equal(dense)
            for first, last in ((0, 1), (1, 2), (1, 129), (77, 240), (130, 140), (128, 256), (5, 5)):
                part = packed[first:last]
                assert isinstance(part, PackedWeight) and part.dense().equal(dense[first:last])
            if len(shape) == 2:
                assert packed.T.equal(dense.T) and packed.view(-1).equal(dense.view(-1))
    with pytest.raises(ValueError, match="writes to a weight in FP8"):
        packed.add_(1)
    with pytest.raises(ValueError, match="cannot become FP8"):
        packed.copy_(dense)


def test_experts_are_joined_where_blocks_stay_whole() -> None:
    (one, values), (two, others) = drawn((256, 64)), drawn((384, 64))
    joined = torch.cat([one, two])
    assert isinstance(joined, PackedWeight) and joined.dense().equal(torch.cat([values, others]))
    stacked = torch.cat([torch.stack([one, one]), torch.stack([two, two])], 1)
    wanted = torch.cat([torch.stack([values] * 2), torch.stack([others] * 2)], 1)
    assert isinstance(stacked, PackedWeight) and stacked.dense().equal(wanted)
    cut, rest = drawn((300, 64))
    assert not isinstance(torch.cat([cut, one]), PackedWeight) and torch.cat([cut, one]).equal(
        torch.cat([rest, values])
    )


def test_experts_whose_joined_blocks_would_be_cut_are_refused(tmp_path: Path) -> None:
    write(tmp_path, tiny_config("qwen3_moe", hidden_size=128, moe_intermediate_size=192))
    with pytest.raises(ValueError, match=r"is in FP8, but .*gate_up_proj cannot be joined from such tensors; give"):
        packed_model(tmp_path, torch.float32)


def test_scales_of_other_blocks_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "llama", tmp_path / "other")
    path = tmp_path / "other" / "model-00002-of-00002.safetensors"
    save_file({name: x.repeat(2, 1) for name, x in load_file(path).items()}, path)
    with pytest.raises(ValueError, match=r"its scales are F8_E4M3 of .*, not FP8 in blocks of 128 x 128; give"):
        packed_model(tmp_path / "other", torch.float32)


@pytest.mark.compat
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_fsdp2_gathers_the_same_bits(world: int) -> None:
    spawn(world, gathers)


def gathers(_rank: int) -> None:
    whole = [drawn(shape)[0] for shape in SHAPES]
    check_gathers(whole)
    check_gathers(whole, whole.__getitem__)


@pytest.mark.compat
@pytest.mark.parametrize("world", [1, 2])
def test_fsdp2_gathers_and_frees_copies_of_host_memory(world: int) -> None:
    spawn(world, gathers_copies)


def gathers_copies(_rank: int) -> None:
    check_copies(drawn((300, 200))[0])


@pytest.mark.compat
def test_a_compiled_layer_saves_no_dense_weight() -> None:
    weight, dense = drawn((300, 200))
    linear, x, found = nn.Linear(200, 300, bias=False), torch.randn(10, 200), []
    linear.weight = nn.Parameter(weight, requires_grad=False)
    compiled = torch.compile(linear.forward, backend="aot_eager", fullgraph=True)
    for forward in (linear.forward, compiled, lambda y: nn.functional.linear(y, dense)):
        saved, leaf = list[Tensor](), x.clone().requires_grad_()
        with saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            y = forward(leaf.sin()).sin()
        y.sum().backward()
        found.append(
            (
                y.detach(),
                leaf.grad,
                any(type(t) is Tensor and t.numel() == dense.numel() and t.is_floating_point() for t in saved),
            )
        )
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0][:2], other[:2], strict=True))
    assert [is_dense for *_, is_dense in found] == [False, False, True]


def flags(folder: Path, model: str, output: str, more: str = "", steps: int = STEPS) -> str:
    experts = EXPERTS if "moe" in model else ""
    return (
        f"--model_name_or_path {folder}/{model} --data_path {folder}/data.pkl --model_max_length {LENGTH} "
        f"--optim sgd --learning_rate 1 --lr_scheduler_type constant --output_dir {folder}/{output} "
        f"--lora_rank 4 --lora_alpha 16 {experts} {more} --max_steps {steps}"
    )


def results(output: Path) -> tuple[list[float], dict[str, Tensor]]:
    losses = [record["loss"] for record in read_records(output / "metrics.jsonl") if "loss" in record]
    return losses, load_file(output / f"checkpoint-{STEPS}" / "adapter_model.safetensors")


@pytest.mark.parametrize(("name", "world"), slow_except([("qwen3_moe", 2)], product(MODELS, (1, 2))))
def test_runs_train_as_the_same_numbers_in_32_bits_do(folder: Path, name: str, world: int) -> None:
    outputs = [f"{name}-{kind}-{world}" for kind in ("packed", "32", "host")]
    given = [(name, outputs[0], ""), (f"{name}-dense", outputs[1], ""), (name, outputs[2], "--offload both")]
    given, outputs = (each if name == "llama" else each[:2] for each in (given, outputs))
    split = flags(folder, name, "split", "--expert_parallel_size 2")
    *ends, refused = spawn(world, programs, "any", [*(flags(folder, *each) for each in given), split])[0]
    assert refused.status == 2 and (name == "llama" or world == 1 or "does not run with --model" in refused.err)
    assert all(end.status == 0 for end in ends), [end.err for end in ends]
    assert "frozen linear layers in FP8 as stored" in ends[0].out
    (losses, ours), *others = (results(folder / output) for output in outputs)
    for their_losses, wanted in others:
        torch.testing.assert_close(losses, their_losses, atol=1e-6, rtol=1e-6)
        for where, x in wanted.items():
            torch.testing.assert_close(ours[where], x, atol=1e-6, rtol=1e-4)


def trained(folder: Path, name: str) -> Path:
    """Returns a checkpoint in the middle of a run on one rank, which runs once."""
    if not (folder / f"for-{name}").exists():
        ((end,),) = spawn(
            1, programs, "any", [flags(folder, name, f"for-{name}", "--save_strategy steps --save_steps 1")]
        )
        assert end.status == 0, end.err
    return folder / f"for-{name}" / f"checkpoint-{STEPS - 1}"


@pytest.mark.slow
def test_a_run_resumes_on_fp8_only(folder: Path) -> None:
    checkpoint = trained(folder, "llama")
    assert json.loads((checkpoint / "adapter_four_bits.json").read_text())["form"] == "fp8"
    more = f"--resume_from_checkpoint {checkpoint}"
    words = [flags(folder, base, f"resumed-on-{base}", more) for base in ("llama-dense", "llama")]
    ((refused, resumed),) = spawn(1, programs, "any", words)
    why = "was trained with base weights in FP8 as their files store it, but this run has 16 or 32 bits"
    assert refused.status == 2 and why in refused.err, refused.err
    assert resumed.status == 0, resumed.err
    (losses, ours), (wanted_losses, wanted) = results(folder / "resumed-on-llama"), results(folder / "for-llama")
    assert losses[-1] == wanted_losses[-1] and all(x.equal(wanted[where]) for where, x in ours.items())


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_is_the_dequantized_base_and_the_adapter(folder: Path, tmp_path: Path, name: str) -> None:
    adapter = trained(folder, name)
    said = merge(adapter, tmp_path / "merged", None)
    assert said.endswith("with base weights as dequantized from FP8")
    base = AutoModelForCausalLM.from_pretrained(folder / f"{name}-dense", dtype=torch.float32)
    wanted = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    merged, about = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(about.values()) and not hasattr(merged.config, "quantization_config")
    for where, weight in merged.state_dict().items():
        assert weight.dtype is torch.bfloat16
        torch.testing.assert_close(weight.float(), wanted[where], atol=1e-3, rtol=2**-7)
    with pytest.raises(ValueError, match=r"--keep_16_bits: .* has its weights in FP8"):
        merge(adapter, tmp_path / "kept", None, keep_16_bits=True)
    with pytest.raises(ValueError, match=r"was trained on weights stored in FP8, but .* --keep_16_bits$"):
        merge(adapter, tmp_path / "kept", str(folder / f"{name}-dense"))


def test_an_adapter_generates_from_dequantized_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "_load_quantized", None)  # on GPUs, transformers rounds inputs to FP8
    loaded, wanted = (
        load_pretrained(trained(folder, "llama"), torch.device("cpu")),
        theirs(folder / "llama", torch.bfloat16),
    )
    for where, x in loaded.named_parameters():
        if ".lora_" not in where:
            assert x.equal(wanted.get_parameter(where.removeprefix("base_model.model.").replace(".base_layer", "")))


@pytest.mark.parametrize("name", slow_except(["qwen3_moe"], MODELS))
def test_planned_bytes_are_those_of_a_run(folder: Path, name: str) -> None:
    for world in (1, 2):
        source, config = resolve(LLAMA3, str(folder / name), False), parsed("--lora_rank 16")
        mark(source.config, "fp8", source.left_out)
        held = held_weights(source.config, config, lora_from_config(config, source.config), world)
        found = spawn(world, bytes_of, folder / name)[0]
        assert (held.total.stored, (held.layers[0] + held.experts[0]).gathered) == found


def bytes_of(_rank: int, directory: Path) -> tuple[int, int]:
    config, source = parsed("--lora_rank 16"), resolve(LLAMA3, str(directory), False).config
    model = build_to_train(source)
    add_adapters(model, lora_from_config(config, source), torch.bfloat16)
    pack_layers(model, directory)
    return bytes_of_run(model, config)


@pytest.mark.parametrize(
    ("settings", "words", "why"),
    [
        ({}, "", "in FP8 has weights that do not train; add --lora_rank"),
        ({}, "--lora_rank 4 --load_in_4bit True", "are in FP8, and train as they are; leave it out"),
        ({"weight_block_size": None}, "--lora_rank 4", "(fp8 with weight_block_size None in its config.json); give"),
        ({"activation_scheme": "static"}, "--lora_rank 4", "(fp8 with activation_scheme static in its config.json)"),
    ],
)
def test_what_fp8_does_not_support_is_refused(
    folder: Path, tmp_path: Path, settings: dict[str, Any], words: str, why: str
) -> None:
    told = json.loads((folder / "llama" / "config.json").read_text())
    told["quantization_config"] |= settings
    (tmp_path / "config.json").write_text(json.dumps(told))
    given = f"--model_name_or_path {tmp_path} --bf16 --model_max_length 256 --gpus 1 {words}"
    assert why in refusal(lightseq, "plan", *given.split())
