"""Adapters across ranks: they train as peft's own on one process do, and are saved, merged and resumed."""

import json
import pickle
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from plain_training import loss_at, plain_losses
from programs import described_programs, refusal
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from worlds import spawn

from lightseq.architecture.family import apply_rope
from lightseq.architecture.flops import count_adapter_parameters, model_flops
from lightseq.checkpoint.manifest import MANIFEST
from lightseq.checkpoint.model_differences import start_notes
from lightseq.cli import main as lightseq
from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig
from lightseq.memory.remat import apply_remat
from lightseq.parts import adapter_files, adapters
from lightseq.parts.packed_base import PackedBase
from lightseq.tools.merged_weights import merge
from lightseq.training.metrics import read_records

peft = pytest.importorskip("peft")
create_loraplus_optimizer = pytest.importorskip("peft.optimizers").create_loraplus_optimizer

LENGTH, VOCABULARY, STEPS = 43, 64, 4
WEIGHTS = adapter_files.WEIGHTS
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False,
)  # fmt: skip
LORA = adapters.Lora(4, 16.0, ("down_proj", "k_proj", "q_proj"))
FLAGS = "--lora_rank 4 --lora_alpha 16 --lora_target_modules q_proj,k_proj,down_proj"

PATTERN = r"model\.layers\.1\..*(q|down)_proj"
OPTIONS = f"--use_rslora True --loraplus_lr_ratio 4 --lora_target_modules '{PATTERN}'"

FAR = """--rope_theta 30000 --rope_scaling '{"rope_type": "yarn", "factor": 4}'"""


def dtype_of(parameter: torch.nn.Parameter) -> str:
    return f"{parameter.dtype} {parameter.requires_grad}"


def peft_losses(
    directory: Path, data: list[list[int]], ratio: float = 1.0, **settings: Any
) -> tuple[list[float], torch.nn.Module]:
    """Returns losses of every step and one more, by peft and plain torch; the adapters begin as ours do."""
    chosen = {"r": 4, "lora_alpha": 16, "target_modules": list(LORA.targets), "task_type": "CAUSAL_LM"} | settings
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(directory), peft.LoraConfig(**chosen))
    with torch.no_grad():
        adapters.initialize(model.base_model.model, 42)
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=3e-2, loraplus_lr_ratio=ratio, weight_decay=0.0)
    return plain_losses(model, data, STEPS, optimizer), model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "model")
    data = np.random.default_rng(3).integers(3, VOCABULARY, (STEPS + 1, LENGTH)).tolist()
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": data}))
    common = (
        f"--model_name_or_path {folder}/model --data_path {folder}/data.pkl --model_max_length {LENGTH} "
        f"--learning_rate 3e-2 --lr_scheduler_type constant {FLAGS}"
    )
    runs = [
        f"{common} --output_dir {folder}/whole --max_steps {STEPS}",
        f"{common} --output_dir {folder}/parts --max_steps 2 --layers_per_checkpoint 2",
        f"{common} --output_dir {folder}/parts --max_steps {STEPS} --resume_from_checkpoint True",
        f"{common} --output_dir {folder}/far --max_steps 1 {FAR}",
        f"{common.removesuffix(FLAGS)} --output_dir {folder}/far-all --max_steps 1 {FAR}",
        f"{common} --output_dir {folder}/options --max_steps {STEPS} {OPTIONS}",
        f"{common} --output_dir {folder}/bf16 --max_steps 1 --bf16",
    ]
    for words, (end, seen) in zip(runs, spawn(2, described_programs, runs, dtype_of)[0], strict=True):
        assert end.status == 0, f"{words}: {end.err}"
        (folder / "seen.json").write_text(json.dumps(seen))
        (folder / "said.txt").write_text(end.out)
    return folder


def merges(adapter: Path, output: Path, *more: str) -> Path:
    """Merges an adapter by the command; returns where."""
    assert lightseq(["merge", "--adapter", str(adapter), "--output_dir", str(output), *more]) == 0
    return output


def losses(folder: Path, run: str) -> list[float]:
    return [record["loss"] for record in read_records(folder / run / "metrics.jsonl")]


