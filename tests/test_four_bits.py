"""Adapters on weights in four bits train as peft with bitsandbytes does on one process, and are saved and resumed."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import slow_except
from programs import Ended, program
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from worlds import spawn

from benchmarks.tiny_models import tiny_config
from lightseq.data.batches import permutation
from lightseq.distributed.parallel_dims import local_part
from lightseq.models.nf4 import Nf4Weight
from lightseq.parts import adapters
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.four_bits import check_four_bits, quantize_layers
from lightseq.training import loop
from lightseq.training.metrics import read_records

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

LENGTH, VOCABULARY, STEPS = 43, 64, 3
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False,
)  # fmt: skip
FLAGS = "--load_in_4bit True --lora_rank 4 --lora_alpha 16"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bits")
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "model")
    data = np.random.default_rng(3).integers(3, VOCABULARY, (STEPS + 1, LENGTH)).tolist()
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": data}))
    return folder


def flags(folder: Path, output: str) -> str:
    return (
        f"--model_name_or_path {folder}/model --data_path {folder}/data.pkl --model_max_length {LENGTH} "
        f"--optim sgd --learning_rate 1 --lr_scheduler_type constant --output_dir {folder}/{output} {FLAGS}"
    )


def programs(rank: int, runs: list[str]) -> list[tuple[Ended, dict[str, str]]]:
    """Returns how each run ended, and the class of its parameters' memory."""
    ends, seen = [], dict[str, str]()
    run = loop.TrainingLoop.run

    def looked(self: loop.TrainingLoop) -> None:
        parameters = self.trainer.model.named_parameters()
        seen.update({n: type(local_part(p.detach())).__name__ for n, p in parameters})
        run(self)

    loop.TrainingLoop.run = looked  # type: ignore[method-assign]
    for words in runs:
        seen.clear()
        ends.append((program(rank, "any", words), dict(seen)))
    loop.TrainingLoop.run = run  # type: ignore[method-assign]
    return ends


def reference(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses and last adapters of peft with bitsandbytes; the adapters begin as ours do."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=config, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=list(LINEARS), task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    with torch.no_grad():
        adapters.initialize(model.base_model.model, 42)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    data, losses = pickle.loads((folder / "data.pkl").read_bytes())["input_ids"], []
    for step in range(STEPS):
        ids = torch.tensor([data[permutation(len(data), 42, 0)[step]]])
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_runs_train_as_peft_with_bitsandbytes_does(folder: Path, world: int) -> None:
    output = f"on-{world}"
    runs = [flags(folder, output), f"{flags(folder, f'{output}-host')} --offload both"]
    ((end, seen), (on_host, _)), *_ = spawn(world, programs, [f"{run} --max_steps {STEPS}" for run in runs])
    assert end.status == 0 and on_host.status == 0, end.err + on_host.err
    in_bits = {name.split(".")[-3] for name, kind in seen.items() if kind == Nf4Weight.__name__}
    assert in_bits == set(LINEARS) and sum(kind == Nf4Weight.__name__ for kind in seen.values()) == 14
    losses, trained = reference(folder)  # after steps of SGD, the adapters differ from the first ones by gradients
    torch.testing.assert_close(losses_of(folder / output), losses, atol=1e-5, rtol=1e-5)
    saved, same = (
        load_file(folder / name / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
        for name in (output, f"{output}-host")
    )
    assert all(x.equal(same[name]) for name, x in saved.items())
    for name, x in trained.items():
        ours = saved[name.replace(".default", "")]
        torch.testing.assert_close(ours, x, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--lora_rank None", "--load_in_4bit True needs adapters; add --lora_rank"),
    ],
)
def test_what_four_bits_do_not_support_is_refused(folder: Path, words: str, why: str) -> None:
    given = flags(folder, "refused")
    given = given.replace("--lora_rank 4 --lora_alpha 16", "") if "lora_rank" in words else f"{given} {words}"
    (((end, _),),) = spawn(1, programs, [given])
    assert end.status == 2 and why in end.err, end.err


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
}


@pytest.mark.parametrize(
    ("family", "world"), slow_except([("qwen3_moe", 2)], [("qwen3_moe", 2), ("qwen3_moe", 3), ("gpt_oss", 2)])
)
def test_experts_in_four_bits_train_as_the_same_numbers_in_32_do(family: str, world: int, tmp_path: Path) -> None:
    config = type(tiny_config(family))(**(tiny_config(family).to_dict() | {"hidden_size": 64} | EXPERTS[family]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    quantize_layers(model.requires_grad_(False))
    numbers = {name: x for name, x in model.named_parameters() if isinstance(x, Nf4Weight)}
    assert any("experts" in name for name in numbers)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, x in numbers.items():
        dense.get_parameter(name).data.copy_(x.dense())
    dense.save_pretrained(tmp_path / "dense")
    data = np.random.default_rng(3).integers(3, config.vocab_size, (STEPS + 1, LENGTH)).tolist()
    (tmp_path / "data.pkl").write_bytes(pickle.dumps({"input_ids": data}))
    targets = "--lora_target_parameters mlp.experts.gate_up_proj,mlp.experts.down_proj"
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
    quantize_layers(model)
    for name, x in model.named_parameters():
        if isinstance(x, Nf4Weight):
            assert x.dense().equal(Nf4Weight.quantize(before[name]).dense())
        else:
            assert x.equal(before[name]) and name.split(".")[-2] not in LINEARS
    assert model(input_ids=torch.arange(9)[None]).logits.isfinite().all()
