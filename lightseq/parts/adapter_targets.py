"""Weights that low-rank adapters can be attached to, by peft's names."""

import json
from collections import Counter
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from lightseq.models.build import settings_of
from lightseq.models.decoder import decoder_layers, module_name
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.experts import experts_modules, names_of_products
from lightseq.parts.identity import product_change
from lightseq.parts.routers import router_parts


@dataclass(frozen=True)
class Targets:
    """Weights of a model's layers that can get an adapter."""

    linears: Mapping[str, int]  # inputs plus outputs of each linear outside routers, by its whole name
    modules: tuple[str, ...]  # whole names of all of the model's modules
    # Inputs plus outputs of stacked experts' weights, by name in a layer, summed over experts.
    parameters: Mapping[str, int]
    taken: frozenset[str]  # names of linears that peft applies to experts or routers
    refused: frozenset[str]  # names of linears to which peft adds no adapter in this type of model


def find_targets(model_config: PreTrainedConfig) -> Targets:
    """Returns the possible targets of adapters in a model."""
    return _cached_targets(cast(Hashable, type(model_config)), settings_of(model_config))


@lru_cache(maxsize=16)  # a plan asks once per length that it tries
def _cached_targets(kind: Any, text: str) -> Targets:
    model = build_to_train(kind.from_dict(json.loads(text)))
    layers, parameters = decoder_layers(model), Counter[str]()
    for name, experts in experts_modules(layers):
        for weight in names_of_products(experts):
            count, *ends = getattr(experts, weight).shape
            parameters[f"{name.partition('.')[2]}.{weight}"] += count * sum(ends)
    prefix, of_routers = module_name(model, layers), {id(module) for module in router_parts(model)}
    linears = {
        f"{prefix}.{name}": module.in_features + module.out_features
        for name, module in layers.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in of_routers and product_change(module) is None
    }
    names = {last_part(name) for name in linears}
    return Targets(
        linears,
        modules=tuple(name for name, _ in model.named_modules() if name),
        parameters=parameters,
        taken=frozenset(name for name in names if parameters and _is_taken(model, name)),
        refused=frozenset(name for name in names if _is_refused(model, name)),
    )


def _is_taken(model: PreTrainedModel, name: str) -> bool:
    """Returns whether peft moves a target to stacked experts or a router, which were linears in transformers 4."""
    with suppress(ImportError):  # older versions of peft do not
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model, get_model_conversion_mapping(model))
        except ValueError:  # needs gate and up together
            return True
        return name not in (config.target_modules or ())
    return False


def _is_refused(model: PreTrainedModel, name: str) -> bool:
    """Returns whether peft skips a linear, such as one that a fused kernel of Mamba bypasses."""
    with suppress(ImportError):  # older versions of peft do not
        from peft import LoraConfig
        from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, name)
        except ValueError:
            return True
    return False


def last_part(name: str) -> str:
    """Returns the last part of a dotted name."""
    return name.rpartition(".")[2]


def ends_with(name: str, end: str) -> bool:
    """Returns whether a dotted name ends with the parts of another one, as peft compares targets."""
    return name == end or name.endswith(f".{end}")
