"""Weights of gpt-oss in MXFP4: read as bfloat16 with their exact values, trained, and written as plain ones."""

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
from programs import programs
from safetensors.torch import load_file, save_file
from small import losses
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from worlds import spawn

from lightseq.architecture.family import resolve
from lightseq.cli import main as lightseq
from lightseq.models import mxfp4, weight_files, weights
from lightseq.models.build import build
from lightseq.models.packed import PackedWeight
from lightseq.models.presets import LLAMA3
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.packed_base import pack_layers
from lightseq.tools.merged_weights import merge

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # of E2M1
EXPERTS, HIDDEN, INTERMEDIATE = 4, 64, 32
CONFIG = GptOssConfig(
    vocab_size=64, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, pad_token_id=0,
    tie_word_embeddings=False, initializer_range=0.1,
)  # fmt: skip
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def packed(inputs: int, outputs: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns blocks, scales and the weight (experts, inputs, outputs) that they stand for."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (EXPERTS, outputs, inputs // 32, 16, 2), generator=random)
    scales = torch.randint(121, 125, (EXPERTS, outputs, inputs // 32), generator=random)
    weight = VALUES[codes].flatten(-2) * 2.0 ** (scales - 127)[..., None]  # the low half of a byte is first
    blocks = codes[..., 0] + 16 * codes[..., 1]
    return blocks.to(torch.uint8), scales.to(torch.uint8), weight.flatten(-2).transpose(1, 2).contiguous()


def write_published(folder: Path, config: GptOssConfig) -> None:
    """Writes a checkpoint as gpt-oss has it, blocks and scales in two files, and `plain` beside it in bfloat16."""
    torch.manual_seed(0)
    model = build(config, torch.bfloat16)
    parts: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts[len(name) % 2][name] = parameter.detach().clone()
            continue
        blocks, scales, weight = packed(*parameter.shape[1:], seed=len(parts[0]))
        parameter.data.copy_(weight)
        parts[0][f"{name}_blocks"], parts[1][f"{name}_scales"] = blocks, scales
    model.save_pretrained(folder / "plain")
    shutil.copytree(folder / "plain", folder / "packed", ignore=shutil.ignore_patterns("*.safetensors"))
    saved = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "packed" / "config.json").write_text(json.dumps(saved | {"quantization_config": SETTINGS}))
    files = {f"model-0000{i + 1}-of-00002.safetensors": part for i, part in enumerate(parts)}
    for file, part in files.items():
        save_file(part, folder / "packed" / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "packed" / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4")
    write_published(folder, CONFIG)
    return folder


def test_every_value_is_read_exactly_and_only_a_ranks_experts_are(published: Path) -> None:
    source = resolve(LLAMA3, str(published / "packed"), False)
    assert source.stored_form == "mxfp4" and not hasattr(source.config, "quantization_config")
    model = build_to_train(source.config)
    model.to_empty(device="cpu")
    weights.load(model, published / "packed")
    plain = load_file(published / "plain" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain[name].float()), name
    files = weight_files.tensor_files(published / "packed", "")
    assert files.keys() == plain.keys()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with weight_files.open_tensors(files) as stored:
        part = stored(name)[1:3, 5:9, 2:7]
    assert part.dtype == torch.bfloat16 and torch.equal(part, plain[name][1:3, 5:9, 2:7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_have_the_values_of_transformers(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (6, 40, 3, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(0, 240, (6, 40, 3), generator=random, dtype=torch.uint8)
    shape = torch.Size((6, 96, 40))
    weight = PackedWeight(mxfp4.Mxfp4Bytes(codes.flatten(), scales.flatten()), shape, dtype, shape)
    wanted = convert_moe_packed_tensors(codes, scales, dtype=dtype)
    assert weight.equal(wanted) and weight.dense().is_contiguous()
    for first, last in ((0, 1), (2, 6), (3, 3)):
        assert isinstance(weight[first:last], PackedWeight) and weight[first:last].equal(wanted[first:last])


def words_of(published: Path, folder: Path, rows: int) -> tuple[str, list[list[int]]]:
    """Writes rows of tokens. Returns flags that train the packed model on them, and the rows."""
    data = np.random.default_rng(3).integers(3, 64, (rows, 43)).tolist()
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": data}))
    return f"--model_name_or_path {published}/packed --data_path {folder}/data.pkl --model_max_length 43", data


@pytest.mark.parametrize(("world", "flags"), slow_except([], product((1, 2, 3), ("", "--bf16"))))
def test_experts_in_their_own_bytes_train_as_in_bfloat16(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], world: int, flags: str
) -> None:
    pytest.importorskip("peft")
    words, _ = words_of(published, tmp_path, 3)
    words += f" --optim sgd --learning_rate 1 --lr_scheduler_type constant --lora_rank 2 {flags}"
    words += " --lora_target_parameters experts.gate_up_proj,experts.down_proj"
    packed = f"{words} --load_in_4bit True"
    on, off = f"{packed} --output_dir {tmp_path}/on", f"{words} --output_dir {tmp_path}/off"
    runs = [f"{on} --max_steps 2", f"{off} --max_steps 3", f"{on} --max_steps 3 --resume_from_checkpoint True"]
    ends = spawn(world, programs, "any", runs)[0]
    assert all(end.status == 0 for end in ends), [end.err for end in ends]
    assert "frozen experts in MXFP4 as stored" in ends[0].out and "are read as bfloat16" in ends[1].out
    assert losses(tmp_path, "on") == losses(tmp_path, "off")
    ours, wanted = (load_file(tmp_path / name / "checkpoint-3" / "adapter_model.safetensors") for name in ("on", "off"))
    assert all(x.equal(ours[name]) for name, x in wanted.items())
    assert not (tmp_path / "on" / "checkpoint-3" / "adapter_four_bits.json").exists()  # the values are the same
    planned = []
    for given in (packed, words):
        plan = f"plan {given.replace('--bf16', '')} --bf16 --gpus 1 --offload none --json"
        assert lightseq(plan.split()) == 0
        planned.append(json.loads(capsys.readouterr().out)["parts"]["parameters"])
    elements = 2 * EXPERTS * 3 * HIDDEN * INTERMEDIATE
    assert planned[1] - planned[0] == elements * (2 - 17 / 32)


def test_only_experts_are_held_in_mxfp4(published: Path) -> None:
    source = resolve(LLAMA3, str(published / "packed"), False)
    model = build_to_train(source.config)
    pack_layers(model, published / "packed")
    weights.materialize(model, torch.device("cpu"))
    weights.load(model, published / "packed")
    plain = load_file(published / "plain" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, PackedWeight) == name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        assert torch.equal(parameter, plain[name].float()), name


def test_other_blocks_and_scales_stay_as_they_are(published: Path, tmp_path: Path) -> None:
    shutil.copytree(published / "packed", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "fp4 of tomorrow"
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"other does not match the model: missing tensors .*gate_up_proj"):
        weights.load(build(CONFIG), tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    path = tmp_path / "other" / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("_scales"))
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, path)
    with pytest.raises(ValueError, match="are not MXFP4 weights; download them again"):
        weights.load(build(CONFIG), tmp_path / "other")


def test_an_adapter_is_merged_into_bfloat16(published: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    theirs: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(published / "plain"), config)
    torch.nn.init.normal_(theirs.base_model.model.model.layers[0].mlp.experts.lora_B["default"].weight)
    theirs.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged", str(published / "packed"))
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, weight in theirs.merge_and_unload().state_dict().items():
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name], weight, rtol=2**-7, atol=2**-7), name


@pytest.mark.slow
def test_a_run_starts_from_mxfp4_and_saves_bfloat16(published: Path, tmp_path: Path) -> None:
    words, data = words_of(published, tmp_path, 1)
    words += f" --max_steps 1 --output_dir {tmp_path}/out --learning_rate 0 --bf16"
    ((ended,), *_) = spawn(2, programs, "any", [words])
    assert ended.status == 0, ended.err
    assert "packed: weights in MXFP4 are read as bfloat16; checkpoints have no MXFP4\n" in ended.out
    saved = tmp_path / "out" / "checkpoint-1"
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    ids, plain = torch.tensor(data), AutoModelForCausalLM.from_pretrained(published / "plain", dtype=torch.float32)
    loss = plain(input_ids=ids, labels=ids).loss.item()
    assert losses(tmp_path, "out") == pytest.approx([loss], rel=0.01)
    found = AutoModelForCausalLM.from_pretrained(saved)
    for name, weight in plain.state_dict().items():
        assert found.get_parameter(name).dtype == torch.bfloat16
        assert torch.equal(found.get_parameter(name).float(), weight), name
