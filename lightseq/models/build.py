"""Construction of a model from its config: the class that its checkpoint names, on the meta device, text part only."""

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from lightseq.models.decoder import has_towers, text_decoder
from lightseq.modules.dense_experts import run_chosen_experts


def settings_of(config: PreTrainedConfig) -> str:
    """Returns the settings that make a config's model, in JSON that `from_dict` takes.

    transformers' own JSON has a form for infinity that `from_dict` does not read.
    """
    settings = config.to_diff_dict().items()
    return json.dumps({name: x for name, x in settings if name not in ("dtype", "use_cache")}, sort_keys=True)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns the class that a config's checkpoint was saved from, or the one that transformers has for its type.

    Raises ValueError for a type of model that generates no text.
    """
    mappings = [AutoModelForCausalLM._model_mapping]
    if has_towers(config):  # the class of the causal models may take only the config of the text inside
        mappings.insert(0, AutoModelForImageTextToText._model_mapping)
    found = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    known = [kind for each in found for kind in (each if isinstance(each, tuple) else (each,))]
    if not known:
        raise ValueError(f"transformers has no class of {config.model_type!r} that generates text")
    named = config.architectures or ()
    return next((kind for kind in known if kind.__name__ in named), known[0])


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Builds a model with new weights, as it trains.

    A model with other inputs than text keeps only what text passes through. Experts whose own code runs all of them for
    every token run only for the tokens that chose them.
    """
    model = build_plain(config, dtype)
    run_chosen_experts(model)
    return model


def build_plain(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Builds a model like `build`, with transformers' own code only."""
    model: PreTrainedModel = model_class(config)._from_config(config, dtype=dtype)
    remove_towers(model)
    return model


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Builds the model on the meta device, with parameters in float32, the dtype of master weights."""
    with torch.device("meta"):
        return build(config)


def constructed_buffers(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns the buffers of a new model on the CPU, by name. Its parameters take no memory."""
    with _EmptyOnMeta():
        found = _buffers(config, dtype)
    return found if all(buffer.device.type == "cpu" for buffer in found.values()) else _buffers(config, dtype)


def constructed_parameters(config: PreTrainedConfig) -> dict[str, Tensor]:
    """Returns the parameters of a new model that its constructor gives values, on the CPU, by name."""
    with _EmptyOnMeta():
        model = build(config)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.is_meta}


class _EmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty`, with which modules allocate their parameters, take no memory."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return function(*args, **(kwargs or {}) | ({"device": "meta"} if function is torch.empty else {}))


def _buffers(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(
            module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        )

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        model = build(config, dtype)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False)}


def remove_towers(model: PreTrainedModel) -> None:
    """Removes the encoders of images and audio, and their projectors, from a model that has other inputs than text.

    What lies beside the path to the text decoder goes. The decoder and the head stay.
    """
    if not has_towers(model.config):
        return
    decoder = text_decoder(model)
    kept = {id(decoder), id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    _remove_beside(model, kept)


def _remove_beside(module: nn.Module, kept: set[int]) -> None:
    """Removes the parameters, buffers and children of a module that holds the kept ones, except those on the way."""
    for name in [*module._parameters]:
        module._parameters[name] = None
    for name, child in module.named_children():
        if id(child) in kept:
            continue
        if any(id(inner) in kept for inner in child.modules()):
            _remove_beside(child, kept)
        else:
            setattr(module, name, None)
