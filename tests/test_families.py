"""Tiny checkpoints of many families on 1 to 4 ranks against plain transformers, with one start of processes for each.

A family trains plain and packed; then from its published files: the first loss, a resumed run, adapters, and the saved
checkpoint in plain transformers.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedModel
from worlds import spawn

from benchmarks import architectures
from benchmarks.architectures import compare_loop, compare_training
from benchmarks.tiny_models import ids, plain_model, tiny_config
from lightseq.cli import BOTH
from lightseq.models import weight_files
from lightseq.models.build import model_class
from lightseq.models.decoder import with_head
from lightseq.training.train import train

LOSS_ERROR = 1e-5
# Model types of transformers, and what differs from their tiny config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Qwen 3": ("qwen3", {}),
    "Phi 3: fused projections": ("phi3", {}),
    "Granite: scaled logits": ("granite", {}),
    "Cohere 2: windows, layers without RoPE, norms beside": ("cohere2", {}),
    "Gemma 2: windows, capped scores and logits": ("gemma2", {}),
    "Gemma 3: windows, inside a composite": ("gemma3", {}),
    "Mistral 3: inside a composite": ("mistral3", {}),
    "Qwen 3 VL: inside a composite": ("qwen3_vl", {}),
    "InternVL: inside a composite": ("internvl", {}),
    "GPT-NeoX: attention beside the MLP": ("gpt_neox", {}),
    "OPT: learned positions": ("opt", {}),
    "Gemma 4 E: heads of two sizes, shared keys, embeddings per layer": ("gemma4_text", {}),
    "Gemma 4 dense: heads of two sizes, values made of keys": (
        "gemma4_text",
        {
            "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "Gemma 4: inside a composite": ("gemma4", {}),
    "Gemma 3n: shared keys": ("gemma3n_text", {}),
    "Llama 4: chunks, temperature by position, experts with scores on their inputs": ("llama4_text", {}),
    "Llama 4: inside a composite": ("llama4", {}),
    "Youtu: latent attention": ("youtu", {}),
    "MiniCPM 3: latent attention": ("minicpm3", {}),
    "Qwen 3 MoE: experts": ("qwen3_moe", {}),
    "Mixtral: experts": ("mixtral", {}),
    "gpt-oss: experts with biases, sinks": ("gpt_oss", {}),
    "OLMoE: experts": ("olmoe", {}),
    "GLM 4 MoE: shared experts, router in float32": ("glm4_moe", {}),
    "DeepSeek V3: groups of experts": ("deepseek_v3", {}),
    "Granite MoE: experts": ("granitemoe", {}),
    "MiniMax M2: experts": ("minimax_m2", {}),
    "ERNIE 4.5: experts": ("ernie4_5_moe", {}),
    "Qwen 3.5: gated delta rule": ("qwen3_5_text", {}),
    "Qwen 3.5: gated delta rule, inside a composite": ("qwen3_5", {}),
    "Qwen 3.5 MoE: gated delta rule, experts": ("qwen3_5_moe_text", {}),
    "Qwen 3 Next: gated delta rule, experts": ("qwen3_next", {}),
    "Kimi Linear: delta rule by channel, latent attention, experts": ("kimi_linear", {}),
    "OLMo Hybrid: gated delta rule": ("olmo_hybrid", {}),
    "Granite 4 H: Mamba 2, experts": ("granitemoehybrid", {}),
    "Nemotron H: Mamba 2, layers of experts alone": ("nemotron_h", {}),
    "Falcon H1: Mamba 2 beside attention": ("falcon_h1", {}),
    "Bamba: Mamba 2": ("bamba", {}),
    "LFM 2: short convolutions": ("lfm2", {}),
    "LFM 2 MoE: short convolutions, experts": ("lfm2_moe", {}),
}  # fmt: skip
OWN_CODE_FAILS = ("Llama 4: inside a composite",)  # in transformers, on text
FLAGS = "--max_steps 3 --save_strategy steps --save_steps 1 --learning_rate 1e-2 --lr_scheduler_type constant"


def folder_of(name: str) -> str:
    return name.replace(":", "").replace(",", "").replace(" ", "-")


def publish(name: str, folder: Path) -> PreTrainedModel:
    """Saves a tiny model as published: by a model that was loaded, because a new one's names may differ."""
    model_type, changes = FAMILIES[name]
    new = plain_model(tiny_config(model_type, **changes))
    new.save_pretrained(folder / "new")
    model: PreTrainedModel = type(new).from_pretrained(folder / "new", attn_implementation="eager").eval()
    model.save_pretrained(folder / "published")
    return model


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def _families(rank: int, folder: Path, names: list[str], ports: list[int], losses: dict[str, float]) -> dict[str, str]:
    """Trains every family, those with a loss also from files, and returns what is wrong, by name."""
    architectures.LOSS_ERROR = LOSS_ERROR
    wrong: dict[str, str] = {}
    for name in names:
        model_type, changes = FAMILIES[name]
        config = tiny_config(model_type, **changes)
        ways = {
            "plain": partial(compare_training, packed=False),
            "packed": partial(compare_training, packed=True),
        }
        if name not in OWN_CODE_FAILS:
            ways["loop, checkpointed"] = partial(compare_loop, packed=False, checkpointed=True)
        for way, compare in ways.items():
            try:
                compare(config)
            except (AssertionError, ValueError) as error:
                wrong[f"{name}, {way}"] = str(error)
    dist.destroy_process_group()
    ports = [*ports]

    def run(name: str, *flags: str) -> None:
        os.environ["MASTER_PORT"] = str(ports.pop())
        data = ["--data_path", str(folder / "rows.jsonl"), "--model_max_length", str(ids().shape[1]), *FLAGS.split()]
        model = ["--model_name_or_path", str(folder / folder_of(name) / "published")]
        train(BOTH, [*model, *data, *flags], "test")

    for name, loss in losses.items():
        out = folder / folder_of(name)
        first, again, adapters = (str(out / f"{run}-{len(ports)}") for run in ("first", "again", "adapters"))
        run(name, "--output_dir", first)
        run(name, "--output_dir", again, "--resume_from_checkpoint", f"{first}/checkpoint-2")
        run(name, "--output_dir", adapters, "--lora_rank", "2")
        if rank == 0:
            problem = _problem(out, Path(first), Path(again), Path(adapters), loss)
            wrong |= {name: problem} if problem else {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the caller ends
    return wrong


def _problem(out: Path, first: Path, again: Path, adapters: Path, loss: float) -> str | None:
    steps = steps_of(first)
    if abs(steps[0]["loss"] - loss) > LOSS_ERROR:
        return f"first loss {steps[0]['loss']}, one process has {loss}"
    if steps_of(again)[-1]["loss"] != steps[-1]["loss"]:
        return f"loss after a resume {steps_of(again)[-1]['loss']}, without {steps[-1]['loss']}"
    published, trained, resumed = (
        load_file(folder / weight_files.WEIGHTS)
        for folder in (out / "published", first / "checkpoint-3", again / "checkpoint-3")
    )
    if published.keys() != trained.keys():
        return f"other names: {sorted(published.keys() ^ trained.keys())[:4]}"
    if changed := [name for name in trained if not torch.equal(trained[name], resumed[name])]:
        return f"a resume changes {changed[:3]}"
    if not steps[-1]["loss"] < steps[0]["loss"] > steps_of(adapters)[-1]["loss"]:
        return "a loss does not fall"
    config = AutoConfig.from_pretrained(first / "checkpoint-3")
    model = model_class(config).from_pretrained(first / "checkpoint-3", attn_implementation="eager").eval()
    after = with_head(model)(input_ids=ids(), labels=ids(), use_cache=False).loss.item()
    return None if after < steps[-1]["loss"] else f"the saved model has loss {after}, the last step {steps[-1]['loss']}"


def check_families(world: int, folder: Path, names: list[str], from_files: list[str]) -> None:
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(4):
            file.write(json.dumps({"input_ids": ids()[0].tolist()}) + "\n")
    losses = {}
    for name in from_files:
        model = publish(name, folder / folder_of(name))
        with torch.no_grad():
            losses[name] = with_head(model)(input_ids=ids(), labels=ids(), use_cache=False).loss.item()
    # Every run of a process meets at a store of its own.
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(3 * len(losses))]
    found = spawn(world, _families, folder, names, [store.port for store in stores], losses)
    wrong = {name: line for of_rank in found for name, line in of_rank.items()}
    assert not wrong, "\n".join(f"{name}: {line}" for name, line in wrong.items())


def test_layers_that_differ_train_resume_and_save(tmp_path: Path) -> None:
    names = ["Nemotron H: Mamba 2, layers of experts alone"]
    check_families(2, tmp_path, names, from_files=names)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_families_equal_plain_transformers(world: int, tmp_path: Path) -> None:
    check_families(world, tmp_path, [*FAMILIES], from_files=[*FAMILIES] if world in (2, 3) else [])