@pytest.mark.compat
def test_adapters_train_and_are_saved_and_merged_as_by_peft(folder: Path) -> None:
    data = pickle.loads((folder / "data.pkl").read_bytes())["input_ids"]
    expected, trained = peft_losses(folder / "model", data)
    assert losses(folder, "whole") == pytest.approx(expected[:-1], abs=1e-5)
    checkpoint = folder / "whole" / f"checkpoint-{STEPS}"
    untrained = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert abs(loss_at(untrained, data, STEPS).item() - expected[-1]) > 0.01, "nothing was learnt"
    opened = peft.PeftModel.from_pretrained(untrained, checkpoint)
    assert loss_at(opened, data, STEPS).item() == pytest.approx(expected[-1], abs=1e-5)
    shutil.copyfile(checkpoint / WEIGHTS, folder / "model" / "stray.safetensors")  # of nobody's index
    merges(checkpoint, folder / "merged")
    (folder / "model" / "stray.safetensors").unlink()
    assert [file.name for file in (folder / "merged").glob("*.safetensors")] == ["model.safetensors"]
    merged, by_peft = AutoModelForCausalLM.from_pretrained(folder / "merged"), trained.merge_and_unload().state_dict()
    assert loss_at(merged, data, STEPS).item() == pytest.approx(expected[-1], abs=1e-5)
    for name, weight in merged.state_dict().items():
        assert (weight - by_peft[name]).abs().max() < 1e-4, name


@pytest.mark.compat
def test_rank_stabilized_adapters_with_two_learning_rates_train_as_by_peft(folder: Path) -> None:
    data = pickle.loads((folder / "data.pkl").read_bytes())["input_ids"]
    expected, trained = peft_losses(folder / "model", data, 4.0, use_rslora=True, target_modules=PATTERN)
    assert losses(folder, "options") == pytest.approx(expected[:-1], abs=1e-5)
    one_rate, _ = peft_losses(folder / "model", data, use_rslora=True, target_modules=PATTERN)
    assert abs(one_rate[-1] - expected[-1]) > 1e-4
    checkpoint = folder / "options" / f"checkpoint-{STEPS}"
    saved = load_file(checkpoint / WEIGHTS)
    adapted = {n.partition(".layers.")[2].partition(".lora_")[0] for n in saved}
    assert adapted == {"1.self_attn.q_proj", "1.mlp.down_proj"}
    by_peft, merged = trained.merge_and_unload().state_dict(), merges(checkpoint, folder / "merged-options")
    for name, weight in AutoModelForCausalLM.from_pretrained(merged).state_dict().items():
        assert (weight - by_peft[name]).abs().max() < 1e-4, name


def test_a_resumed_run_of_adapters_equals_one_that_never_stopped(folder: Path) -> None:
    assert losses(folder, "parts") == losses(folder, "whole")
    files = [load_file(folder / run / f"checkpoint-{STEPS}" / WEIGHTS) for run in ("parts", "whole")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[1])
    state = dcp.FileSystemReader(folder / "whole" / f"checkpoint-{STEPS}" / "state").read_metadata()
    assert all(".lora_" in name for name in state.state_dict_metadata), "the model's own weights are not saved again"


