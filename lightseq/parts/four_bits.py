"""Frozen linears and stacked experts of a model's decoder layers in four bits, as QLoRA has them (arXiv 2305.14314)."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

from lightseq.models.bnb4 import FourBitSlice
from lightseq.models.decoder import decoder_layers, float32_parameters, module_name
from lightseq.models.nf4 import Nf4Weight
from lightseq.models.nf4_bytes import BLOCK
from lightseq.models.published_layout import layout_of_files
from lightseq.models.weight_files import open_tensors, tensor_files
from lightseq.models.weights import LORA_INFIX, base_parameters, without_wrappers
from lightseq.parts.experts import experts_modules, names_of_products, parameters_of_experts
from lightseq.parts.identity import linear_change
from lightseq.parts.routers import router_parts

FLAG: Final = "--load_in_4bit True"


@dataclass(frozen=True)
class FourBits:
    """Form of a run's base weights in four bits."""

    in_files: bool  # as the model's files have them; else they are quantized on loading
    dtype: str  # of the products, in which the weights are quantized on loading


@dataclass(frozen=True)
class BaseWeight:
    """Frozen weight of a product in the decoder layers."""

    module: nn.Module
    module_name: str
    attribute: str

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}"

    @property
    def parameter(self) -> nn.Parameter:
        found: nn.Parameter = getattr(self.module, self.attribute)
        return found


def quantize_layers(model: PreTrainedModel, stored_in: Path | None = None) -> None:
    """Puts the frozen linears and experts of the decoder layers in four bits, one weight at a time.

    Weights on the meta device are quantized when they are loaded (`weights.fill`). Embeddings, the head, norms, routers
    and adapters keep their dtype. Raises ValueError for a layer with other matrices, which would keep theirs unasked.
    If files have weights in four bits, `stored_in` is their directory, and only the linears that they have so change.
    """
    if stored_in is None:
        check_four_bits(model)
        doubles = dict.fromkeys((weight.name for weight in weights_to_quantize(model)), True)
    else:
        check_package(f"{stored_in} in four bits")
        doubles = _stored_linears(model, stored_in)
    for found in base_weights(model):
        if found.name not in doubles:
            continue
        weight = found.parameter
        if weight.is_meta:
            quantized = Nf4Weight.empty(weight.shape, weight.dtype, weight.device, doubles[found.name])
        else:
            quantized = Nf4Weight.quantize(weight.detach())
        setattr(found.module, found.attribute, nn.Parameter(quantized, requires_grad=False))


def round_to_four_bits(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives the weights that a run in a dtype quantizes the values that it had, as dense weights in their own dtype."""
    for weight in weights_to_quantize(model):
        x = weight.parameter.data
        x.copy_(Nf4Weight.quantize(x.to(dtype)).dense())


def _stored_linears(model: PreTrainedModel, directory: Path) -> dict[str, bool]:
    """Returns the names of linears' weights that files have in four bits, and whether with double quantization.

    Raises ValueError for other weights of the decoder layers in four bits, which would take their size in 16 bits.
    """
    files = tensor_files(directory, "save the model as safetensors")
    layout = layout_of_files(model, base_parameters(model), files)
    by_name = {
        without_wrappers(weight.name): weight for weight in base_weights(model) if isinstance(weight.module, nn.Linear)
    }
    inside = f"{module_name(model, decoder_layers(model))}."
    found: dict[str, bool] = {}
    with open_tensors(files) as stored:
        for name, conversion in layout.converted.items():
            for _, source in conversion.sources:
                if isinstance(stored(source), FourBitSlice):
                    raise ValueError(
                        f"{directory}: {source} is in four bits, but belongs to {name}, which is no linear's weight; "
                        "give a version in 16 bits"
                    )
        for name, source in layout.renamed.items():
            if not isinstance(tensor := stored(source), FourBitSlice) or not name.startswith(inside):
                continue  # embeddings and the head are read as dense ones
            change = linear_change(by_name[name].module) if name in by_name else "is no linear's weight"
            if change is not None:
                raise ValueError(f"{directory}: {name} is in four bits, but {change}; give a version in 16 bits")
            found[by_name[name].name] = tensor.is_double
    return found


def check_package(what: str) -> None:
    """Raises ValueError without bitsandbytes, which `what` needs."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"{what} needs bitsandbytes, which is not installed; pip install bitsandbytes")


def check_four_bits(model: PreTrainedModel) -> None:
    """Raises ValueError unless every matrix of the decoder layers can be in four bits."""
    check_package(FLAG)
    layers, class_name = decoder_layers(model), type(model).__name__
    known = {id(parameter) for parameter in parameters_of_experts(layers)}  # routers among them
    for weight in weights_to_quantize(model):
        known.add(id(weight.parameter))
        if isinstance(weight.module, nn.Linear) and (change := linear_change(weight.module)) is not None:
            raise ValueError(f"{FLAG}: {weight.module_name} {change}; leave it out")
        if (elements := weight.parameter.shape[-1]) % BLOCK:
            raise ValueError(
                f"{FLAG}: rows of {without_wrappers(weight.name)} have {elements} elements, not a multiple of {BLOCK}; "
                "leave it out"
            )
    for where, module in layers.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_matrix = parameter.ndim > 1 and LORA_INFIX not in f".{where}.{name}"
            if is_matrix and id(parameter) not in known and not isinstance(module, nn.Linear | nn.Conv1d):
                raise ValueError(
                    f"{FLAG}: {where}.{name} of {class_name} is no linear's weight, and would keep 16 or 32 bits; "
                    "leave it out"
                )


def weights_to_quantize(model: PreTrainedModel) -> Iterator[BaseWeight]:
    """Yields the weights that `--load_in_4bit True` quantizes: the base weights without those of routers."""
    of_routers = {id(module) for module in router_parts(model)}
    return (weight for weight in base_weights(model) if id(weight.module) not in of_routers)


def base_weights(model: PreTrainedModel) -> Iterator[BaseWeight]:
    """Yields the weights of linears and experts in the decoder layers.

    Adapters, and weights that compute in float32, are left out.
    """
    layers, in_float32 = decoder_layers(model), float32_parameters(model)
    prefix = module_name(model, layers)
    experts = {id(module) for _, module in experts_modules(layers)}
    for name, module in layers.named_modules():
        where, attributes = f"{prefix}.{name}", list[str]()
        if isinstance(module, nn.Linear) and LORA_INFIX not in where:
            attributes = ["weight"]
        elif id(module) in experts:
            attributes = [*names_of_products(module)]
        yield from (BaseWeight(module, where, x) for x in attributes if f"{where}.{x}" not in in_float32)
