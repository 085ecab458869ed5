"""Planned bytes of weights are those that a run stores, gathers and unpacks, in four bits and in sixteen."""

import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_except
from packed_weights import bytes_of_run
from test_plan_training import planned_run
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig
from worlds import spawn

from benchmarks.tiny_models import tiny_config
from lightseq.architecture.family import preset_config
from lightseq.architecture.meta_run import layer_inputs
from lightseq.cli import BOTH, main
from lightseq.config.command_line import parse
from lightseq.models.decoder import decoder_layers
from lightseq.models.packed import PackedWeight
from lightseq.parts.adapters import add_adapters, lora_from_config
from lightseq.parts.changes import changes_of
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.mlp import tile_mlps
from lightseq.parts.packed_base import pack_layers
from lightseq.plan.breakdown import GIB
from lightseq.plan.layer_costs import Treatment, layer_table
from lightseq.plan.make_plan import can_fit, make_plan
from lightseq.plan.plan import Plan
from lightseq.plan.weights import held_weights

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
LLAMA = preset_config(BOTH, "llama3-8b")
IN_4_BITS = "--load_in_4bit True --lora_rank 16"


def parsed(flags: str) -> Any:
    return parse(f"--model_name_or_path any --data_path any --output_dir any --bf16 {flags}".split(), "train")


def plan(flags: str, gpus: int = 1, gpu: float = 1e6) -> Plan:
    return make_plan(planned_run(LLAMA, f"--bf16 --model_max_length 32K {flags}", gpus, gpu=gpu * GIB))


def mixture() -> PreTrainedConfig:
    tiny = tiny_config("qwen3_moe")
    return type(tiny)(**(tiny.to_dict() | {"hidden_size": 64, "moe_intermediate_size": 64}))


MODELS = {"llama": lambda: CONFIG, "qwen3_moe": mixture}


@pytest.mark.parametrize(("name", "world"), slow_except([("llama", 2), ("qwen3_moe", 3)], product(MODELS, (1, 2, 3))))
def test_planned_bytes_are_those_of_a_run(name: str, world: int) -> None:
    model = MODELS[name]()
    for flags, stored, gathered in spawn(world, bytes_of_runs, name)[0]:
        config = parsed(flags)
        held = held_weights(model, config, lora_from_config(config, model), world)
        layer = held.layers[0] + held.experts[0]
        assert (held.total.stored, layer.gathered) == (stored, gathered), flags


def bytes_of_runs(_rank: int, name: str) -> list[tuple[str, int, int]]:
    """Returns by flags the bytes of this rank's shards, and those that gathering the first layer adds."""
    found = list[tuple[str, int, int]]()
    for flags in (IN_4_BITS, "--lora_rank 16", "--optim sgd"):
        config, model = parsed(flags), build_to_train(MODELS[name]())
        add_adapters(model, lora_from_config(config, MODELS[name]()), torch.bfloat16)
        if config.load_in_4bit:
            pack_layers(model)
        found.append((flags, *bytes_of_run(model, config)))
    return found


@pytest.mark.parametrize("tiled", [False, True])
def test_no_more_dense_copies_are_alive_than_planned(tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, peak, dense = dict[int, int](), list[int](), PackedWeight.dense

    def counted(self: PackedWeight) -> Tensor:
        found = dense(self)
        copies[id(found)] = found.nbytes
        weakref.finalize(found, copies.pop, id(found))
        peak.append(sum(copies.values()))
        return found

    monkeypatch.setattr(PackedWeight, "dense", counted)
    config = parsed(IN_4_BITS)
    model = build_to_train(CONFIG)
    add_adapters(model, lora_from_config(config, CONFIG), torch.bfloat16)
    pack_layers(model)
    layers = decoder_layers(model)
    ((_, keywords),) = layer_inputs(model, layers[:1], 8)
    layer = layers[:1]._apply(lambda x: torch.empty_like(x, device="cpu").requires_grad_(x.requires_grad))[0]
    if tiled:
        tile_mlps([layer], changes_of(model))
        layer.mlp.tile_tokens = 4
    position = [torch.zeros(1, 8, 16, dtype=torch.bfloat16) for _ in range(2)]
    x = torch.zeros(1, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x, **keywords | {"position_embeddings": position, "attention_mask": None})
    assert not copies  # nothing that autograd saves is dense
    y.sum().backward()
    costs = layer_table(CONFIG, torch.bfloat16).costs(0, Treatment("attention", compiled=False, tiles_mlp=tiled))
    assert max(peak) == 2 * max(costs.weights_read.values()) == 2 * (3 if tiled else 1) * 64 * 192


def test_four_bits_take_a_quarter_of_the_memory_and_longer_sequences_fit() -> None:
    for gpus in (1, 2):
        narrow, wide = plan(IN_4_BITS, gpus), plan("--lora_rank 16", gpus)
        linears = narrow.run.architecture.linears
        assert wide.parts.parameters - narrow.parts.parameters == pytest.approx(1.484 * linears / gpus, rel=1e-3)
    for flags, fits in ((IN_4_BITS, True), ("--lora_rank 16", False)):
        run = f"--bf16 --model_max_length 96K --offload activations {flags}"
        assert can_fit(planned_run(LLAMA, run, 1, gpu=24 * GIB)) == fits


def test_weights_in_host_memory_leave_the_gpu_and_are_copied_in_their_own_bytes() -> None:
    for gpus in (1, 2):
        here, away = plan(IN_4_BITS, gpus), plan(f"{IN_4_BITS} --offload optimizer", gpus)
        assert away.parts.parameters == 0 and away.run.weights.total.stored == here.parts.parameters
        assert away.host_bytes - here.host_bytes >= gpus * here.parts.parameters
        copied = away.run.weights.layers[0].fetched - (gpus == 1) * here.run.weights.layers[0].gathered
        assert copied == pytest.approx(0.516 * here.run.architecture.kinds[0].linears, rel=0.03)


def test_a_model_without_whole_blocks_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    words = f"--model_name_or_path {tmp_path} --random_init --bf16 --gpus 1 --model_max_length 1K {IN_4_BITS}"
    assert main(["plan", *words.split()]) == 2
    why = "q_proj.weight have 32 elements, not a multiple of 64; leave it out"  # without peft's wrappers in the name
    assert why in capsys.readouterr().err
