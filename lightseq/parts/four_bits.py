"""Frozen linears and stacked experts of a model's decoder layers in four bits, as QLoRA has them (arXiv 2305.14314)."""

from collections.abc import Iterator
from importlib.util import find_spec

from torch import nn
from transformers import PreTrainedModel

from lightseq.models.decoder import decoder_layers, float32_parameters, module_name
from lightseq.models.nf4 import BLOCK, Nf4Weight
from lightseq.models.weights import LORA_INFIX
from lightseq.parts.experts import experts_modules, parameters_of_experts
from lightseq.parts.identity import linear_change

FLAG = "--load_in_4bit True"
PRODUCTS_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")  # attributes of stacked experts, if they have them


def quantize_layers(model: PreTrainedModel) -> None:
    """Puts the frozen linears and experts of the decoder layers in four bits, one weight at a time.

    Weights on the meta device are quantized when they are loaded (`weights.fill`). Embeddings, the head, norms, routers
    and adapters keep their dtype. Raises ValueError for a layer with other matrices, which would keep theirs unasked.
    """
    check_four_bits(model)
    for _, module, name in _base_weights(model):
        weight = getattr(module, name)
        if weight.is_meta:
            quantized = Nf4Weight.empty(weight.shape, weight.dtype, weight.device)
        else:
            quantized = Nf4Weight.quantize(weight.detach())
        setattr(module, name, nn.Parameter(quantized, requires_grad=False))


def check_four_bits(model: PreTrainedModel) -> None:
    """Raises ValueError unless every matrix of the decoder layers can be in four bits."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"{FLAG} needs bitsandbytes, which is not installed; pip install bitsandbytes")
    layers, class_name = decoder_layers(model), type(model).__name__
    known = {id(parameter) for parameter in parameters_of_experts(layers)}  # routers among them
    for where, module, name in _base_weights(model):
        weight = getattr(module, name)
        known.add(id(weight))
        if isinstance(module, nn.Linear) and (change := linear_change(module)) is not None:
            raise ValueError(f"{FLAG}: {where} {change}; leave it out")
        if weight.shape[-1] % BLOCK:
            given = f"rows of {where}.{name} have {weight.shape[-1]} elements"
            raise ValueError(f"{FLAG}: {given}, not a multiple of {BLOCK}; leave it out")
    for where, module in layers.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_matrix = parameter.ndim > 1 and LORA_INFIX not in f".{where}.{name}"
            if is_matrix and id(parameter) not in known and not isinstance(module, nn.Linear | nn.Conv1d):
                raise ValueError(
                    f"{FLAG}: {where}.{name} of {class_name} is no linear's weight, and would keep 16 or 32 bits; "
                    "leave it out"
                )


def _base_weights(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields where the weights of linears and experts in the decoder layers are: module's name, module, attribute.

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
            attributes = [attribute for attribute in PRODUCTS_OF_EXPERTS if hasattr(module, attribute)]
        yield from ((where, module, x) for x in attributes if f"{where}.{x}" not in in_float32)
