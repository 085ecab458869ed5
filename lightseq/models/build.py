"""Construction of a model from its config: the class that its checkpoint names, on the meta device, text part only."""

import json
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from lightseq.models.decoder import has_towers, text_decoder


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
    # transformers lists Mistral 4, a text model, only among models with images.
    mappings = [AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping]
    if has_towers(config):  # the class of the causal models may take only the config of the text inside
        mappings.reverse()
    found = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    known = [kind for each in found for kind in (each if isinstance(each, tuple) else (each,))]
    if not known:
        raise ValueError(f"transformers has no class of {config.model_type!r} that generates text")
    named = config.architectures or ()
    return next((kind for kind in known if kind.__name__ in named), known[0])


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Builds a model with new weights. One with other inputs than text keeps only what text passes through."""
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

    What lies beside the path to the text decoder goes. The decoder, the head and what text passes through on the way
    stay. The latter, such as the tables for tokens of images and audio in Gemma 3n, is frozen.
    """
    if not has_towers(model.config):
        return
    decoder, head, embeddings = text_decoder(model), model.get_output_embeddings(), model.get_input_embeddings()
    names = _passed_by_text(cast(Hashable, type(model.config)), settings_of(model.config))
    passed = [model.get_submodule(name) for name in names]
    for module in passed:
        module.requires_grad_(False)
    _remove_beside(model, {id(module) for module in (decoder, head, embeddings, *passed)})


class _DecoderReached(Exception):
    """End of a forward pass at the text decoder."""


@cache
def _passed_by_text(kind: Any, settings: str) -> tuple[str, ...]:
    """Returns the names of the modules outside the text decoder that a model calls for text before it.

    Returns none for a model that does not run on the meta device.
    """
    with torch.device("meta"):
        config = kind.from_dict(json.loads(settings))
        model = model_class(config)._from_config(config)
    decoder, called = text_decoder(model), []

    def reach(*_: Any) -> None:
        raise _DecoderReached

    decoder.register_forward_pre_hook(reach)
    inside = {id(module) for part in (decoder, model.get_input_embeddings()) for module in part.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and not any(id(inner) in inside for inner in module.modules()):
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    with suppress(Exception), torch.no_grad():  # the model's code may raise anything
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=False)
    outermost = [name for name in called if not any(name.startswith(f"{other}.") for other in called)]
    return tuple(dict.fromkeys(outermost))


def _remove_beside(module: nn.Module, kept: set[int]) -> None:
    """Removes a module's parameters, buffers and children that are not on the path to kept modules."""
    for name in [*module._parameters]:
        module._parameters[name] = None
    for name, child in module.named_children():
        if id(child) in kept:
            continue
        if any(id(inner) in kept for inner in child.modules()):
            _remove_beside(child, kept)
        else:
            setattr(module, name, None)
