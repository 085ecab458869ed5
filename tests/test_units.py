"""Units of a model: every parameter is in one, and each unit has the mesh and the policy that it asks for."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import LlamaConfig

from lightseq.config.train_config import TrainConfig
from lightseq.distributed.parallel_dims import parallel_dims
from lightseq.distributed.world import World
from lightseq.memory.recomputation import MemorySettings
from lightseq.models.decoder import decoder_layers, final_norm
from lightseq.parallelize import Unit, layer_groups, units
from lightseq.parts.chosen_experts import build_to_train

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attention_bias": True,
}  # fmt: skip


def flags(**more: Any) -> TrainConfig:
    return TrainConfig(model_name_or_path="m", data_path="d", output_dir="o", **more)


def built(tied: bool, memory: MemorySettings, **more: Any) -> tuple[Any, list[Unit]]:
    model = build_to_train(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    world = World(dist.get_rank(), dist.get_world_size(), 0, 1, torch.device("cpu"))
    return model, units(model, flags(**more), parallel_dims(world), memory)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_every_parameter_is_in_one_unit(alone: None, tied: bool, size: int) -> None:
    model, parts = built(tied, MemorySettings(), layers_per_checkpoint=size, remat="full")
    assert [unit.kind for unit in parts if unit.kind != "layers"] == (["root"] if tied else ["end", "end", "root"])
    found = [id(p) for unit in parts for module in unit.modules for p in module.parameters()]
    assert sorted(found) == sorted(map(id, model.parameters()))
    assert [layer for group in layer_groups(parts) for layer in group] == list(decoder_layers(model))
    assert max(len(group) for group in layer_groups(parts)) == min(size, 5)
    assert final_norm(model) in parts[-1].modules


def test_the_first_layers_may_stay_on_the_gpu_while_all_else_is_on_the_host(alone: None) -> None:
    memory = MemorySettings(state_on_host=True, layers_with_state_on_gpu=3)
    _, parts = built(False, memory, layers_per_checkpoint=2, remat="full")
    assert [unit.state_on_host for unit in parts] == [True, False, False, True, True, True]
    assert isinstance(parts[0].policy.offload, CPUOffloadPolicy)


def test_only_layers_stay_gathered_for_the_backward_pass(alone: None) -> None:
    _, parts = built(False, MemorySettings(reshard_after_forward=False))
    reshards = {unit.kind: unit.policy.reshard_after_forward for unit in parts}
    assert reshards == {"end": None, "layers": False, "root": None}
    assert [unit.kind for unit in parts if not unit.policy.unshard_in_backward] == ["end", "end"]