def test_the_models_own_weights_are_frozen_in_the_dtype_that_computes(folder: Path) -> None:
    for name, held in json.loads((folder / "seen.json").read_text()).items():
        assert held == ("torch.float32 True" if ".lora_" in name else "torch.bfloat16 False"), name
    count = 2 * 4 * ((32 + 32) + (32 + 16) + (48 + 32))
    assert count_adapter_parameters(LORA, CONFIG) == count
    assert f"{count:,} trainable parameters" in (folder / "said.txt").read_text()
    own = 2 * model_flops(CONFIG, 8, 1) - model_flops(CONFIG, 8, 1, 1) + 6 * 8  # a third less on each weight of its own
    assert own - model_flops(CONFIG, 8, 1) == 2 * 8 * sum(
        p.numel() for n, p in LlamaForCausalLM(CONFIG).named_parameters() if "proj" in n or "lm_head" in n
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--lora_alpha 8", "--lora_alpha 8 needs adapters; add --lora_rank"),
        ("--lora_rank 0", "--lora_rank 0: give at least 1"),
        ("--lora_rank 4 --deepspeed zero3.json", "does not run under --deepspeed"),
        ("--lora_rank 4 --bf16 --fp8 rowwise", "both replace the linear layers"),
        ("--lora_rank 4000", "--lora_rank 4000 exceeds"),
        ("--lora_rank 4 --lora_target_modules ,", "--lora_target_modules is empty; choose from"),
        ("--use_rslora True", "--use_rslora True needs adapters; add --lora_rank"),
        ("--lora_rank 4 --loraplus_lr_ratio 0", "--loraplus_lr_ratio 0.0: give a number above 0"),
        ("--lora_rank 4 --lora_target_modules (", "--lora_target_modules ( is no regular expression (missing )"),
        ("--lora_rank 4 --lora_target_modules q_proj|v_proj", "matches no linear of the layers; it has to match whole"),
        ("--lora_rank 4 --lora_target_modules .*_proj|lm_head", "matches lm_head, which is not a linear of the mod"),
        ("--lora_rank 4 --lora_target_modules q_proj,lm_head", "lm_head is not a linear of the model's layers; choose"),
    ],
)
def test_impossible_adapter_flags_are_refused(flags: str, line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        words = f"--model_name_or_path x --data_path x --output_dir x {flags}"
        adapters.lora_from_config(parse(words.split(), "train"), CONFIG)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_adapter_starts_a_run_of_the_same_scale(tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True}  # a scale of 4
    (tmp_path / adapter_files.CONFIG).write_text(json.dumps(settings))
    adapter_files.check_start(tmp_path, LORA)
    adapter_files.check_start(tmp_path, adapters.Lora(4, 8.0, LORA.targets, rank_stabilized=True))
    with pytest.raises(ValueError, match="has use_rslora True, not False; give --use_rslora True"):
        adapter_files.check_start(tmp_path, adapters.Lora(4, 8.0, LORA.targets))
    with pytest.raises(ValueError, match="has lora_alpha 8, not 9; give --lora_alpha 8"):
        adapter_files.check_start(tmp_path, adapters.Lora(4, 9.0, LORA.targets, rank_stabilized=True))


def test_a_run_warns_of_an_adapter_of_another_base(folder: Path, tmp_path: Path) -> None:
    far = folder / "far" / "checkpoint-1"
    merges(far, tmp_path / "far")

    def notes(adapter: Path, model: Path, more: str = "", packed: PackedBase | None = None) -> list[str]:
        words = f"--data_path x --output_dir x {FLAGS} {more} --lora_adapter {adapter} --model_name_or_path {model}"
        config = parse(shlex.split(words), "train")
        rope = apply_rope(AutoConfig.from_pretrained(model), config.rope_theta, config.rope_scaling, LENGTH)
        return list(start_notes(adapter, config, rope, packed))

    whole, model = folder / "whole" / f"checkpoint-{STEPS}", folder / "model"
    assert notes(whole, model) == notes(far, model, FAR) == []
    assert notes(far, tmp_path / "far") == [
        f"warning: the adapter in {far} was trained on {model} and continues on {tmp_path}/far"
    ]
    (line,) = notes(far, model)
    assert line.startswith(f"warning: --lora_adapter {far} was trained with rope_parameters {{") and "'yarn'" in line
    (line,) = notes(whole, model, FAR)
    assert "was trained with rope_parameters the base model's, but this run has {" in line
    (line,) = notes(whole, model, packed=PackedBase(False, "float32"))
    assert "was trained with base weights in 16 or 32 bits, but this run has NF4" in line


def test_a_run_that_would_save_adapters_of_lost_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    model = "--model_name_or_path tiny-llama3 --random_init --lora_rank 4 --model_max_length 64"
    (refused,) = forked.World(
        1, f"-m lightseq train {model} --data_path {folder}/data.pkl --output_dir x", tmp_path
    ).end()
    assert refused.returncode == 2 and "the weights of --random_init would be lost" in refused.stderr


@pytest.mark.parametrize("bias", [False, True])
def test_an_adapter_computes_as_in_peft_and_its_part_is_not_rounded_away(bias: bool) -> None:
    """In bfloat16 a part of 0.03% is far below the step between two numbers; over many tokens it is there."""
    torch.manual_seed(0)
    layer = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(64, 96, bias=bias)})
    peft.inject_adapter_in_model(peft.LoraConfig(r=8, lora_alpha=4, target_modules=["q_proj"]), layer)
    linear, x = layer["q_proj"], torch.randn(4, 128, 64, dtype=torch.bfloat16)
    linear.bfloat16()
    torch.nn.init.normal_(linear.lora_A["default"].weight, std=1.0)
    torch.nn.init.normal_(linear.lora_B["default"].weight, std=2e-5)
    plain, of_peft = linear.base_layer(x), linear.double()(x.double())
    linear.__class__ = adapters._rounded_once(type(linear))
    torch.testing.assert_close(linear(x.double()), of_peft, rtol=1e-12, atol=1e-12)
    wanted = (inputs := x.double().requires_grad_(), *linear.requires_grad_().parameters())
    dout = torch.randn_like(of_peft)
    found_grads = torch.autograd.grad(linear(inputs), wanted, dout)
    of_peft_grads = torch.autograd.grad(type(linear).__mro__[1].forward(linear, inputs), wanted, dout)
    torch.testing.assert_close(found_grads, of_peft_grads, rtol=1e-11, atol=1e-11)
    part = (of_peft - linear.base_layer(x.double())).flatten()
    found = (linear.bfloat16()(x).double() - plain.double()).flatten()
    assert (found @ part / (part @ part)).item() == pytest.approx(1, abs=0.15)


