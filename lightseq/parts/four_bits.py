"""Frozen linears of a model's decoder layers in four bits, as QLoRA has them (arXiv 2305.14314)."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from torch import nn
from transformers import PreTrainedModel

from lightseq.models.bnb4 import FourBitSlice
from lightseq.models.decoder import decoder_layers, float32_parameters, module_name
from lightseq.models.nf4 import BLOCK, Nf4Weight
from lightseq.models.published_layout import layout_of_files
from lightseq.models.weight_files import open_tensors, tensor_files
from lightseq.models.weights import LORA_INFIX, base_parameters, without_wrappers
from lightseq.parts.experts import experts_modules
from lightseq.parts.identity import linear_change

FLAG: Final = "--load_in_4bit True"


@dataclass(frozen=True)
class FourBits:
    """Form of a run's base weights in four bits."""

    in_files: bool  # as the model's files have them; else they are quantized on loading
    dtype: str  # of the products, in which the weights are quantized on loading


def quantize_layers(model: PreTrainedModel, stored_in: Path | None = None) -> None:
    """Puts the frozen linears of the decoder layers in four bits, one weight at a time.

    Weights on the meta device are quantized when they are loaded (`weights.fill`). Embeddings, the head, norms and
    adapters keep their dtype. Raises ValueError for a layer with other matrices, which would keep theirs unasked. If
    files have weights in four bits, `stored_in` is their directory, and only the linears that they have so change.
    """
    if stored_in is None:
        check_four_bits(model)
        doubles = dict.fromkeys((name for name, _ in base_linears(model)), True)
    else:
        check_package(f"{stored_in} in four bits")
        doubles = _stored_linears(model, stored_in)
    for name, linear in base_linears(model):
        if name not in doubles:
            continue
        weight = linear.weight
        if weight.is_meta:
            quantized = Nf4Weight.empty(weight.shape, weight.dtype, weight.device, doubles[name])
        else:
            quantized = Nf4Weight.quantize(weight.detach())
        linear.weight = nn.Parameter(quantized, requires_grad=False)


def _stored_linears(model: PreTrainedModel, directory: Path) -> dict[str, bool]:
    """Returns the linears that files have in four bits, and whether with double quantization.

    Raises ValueError for other weights of the decoder layers in four bits, which would take their size in 16 bits.
    """
    files = tensor_files(directory, "save the model as safetensors")
    layout = layout_of_files(model, base_parameters(model), files)
    by_weight = {f"{without_wrappers(name)}.weight": (name, linear) for name, linear in base_linears(model)}
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
            change = linear_change(by_weight[name][1]) if name in by_weight else "is no linear's weight"
            if change is not None:
                raise ValueError(f"{directory}: {name} is in four bits, but {change}; give a version in 16 bits")
            found[by_weight[name][0]] = tensor.is_double
    return found


def check_package(what: str) -> None:
    """Raises ValueError without bitsandbytes, which `what` needs."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"{what} needs bitsandbytes, which is not installed; pip install bitsandbytes")


def check_four_bits(model: PreTrainedModel) -> None:
    """Raises ValueError unless every matrix of the decoder layers can be in four bits."""
    check_package(FLAG)
    layers, name = decoder_layers(model), type(model).__name__
    if any(True for _ in experts_modules(layers)):
        raise ValueError(f"{FLAG}: the experts of {name} would keep 16 or 32 bits; leave it out")
    linears = dict(base_linears(model))
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


def base_linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the linears of the decoder layers, except adapters and those that compute in float32, with their names."""
    layers, in_float32 = decoder_layers(model), float32_parameters(model)
    prefix = module_name(model, layers)
    for name, module in layers.named_modules():
        where = f"{prefix}.{name}"
        if isinstance(module, nn.Linear) and LORA_INFIX not in where and f"{where}.weight" not in in_float32:
            yield where, module
