"""Frozen linears of a model's decoder layers in four bits, as QLoRA has them (arXiv 2305.14314)."""

from collections.abc import Iterator
from importlib.util import find_spec

from torch import nn
from transformers import PreTrainedModel

from lightseq.models.decoder import decoder_layers, float32_parameters, module_name
from lightseq.models.nf4 import BLOCK, Nf4Weight
from lightseq.models.weights import LORA_INFIX
from lightseq.parts.experts import experts_modules
from lightseq.parts.identity import linear_change

FLAG = "--load_in_4bit True"


def quantize_layers(model: PreTrainedModel) -> None:
    """Puts the frozen linears of the decoder layers in four bits, one weight at a time.

    Weights on the meta device are quantized when they are loaded (`weights.fill`). Embeddings, the head, norms and
    adapters keep their dtype. Raises ValueError for a layer with other matrices, which would keep theirs unasked.
    """
    check_four_bits(model)
    for _, linear in _base_linears(model):
        weight = linear.weight
        if weight.is_meta:
            quantized = Nf4Weight.empty(weight.shape, weight.dtype, weight.device)
        else:
            quantized = Nf4Weight.quantize(weight.detach())
        linear.weight = nn.Parameter(quantized, requires_grad=False)


def check_four_bits(model: PreTrainedModel) -> None:
    """Raises ValueError unless every matrix of the decoder layers can be in four bits."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"{FLAG} needs bitsandbytes, which is not installed; pip install bitsandbytes")
    layers, name = decoder_layers(model), type(model).__name__
    if any(True for _ in experts_modules(layers)):
        raise ValueError(f"{FLAG}: the experts of {name} would keep 16 or 32 bits; leave it out")
    linears = dict(_base_linears(model))
    for where, linear in linears.items():
        if (change := linear_change(linear)) is not None:
            raise ValueError(f"{FLAG}: {where} {change}; leave it out")
        if linear.in_features % BLOCK:
            raise ValueError(
                f"{FLAG}: {where} has {linear.in_features} inputs, not a multiple of {BLOCK}; leave it out"
            )
    for where, module in layers.named_modules():
        weights = [
            n for n, p in module.named_parameters(recurse=False) if p.ndim > 1 and LORA_INFIX not in f".{where}.{n}"
        ]
        if weights and not isinstance(module, nn.Linear | nn.Conv1d):
            raise ValueError(
                f"{FLAG}: {where}.{weights[0]} of {name} is no linear's weight, and would keep 16 or 32 bits; "
                "leave it out"
            )


def _base_linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the linears of the decoder layers, except adapters and those that compute in float32, with their names."""
    layers, in_float32 = decoder_layers(model), float32_parameters(model)
    prefix = module_name(model, layers)
    for name, module in layers.named_modules():
        where = f"{prefix}.{name}"
        if isinstance(module, nn.Linear) and LORA_INFIX not in where and f"{where}.weight" not in in_float32:
            yield where, module