def test_every_linear_of_the_layers_gets_an_adapter_of_twice_the_scale_by_default() -> None:
    lora = adapters.lora_from_config(TrainConfig("x", data_path="x", output_dir="x", lora_rank=8), CONFIG)
    names = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    assert lora == adapters.Lora(8, 16.0, tuple(names.split())) and lora.scale == 2


def test_an_adapter_is_merged_only_with_a_matching_model(folder: Path) -> None:
    other = LlamaForCausalLM(LlamaConfig(**CONFIG.to_dict() | {"hidden_size": 16, "head_dim": 4}))
    other.save_pretrained(folder / "other")
    checkpoint = str(folder / "whole" / f"checkpoint-{STEPS}")
    words = ["merge", "--output_dir", str(folder / "nothing"), "--adapter"]
    said = refusal(lightseq, *words, checkpoint, "--model_name_or_path", folder / "other")
    assert "but the adapter's is [" in said
    assert "has no adapter_config.json" in refusal(lightseq, *words, folder / "model")


def flip(path: Path) -> None:
    """One bit, of the last tensor."""
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def test_an_evaluation_of_damaged_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "far-all" / "checkpoint-1", tmp_path / "model")
    words = f"evaluate --model_name_or_path {tmp_path}/model --data_path {folder}/data.pkl --model_max_length {LENGTH}"
    (done,) = forked.World(1, f"-m lightseq {words} --output_dir {tmp_path}/before", tmp_path).end()
    assert done.returncode == 0, done.stderr
    flip(tmp_path / "model" / "model.safetensors")
    (done,) = forked.World(1, f"-m lightseq {words} --output_dir {tmp_path}/after", tmp_path).end()
    assert done.returncode == 2
    assert "model is damaged: the SHA-256 of model.safetensors differs" in done.stderr


