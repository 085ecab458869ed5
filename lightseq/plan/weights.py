"""Bytes of a model's weights as a run holds them, read from the parameters that FSDP2 shards and gathers."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightseq.config.train_config import TrainConfig
from lightseq.models.decoder import decoder_layers, float32_parameters
from lightseq.models.packed import plain_tensors
from lightseq.parts.adapters import Lora, add_adapters
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.experts import experts_modules
from lightseq.parts.packed_base import is_marked, pack_layers


@dataclass(frozen=True)
class Weights:
    """Bytes of some parameters, adapters included."""

    stored: int = 0  # bytes of the largest shard, unsharded tensors included
    gathered: int = 0  # on a rank while their unit runs, beside shards on the GPU ...
    fetched: int = 0  # ... and with shards in host memory
    trained: int = 0  # number of trained elements
    dense: int = 0  # bytes of dequantized copies, before sharding

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class HeldWeights:
    """Bytes of all parameters of a model."""

    layers: tuple[Weights, ...]  # without experts
    experts: tuple[Weights, ...]  # all experts of each layer
    ends: Weights  # embeddings, the last norm and the head

    @cached_property
    def total(self) -> Weights:
        return _sum((*self.layers, *self.experts, self.ends))


def holds_packed(model: PreTrainedConfig, config: TrainConfig) -> bool:
    """Returns whether a run holds frozen weights in fewer bits than they compute in."""
    return config.load_in_4bit or (config.lora_rank is not None and is_marked(model))


def held_weights(model: PreTrainedConfig, config: TrainConfig, lora: Lora | None, shards: int) -> HeldWeights:
    """Returns the bytes of a model's weights that FSDP2 shards over so many ranks, with adapters if there are any.

    Raises ValueError for a model whose weights the flags cannot convert.
    """
    key = type(model), repr(vars(model)), config.compute_dtype, config.load_in_4bit, lora
    if key not in _units:
        _units[key] = _units_of(model, config, lora)
    if (key, shards) not in _held:
        units = [_sum(_weights_of(*facts, shards) for facts in unit) for unit in _units[key]]
        _held[key, shards] = HeldWeights(tuple(units[:-1:2]), tuple(units[1:-1:2]), units[-1])
    return _held[key, shards]


_Parameter = tuple[nn.Parameter, torch.dtype, bool]  # with the dtype in which it is read, and whether it is sharded
_units: dict[tuple[object, ...], list[list[_Parameter]]] = {}
_held: dict[tuple[tuple[object, ...], int], HeldWeights] = {}


def _units_of(model_config: PreTrainedConfig, config: TrainConfig, lora: Lora | None) -> list[list[_Parameter]]:
    """Returns the parameters of each layer, without its experts and of its experts, and at the end all others."""
    dtype, model = getattr(torch, config.compute_dtype), build_to_train(model_config)
    add_adapters(model, lora, dtype)
    if holds_packed(model_config, config):
        pack_layers(model)
    in_float32 = float32_parameters(model) if dtype is not torch.float32 else ()
    whole = {id(model.get_parameter(name)) for name in in_float32}
    left, units = {id(x): x for x in model.parameters()}, list[list[_Parameter]]()

    def take(parameters: Iterable[nn.Parameter]) -> None:
        found = [x for x in parameters if left.pop(id(x), None) is not None]
        units.append([(x, dtype, id(x) not in whole) for x in found])

    for layer in decoder_layers(model):
        of_experts = [x for _, module in experts_modules(layer) for x in module.parameters(recurse=False)]
        ids = {id(x) for x in of_experts}
        take(x for x in layer.parameters() if id(x) not in ids)
        take(of_experts)
    take([*left.values()])
    return units


def _weights_of(parameter: nn.Parameter, dtype: torch.dtype, is_sharded: bool, shards: int) -> Weights:
    weight: Any = parameter.detach()
    trained = parameter.numel() * parameter.requires_grad
    if not is_sharded or not weight.numel():
        return Weights(stored=weight.nbytes, trained=trained)
    rows = -(-len(weight) // shards)
    if not hasattr(weight, "fsdp_pre_all_gather"):
        elements = rows * weight[0].numel()
        gathered = shards * elements * dtype.itemsize
        return Weights(elements * weight.itemsize, gathered, gathered, trained)
    shard = weight[:rows]
    sent, _ = shard.fsdp_pre_all_gather(SimpleNamespace(size=lambda: shards))
    return Weights(
        stored=(stored := _bytes(plain_tensors(shard))),
        gathered=(gathered := shards * _bytes(sent)),
        fetched=max(gathered, stored),  # one rank gathers nothing, and needs a copy of its shard
        trained=trained,
        dense=weight.numel() * dtype.itemsize,
    )


def _sum(parts: Iterable[Weights]) -> Weights:
    return sum(parts, Weights())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)
