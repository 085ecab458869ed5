"""Frozen linears and stacked experts of a decoder's layers in NF4, as QLoRA has them (arXiv 2305.14314), or in FP8."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from lightseq.config.train_config import TrainConfig
from lightseq.models import bnb4, fp8_blocks, mxfp4, nf4
from lightseq.models.decoder import decoder_layers, float32_parameters, module_name
from lightseq.models.nf4 import BLOCK
from lightseq.models.packed import PackedWeight
from lightseq.models.packed_bytes import PackedBytes
from lightseq.models.packed_slice import PackedSlice
from lightseq.models.published_layout import layout_of_files
from lightseq.models.weight_files import open_tensors, tensor_files
from lightseq.models.weights import LORA_INFIX, base_parameters, global_shape, without_wrappers
from lightseq.parts.experts import experts_modules, names_of_products, parameters_of_experts
from lightseq.parts.identity import linear_change
from lightseq.parts.routers import router_parts

FLAG: Final = "--load_in_4bit True"
FIELD: Final = "held_as_stored"  # field of a model's config: form of its weights, and modules that do not have it
FORMS: Final[dict[str, type[PackedBytes]]] = {
    bnb4.READ_FORMAT: nf4.Nf4Bytes,
    fp8_blocks.METHOD: fp8_blocks.Fp8Bytes,
    mxfp4.METHOD: mxfp4.Mxfp4Bytes,
}


@dataclass(frozen=True)
class PackedBase:
    """Form of a run's frozen base weights in fewer bits than they compute in."""

    in_files: bool  # as the model's files have them; else they are quantized to NF4 on loading
    dtype: str  # dtype of the products, in which the weights are quantized on loading
    form: str = bnb4.READ_FORMAT  # or another of FORMS

    @property
    def is_exact(self) -> bool:
        """Returns whether the packed form has the same values as 16 bits."""
        return self.form == mxfp4.METHOD

    @property
    def is_nf4(self) -> bool:
        return self.form == bnb4.READ_FORMAT

    @property
    def words(self) -> str:
        return self.form.upper()

    @property
    def bits(self) -> str:
        return bits_of(self.form)


def bits_of(form: str) -> str:
    """Returns the name of a packed form for messages."""
    return FORMS[form].WORDS


def held_as_stored(config: TrainConfig, stored: str | None) -> str | None:
    """Returns the packed form that frozen weights keep from the files; None if they become dense.

    `stored` is the form in the files. Raises ValueError if the flags ask for another.
    """
    if stored == mxfp4.METHOD:
        return stored if config.load_in_4bit else None
    if config.load_in_4bit and stored not in (None, bnb4.READ_FORMAT):
        raise ValueError(
            f"{FLAG}: the weights of {config.model_name} are in {bits_of(stored)}, and train as they are; leave it out"
        )
    return stored


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


def pack_layers(model: PreTrainedModel, stored_in: Path | None = None) -> None:
    """Puts the frozen linears and experts of the decoder layers in fewer bits, one weight at a time.

    Weights on the meta device are quantized when they are loaded (`weights.fill`). Embeddings, the head, norms, routers
    and adapters keep their dtype. Raises ValueError for a layer with other matrices, which would keep theirs unasked.
    If files have packed weights, `stored_in` is their directory, and only the weights that they have so change.
    Without it, weights become NF4, or keep the packed form in the model's config (`mark`).
    """
    packed = _stored_weights(model, stored_in) if stored_in is not None else None
    if stored_in is None and is_marked(model.config):
        packed = _marked_weights(model)
    if packed is None:
        check_four_bits(model)
    for found in [*(weights_to_quantize(model) if packed is None else base_weights(model))]:
        if packed is None or found.name in packed:
            weight = _quantized(found.parameter) if packed is None else packed[found.name]
            setattr(found.module, found.attribute, nn.Parameter(weight, requires_grad=False))


def _quantized(weight: nn.Parameter) -> PackedWeight:
    if weight.is_meta:
        return nf4.empty(weight.shape, weight.dtype, weight.device)
    return nf4.quantize(weight.detach())