def test_saved_weights_have_default_permissions(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    adapter = folder / "whole" / f"checkpoint-{STEPS}"
    merge(adapter, tmp_path / "merged", None)
    for directory in (adapter, folder / "far-all" / "checkpoint-1", tmp_path / "merged"):
        (weights,) = directory.glob("*.safetensors")
        assert weights.stat().st_mode == (tmp_path / "new").stat().st_mode, weights


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda a, b: flip(a / WEIGHTS), "a is damaged: the SHA-256 of adapter_model.safetensors differs"),
        (lambda a, b: (a / WEIGHTS).unlink(), "a/adapter_model.safetensors cannot be read (No such file"),
        (lambda a, b: save_file({}, a / WEIGHTS), "a/adapter_model.safetensors has no LoRA tensors"),
        (lambda a, b: save_file({"x.lora_A.weight": torch.ones(2, 2)}, a / WEIGHTS), "s: x.lora_B.weight is missing"),
        (
            lambda a, b: save_file(load_file(a / WEIGHTS) | {"a.lora_embedding_A": torch.ones(2)}, a / WEIGHTS),
            "a/adapter_model.safetensors: a.lora_embedding_A does not belong to a linear layer",
        ),
        (lambda a, b: halve(a / adapter_files.CONFIG), "a/adapter_config.json cannot be read ("),
        (lambda a, b: (a / adapter_files.CONFIG).write_text("[]"), "a/adapter_config.json is not a JSON object"),
        (lambda a, b: (a / adapter_files.CONFIG).write_text('{"lora_alpha": 8}'), "a/adapter_config.json: r is None"),
        (lambda a, b: (a / adapter_files.ROPE_FILE).write_text("{"), "a/adapter_rope.json cannot be read ("),
        (lambda a, b: halve(b / "model-00002-of-00003.safetensors"), "model-00002-of-00003.safetensors cannot be read"),
        (lambda a, b: narrow(b / "model-00003-of-00003.safetensors"), "but the adapter's is ["),
    ],
)
def test_damaged_files_are_named_and_no_partial_model_is_left(
    folder: Path, tmp_path: Path, damage: Callable[[Path, Path], None], line: str
) -> None:
    adapter, base = tmp_path / "a", tmp_path / "b"
    shutil.copytree(folder / "far" / "checkpoint-1", adapter)
    AutoModelForCausalLM.from_pretrained(folder / "model").save_pretrained(base, max_shard_size="30KB")
    assert len(list(base.glob("*.safetensors"))) == 3
    config = json.loads((adapter / adapter_files.CONFIG).read_text())
    (adapter / adapter_files.CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    damage(adapter, base)
    said = refusal(lightseq, "merge", "--adapter", adapter, "--output_dir", tmp_path / "merged")
    assert said.startswith("error: ") and line in said
    assert not (tmp_path / "merged").exists()


def narrow(path: Path) -> None:
    """Every matrix a column less."""
    save_file({n: x[:, 1:].contiguous() if x.ndim == 2 else x for n, x in load_file(path).items()}, path)


def test_a_merged_model_has_the_rope_that_its_adapter_was_trained_with(folder: Path) -> None:
    older = folder / "older"  # its config.json as transformers 4 wrote it
    shutil.copytree(folder / "model", older)
    facts = json.loads((older / "config.json").read_text())
    theta = facts.pop("rope_parameters")["rope_theta"]
    linear = {"rope_theta": theta, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (older / "config.json").write_text(json.dumps(facts | linear))
    trained = AutoConfig.from_pretrained(folder / "far-all" / "checkpoint-1")
    assert trained.rope_parameters["rope_type"] == "yarn" and trained.max_position_embeddings == 256
    for base in (folder / "model", older):
        words = ["--model_name_or_path", str(base)]
        found = AutoConfig.from_pretrained(
            merges(folder / "far" / "checkpoint-1", folder / f"far-merged-{base.name}", *words)
        )
        assert found.rope_parameters == trained.rope_parameters
        assert found.max_position_embeddings == trained.max_position_embeddings


def test_a_run_that_leaves_rope_alone_leaves_the_config_as_it_was(folder: Path) -> None:
    (folder / "model" / MANIFEST).write_text("{}")  # as that of a checkpoint has
    merges(folder / "whole" / f"checkpoint-{STEPS}", folder / "same")
    (folder / "model" / MANIFEST).unlink()
    assert not (folder / "same" / MANIFEST).exists(), "it lists the files of another directory"
    assert (folder / "same" / "config.json").read_bytes() == (folder / "model" / "config.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["attention", "none", "full"])
def test_layers_with_adapters_compile_alike_and_give_the_same_gradients(policy: str) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=3,
        vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaModel(config)
    adapters.add_adapters(model, adapters.Lora(3, 6.0, ("q_proj", "down_proj")), torch.float32)
    for name, module in model.named_modules():
        if "lora_" in name:
            module.to_empty(device="cpu")  # they are made without memory
    trained = [parameter for _, parameter in adapters.lora_parameters(model)]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.1)  # B begins as zero, and A's gradient with it
    ids = torch.arange(20).reshape(1, 20) % 32

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(input_ids=ids, use_cache=False).last_hidden_state.square().sum(), trained)

    want = gradients()
    apply_remat(model.layers, policy, compiled=True)
    counted = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=counted)
    torch.testing.assert_close(gradients(), want, rtol=1e-4, atol=1e-5)
    assert counted.frame_count == 2, "once for the first layer, whose input wants no gradient, and once for the others"
    assert len(want) == 12 and all(g.any() for g in want)
