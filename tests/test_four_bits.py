"""Adapters on weights in four bits train as peft with bitsandbytes does on one process, and are saved and resumed."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import slow_except
from plain_training import plain_losses
from programs import Ended, described_programs, refusal, shown
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from worlds import spawn

from benchmarks.tiny_models import tiny_config
from lightseq.architecture.family import resolve
from lightseq.cli import main as lightseq
from lightseq.distributed.parallel_dims import local_part
from lightseq.models import nf4, weights
from lightseq.models.packed import PackedWeight
from lightseq.models.presets import LLAMA3
from lightseq.parts import adapter_files, adapters
from lightseq.parts.adapter_targets import find_targets
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.packed_base import check_four_bits, pack_layers
from lightseq.tools.merged_base import find_base_weights
from lightseq.tools.merged_weights import merge
from lightseq.tools.pretrained import load_pretrained
from lightseq.training.metrics import read_records

peft = pytest.importorskip("peft")
dequantize_4bit = pytest.importorskip("bitsandbytes.functional").dequantize_4bit

LENGTH, VOCABULARY, STEPS = 43, 64, 3
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False,
)  # fmt: skip
FLAGS = "--load_in_4bit True --lora_rank 4 --lora_alpha 16"
STORED: Mapping[str, tuple[str, bool, list[str] | None]] = {  # directories that transformers wrote in four bits
    "double": ("nf4", True, None),
    "single": ("nf4", False, ["lm_head", "down_proj"]),
    "fp4": ("fp4", True, None),
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bits")
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "model")
    for name, (kind, double, skipped) in STORED.items():
        settings = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double, "llm_int8_skip_modules": skipped}
        config = BitsAndBytesConfig(load_in_4bit=True, **settings)
        stored = AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=config, dtype=torch.float32)
        stored.save_pretrained(folder / name, max_shard_size="60KB" if name == "double" else "1GB")
    data = np.random.default_rng(3).integers(3, VOCABULARY, (STEPS + 1, LENGTH)).tolist()
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": data}))
    return folder


def flags(folder: Path, output: str, model: str = "model", flags: str = FLAGS) -> str:
    return (
        f"--model_name_or_path {folder}/{model} --data_path {folder}/data.pkl --model_max_length {LENGTH} "
        f"--optim sgd --learning_rate 1 --lr_scheduler_type constant --output_dir {folder}/{output} {flags}"
    )


def class_of(parameter: torch.nn.Parameter) -> str:
    return type(local_part(parameter.detach())).__name__


def programs(rank: int, runs: list[str]) -> list[tuple[Ended, dict[str, str]]]:
    return described_programs(rank, runs, class_of)


def reference(folder: Path, model: str = "model") -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses and last adapters of peft with bitsandbytes; the adapters begin as ours do."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    quantizes = {"quantization_config": config} if model == "model" else {}
    base = AutoModelForCausalLM.from_pretrained(folder / model, **quantizes, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=list(LINEARS), task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, lora).train()  # else bitsandbytes multiplies in bfloat16 on some CPUs
    with torch.no_grad():
        adapters.initialize(adapted.base_model.model, 42)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    data = pickle.loads((folder / "data.pkl").read_bytes())["input_ids"]
    losses = plain_losses(adapted, data, STEPS, optimizer)[:-1]
    return losses, {n: p.detach() for n, p in adapted.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_runs_train_as_peft_with_bitsandbytes_does(folder: Path, world: int) -> None:
    output = f"on-{world}"
    runs = [flags(folder, output), f"{flags(folder, f'{output}-host')} --offload both"]
    ((end, seen), (on_host, _)), *_ = spawn(world, programs, [f"{run} --max_steps {STEPS}" for run in runs])
    assert end.status == 0 and on_host.status == 0, end.err + on_host.err
    in_bits = {name.split(".")[-3] for name, kind in seen.items() if kind == PackedWeight.__name__}
    assert in_bits == set(LINEARS) and sum(kind == PackedWeight.__name__ for kind in seen.values()) == 14
    saved, same = (
        load_file(folder / name / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
        for name in (output, f"{output}-host")
    )
    assert all(x.equal(same[name]) for name, x in saved.items())
    check_equal(folder, output, *reference(folder))


def check_equal(folder: Path, output: str, losses: list[float], trained: dict[str, Tensor]) -> None:
    """Compares losses, and adapters, which differ from the first ones by gradients after steps of SGD."""
    torch.testing.assert_close(losses_of(folder / output), losses, atol=1e-5, rtol=1e-5)
    saved = load_file(folder / output / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    for name, x in trained.items():
        ours = saved[name.replace(".default", "")]
        torch.testing.assert_close(ours, x, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["double", pytest.param("single", marks=pytest.mark.slow)])
def test_stored_weights_in_four_bits_train_as_they_are(folder: Path, name: str) -> None:
    given = flags(folder, f"from-{name}", name, FLAGS if name == "double" else FLAGS.split("True")[1])
    ((end, seen), *_), *_ = spawn(2, programs, [f"{given} --max_steps {STEPS}"])
    assert end.status == 0, end.err
    in_bits = {n.split(".")[-3] for n, kind in seen.items() if kind == PackedWeight.__name__}
    assert in_bits == set(LINEARS) - set(STORED[name][2] or ())
    check_equal(folder, f"from-{name}", *reference(folder, name))


@pytest.mark.parametrize("name", ["double", "single"])
def test_stored_bytes_are_read_as_they_are(folder: Path, name: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    source = resolve(LLAMA3, str(folder / name), False)
    model = build_to_train(source.config)
    adapters.freeze(model, torch.float32)
    pack_layers(model, folder / name)
    weights.materialize(model, torch.device("cpu"))
    weights.load(model, folder / name)
    for where, x in model.named_parameters():
        stored = theirs.get_parameter(where)
        if not isinstance(x, PackedWeight):
            assert x.equal(stored)
            continue
        state = stored.quant_state
        assert x.raw.codes.equal(stored.data.flatten()) and x.raw.scales.equal(state.absmax.view(torch.uint8))
        assert x.dense().equal(dequantize_4bit(stored.data, state))


def trained_adapter(folder: Path, name: str, compute: str | None = None) -> Path:
    """Returns a checkpoint of a run, which runs once."""
    compute = ("--bf16" if name == "model" else "") if compute is None else compute
    output = f"merge-{name}{compute.strip()}"
    given = flags(folder, output, name, FLAGS if name == "model" else FLAGS.split("True")[1])
    if not (folder / output).exists():
        (((end, _),),) = spawn(1, programs, [f"{given} {compute} --max_steps 2"])
        assert end.status == 0, end.err
        held = "frozen linear layers in NF4" + ("" if name == "model" else " as stored")
        assert f"compute, {held}, float32 master weights" in end.out, end.out
    return folder / output / "checkpoint-2"


@pytest.mark.parametrize(
    ("name", "compute"),
    slow_except([("model", "--bf16")], [(n, c) for n in ("model", "double", "single") for c in ("", "--bf16")]),
)
def test_a_merged_model_is_the_dequantized_base_and_the_adapter(
    folder: Path, tmp_path: Path, name: str, compute: str
) -> None:
    adapter = trained_adapter(folder, name, compute)
    said = merge(adapter, tmp_path / "merged", None)
    assert said.endswith("with base weights as dequantized from four bits")
    dtype = torch.bfloat16 if compute else torch.float32
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    quantizes = {"quantization_config": config} if name == "model" else {}
    base = AutoModelForCausalLM.from_pretrained(folder / name, **quantizes, dtype=dtype).dequantize().float()
    wanted = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    untouched = load_file(folder / "model" / "model.safetensors")  # which peft's base has in bfloat16
    wanted |= {where: x for where, x in untouched.items() if where.split(".")[-2] not in LINEARS}
    merged, about = LlamaForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(about.values()) and not hasattr(merged.config, "quantization_config")
    for where, weight in merged.state_dict().items():
        assert weight.dtype is torch.float32  # as in the files of the base
        torch.testing.assert_close(weight, wanted[where], atol=1e-6, rtol=1e-6)


def test_an_adapter_generates_from_the_weights_it_was_trained_on(folder: Path) -> None:
    loaded = load_pretrained(trained_adapter(folder, "model", ""), torch.device("cpu"))
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=config, dtype=torch.float32)
    wanted = base.dequantize().state_dict()
    for where, x in loaded.named_parameters():
        if ".lora_" not in where:
            assert x.equal(wanted[where.removeprefix("base_model.model.").replace(".base_layer", "")])


def test_sixteen_bits_are_kept_if_asked(folder: Path, tmp_path: Path) -> None:
    adapter = trained_adapter(folder, "model")
    said = merge(adapter, tmp_path / "merged", None, keep_16_bits=True)
    assert "dequantized" not in said
    base = LlamaForCausalLM.from_pretrained(folder / "model")
    wanted = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    for where, weight in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(weight, wanted[where], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("trained_on", "base", "keeps", "why"),
    [
        ("double", "model", False, "was trained on weights stored in four bits, but"),
        ("model", "double", False, "was trained on weights quantized from 16 or 32 bits on loading, but"),
        ("double", "double", True, "--keep_16_bits: "),
        ("double", "fp4", True, "is torch.uint8, which is quantized; give a model in float32"),
    ],
)
def test_an_adapter_is_not_merged_into_another_form_of_its_base(
    folder: Path, tmp_path: Path, trained_on: str, base: str, keeps: bool, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        merge(trained_adapter(folder, trained_on), tmp_path / "merged", str(folder / base), keeps)
    assert not (tmp_path / "merged").exists()


def test_merging_into_a_tensor_for_each_expert_asks_for_sixteen_bits(tmp_path: Path) -> None:
    tiny = tiny_config("qwen3_moe")
    config = type(tiny)(**(tiny.to_dict() | {"hidden_size": 64, "moe_intermediate_size": 64}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / adapter_files.BITS_FILE).write_text('{"in_files": false, "dtype": "bfloat16"}')
    with pytest.raises(ValueError, match=r"has a tensor for each expert; add --keep_16_bits$"):
        find_base_weights(tmp_path / "model", tmp_path / "adapter", keep_16_bits=False)


@pytest.mark.parametrize(("trained_on", "base"), [("double", "model"), ("model", "double")])
def test_a_run_resumes_on_the_form_of_its_base_only(folder: Path, trained_on: str, base: str) -> None:
    checkpoint = trained_adapter(folder, trained_on)
    given = f"{flags(folder, checkpoint.parent.name, base)} --max_steps 3 --resume_from_checkpoint True"
    (((end, _),),) = spawn(1, programs, [given])
    assert end.status == 2 and "was trained with base weights in NF4 " in end.err, end.err
    assert "but this run has NF4 " in end.err or "but this run has 16 or 32 bits" in end.err, end.err


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("model", "--load_in_4bit True", "--load_in_4bit True needs adapters; add --lora_rank"),
        ("double", "", "in four bits has weights that do not train; add --lora_rank"),
        ("fp4", "--lora_rank 4", "has quantized weights (bitsandbytes in fp4 in its config.json); give"),
    ],
)
def test_what_weights_in_four_bits_do_not_support_is_refused(folder: Path, name: str, words: str, why: str) -> None:
    (((end, _),),) = spawn(1, programs, [flags(folder, "refused", name, words)])
    assert end.status == 2 and why in end.err, end.err


@pytest.mark.slow
def test_plan_counts_four_bits_that_the_files_have(folder: Path) -> None:
    words = "--bf16 --lora_rank 4 --model_max_length 256 --gpus 1 --offload none --json"
    planned = []
    for model, flags in (("double", ""), ("model", " --load_in_4bit True"), ("model", "")):
        out = shown(lightseq, "plan", "--model_name_or_path", folder / model, *f"{words}{flags}".split())
        planned.append(json.loads(out)["parts"]["parameters"])
    assert planned[0] == planned[1] < planned[2]
    words = f"--model_name_or_path {folder}/double --bf16 --model_max_length 256 --gpus 1"
    assert "double in four bits has weights that do not train; add" in refusal(lightseq, "plan", *words.split())


def test_rows_of_no_whole_blocks_are_refused() -> None:
    narrow = LlamaConfig(**(CONFIG.to_dict() | {"intermediate_size": 48}))
    with pytest.raises(ValueError, match=r"down_proj.weight have 48 elements, not a multiple of 64"):
        check_four_bits(build_to_train(narrow))
    tiny = tiny_config("qwen3_moe")
    with pytest.raises(ValueError, match=r"experts.down_proj have 16 elements, not a multiple of 64"):
        check_four_bits(build_to_train(type(tiny)(**(tiny.to_dict() | {"hidden_size": 64}))))


EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 64, "head_dim": 16},  # stacked the other way, and with biases
    "llama4_text": {"intermediate_size": 64, "intermediate_size_mlp": 64, "head_dim": 16},  # its router is a linear
    "afmoe": {"intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16},  # its router holds a linear
}


@pytest.mark.parametrize("family", ["llama4_text", "afmoe"])
def test_routers_of_linears_stay_dense_and_get_no_adapters(family: str) -> None:
    config = tiny_config(family, hidden_size=64, **EXPERTS[family])
    model = build_to_train(config)
    pack_layers(model)
    dense = {name for name, x in model.named_parameters() if ".layers." in name and not isinstance(x, PackedWeight)}
    routers = {name for name in dense if ".router." in name}
    assert routers and all("router" in name or "norm" in name or "bias" in name for name in dense)
    assert not any(".router" in name for name in find_targets(config).linears)


@pytest.mark.parametrize(
    ("family", "world"),
    slow_except([("qwen3_moe", 2)], [("qwen3_moe", 2), ("qwen3_moe", 3), ("gpt_oss", 2), ("llama4_text", 2)]),
)
def test_experts_in_four_bits_train_as_the_same_numbers_in_32_do(family: str, world: int, tmp_path: Path) -> None:
    config = type(tiny_config(family))(**(tiny_config(family).to_dict() | {"hidden_size": 64} | EXPERTS[family]))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model = build_to_train(config)
    pack_layers(model)
    weights.materialize(model, torch.device("cpu"))
    weights.load(model, tmp_path / "model")
    numbers = {name: x for name, x in model.named_parameters() if isinstance(x, PackedWeight)}
    assert any("experts" in name for name in numbers)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, x in numbers.items():
        dense.get_parameter(name).data.copy_(x.dense())
    dense.save_pretrained(tmp_path / "dense")
    data = np.random.default_rng(3).integers(3, config.vocab_size, (STEPS + 1, LENGTH)).tolist()
    (tmp_path / "data.pkl").write_bytes(pickle.dumps({"input_ids": data}))
    targets = "--lora_target_parameters experts.gate_up_proj,experts.down_proj"
    bits = f"{flags(tmp_path, 'bits')} {targets} --max_steps {STEPS}"
    without = bits.replace("--load_in_4bit True", "").replace("/bits", "/dense-run").replace("/model ", "/dense ")
    for end, _ in spawn(world, programs, [bits, without])[0]:
        assert end.status == 0, end.err
    assert losses_of(tmp_path / "bits") == pytest.approx(losses_of(tmp_path / "dense-run"), abs=1e-6)
    saved = [
        load_file(tmp_path / x / f"checkpoint-{STEPS}" / "adapter_model.safetensors") for x in ("bits", "dense-run")
    ]
    for name, x in saved[1].items():
        torch.testing.assert_close(saved[0][name], x, atol=1e-6, rtol=1e-4)


def losses_of(output: Path) -> list[float]:
    return [record["loss"] for record in read_records(output / "metrics.jsonl") if "loss" in record]


def test_a_model_with_weights_is_quantized_in_place() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).requires_grad_(False)
    before = {name: x.clone() for name, x in model.named_parameters()}
    pack_layers(model)
    for name, x in model.named_parameters():
        if isinstance(x, PackedWeight):
            assert x.dense().equal(nf4.quantize(before[name]).dense())
        else:
            assert x.equal(before[name]) and name.split(".")[-2] not in LINEARS
    assert model(input_ids=torch.arange(9)[None]).logits.isfinite().all()