def round_to_four_bits(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Rounds the weights that a four-bit run in `dtype` quantizes to that run's values. Weights stay dense."""
    for weight in weights_to_quantize(model):
        x = weight.parameter.data
        x.copy_(nf4.quantize(x.to(dtype)).dense())


def mark(config: PreTrainedConfig, form: str, left_out: Sequence[str] = ()) -> None:
    """Records in a model's config the packed form of its files, and the modules that are not packed."""
    if form != bnb4.READ_FORMAT:  # which is planned as if the run quantized all
        setattr(config, FIELD, [form, *left_out])


def is_marked(config: PreTrainedConfig) -> bool:
    """Returns whether weights of the model stay packed as in its files."""
    return hasattr(config, FIELD)


def is_in_mxfp4(config: PreTrainedConfig) -> bool:
    return is_marked(config) and getattr(config, FIELD)[0] == mxfp4.METHOD


def _marked_weights(model: PreTrainedModel) -> dict[str, PackedWeight]:
    """Returns memory for the weights that a model's config says are packed, by their names."""
    form, *left_out = getattr(model.config, FIELD)
    empty = mxfp4.empty if form == mxfp4.METHOD else fp8_blocks.empty
    found = dict[str, PackedWeight]()
    for weight in weights_to_quantize(model):
        x, module = weight.parameter, without_wrappers(weight.name).rpartition(".")[0]
        if should_convert_module(module, left_out) and (form != mxfp4.METHOD or x.ndim > 2):
            found[weight.name] = empty(x.shape, x.dtype, x.device)
    return found


def _stored_weights(model: PreTrainedModel, directory: Path) -> dict[str, PackedWeight]:
    """Returns memory for the weights that files have packed, by their names.

    Raises ValueError for other weights of the decoder layers that are packed, which would take their size in 16 bits.
    """
    files = tensor_files(directory, "save the model as safetensors")
    parameters = base_parameters(model)
    layout = layout_of_files(model, parameters, files)
    by_name = {without_wrappers(weight.name): weight for weight in base_weights(model)}
    inside = f"{module_name(model, decoder_layers(model))}."
    shapes = {name: global_shape(x) for name, x in parameters.items()}
    found: dict[str, PackedWeight] = {}

    def add(name: str, source: str, weight: Tensor, form: PackedSlice) -> None:
        if not name.startswith(inside):
            return  # embeddings and the head are read as dense ones
        known = by_name.get(name)
        if known is None:
            change: str | None = "is no weight of a linear or of stacked experts"
        elif not isinstance(weight, PackedWeight):
            change = "cannot be joined from such tensors"
        else:
            found[known.name] = weight
            change = linear_change(known.module) if isinstance(known.module, nn.Linear) else None
        if change is not None:
            raise ValueError(
                f"{directory}: {source} is in {form.WORDS}, but {name} {change}; give a version in 16 bits"
            )

    with open_tensors(files) as stored:
        done = set[int]()
        for name, conversion in layout.converted.items():
            forms = {source: stored(source) for _, source in conversion.sources}
            packed = [source for source, form in forms.items() if isinstance(form, PackedSlice)]
            if not packed or id(conversion) in done or name not in parameters:
                continue
            done.add(id(conversion))
            empty = {source: _empty(form, parameters[name].dtype) for source, form in forms.items()}
            for target, weight in conversion.load(model, empty.__getitem__, shapes).items():
                add(target, packed[0], weight, forms[packed[0]])
        for name, source in layout.renamed.items():
            if isinstance(form := stored(source), PackedSlice) and name in parameters:
                add(name, source, _empty(form, parameters[name].dtype), form)
    return found


def _empty(form: Any, dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor in the form of the files, packed or dense."""
    if isinstance(form, PackedSlice):
        return form.empty(dtype, torch.device("meta"))
    return torch.empty(form.get_shape(), dtype=dtype, device="meta")


def check_package(what: str) -> None:
    """Raises ValueError if bitsandbytes is not installed. `what` names the feature that needs it."""
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
    """Yields the weights that `--load_in_4bit True` quantizes: base weights outside routers."""
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
