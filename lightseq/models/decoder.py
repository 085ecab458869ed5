"""Parts of a model that generates text. transformers itself has accessors for the embeddings and the head."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

# Config names of placeholder tokens for encoders' features, and of tokens at their start and end.
PLACEHOLDER: Final = re.compile(r"((image|video|audio|vision)(_start|_end|_bos|_eos)?|[be]o[ia])_token_(id|index)")

LAYERS: Final = ("layers", "h")  # names of the list of layers in transformers' decoders
POSITIONS: Final = re.compile(r"pos|wpe$")  # matches names of position tables
# Names of the norm after them.
NORMS: Final = ("norm", "final_norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")


def text_config(config: PreTrainedConfig) -> Any:
    """Returns the config of the text decoder, which models with images or audio nest in theirs."""
    return config.get_text_config(decoder=True)


def has_towers(config: PreTrainedConfig) -> bool:
    """Returns whether a config's model has encoders for other inputs than text."""
    return text_config(config) is not config


def placeholder_ids(config: PreTrainedConfig) -> dict[int, str]:
    """Returns the token ids that mark images, video and audio in a model's text, and their names in its config."""
    parts = (config, text_config(config)) if has_towers(config) else ()
    fields = (field for part in parts for field in vars(part).items())
    return {id: name for name, id in fields if PLACEHOLDER.fullmatch(name) and isinstance(id, int)}


def ids_of_text(config: PreTrainedConfig) -> NDArray[np.int64]:
    """Returns the token ids of a model's vocabulary that do not mark images, video or audio."""
    return np.setdiff1d(np.arange(text_config(config).vocab_size), [*placeholder_ids(config)])


def with_text_settings(config: PreTrainedConfig, settings: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns a copy of a config with these settings of its text decoder."""
    text = text_config(config)
    changed: PreTrainedConfig = type(text).from_dict(text.to_dict() | dict(settings))
    if text is config:
        return changed
    whole = copy.deepcopy(config)
    name = next(name for name, value in vars(config).items() if value is text)
    setattr(whole, name, changed)
    return whole


def has_known_parts(model: PreTrainedModel) -> bool:
    """Returns whether a model consists of embeddings, a list of layers, a norm and a linear head."""
    decoder = text_decoder(model)
    has_layers = isinstance(_child(decoder, LAYERS), nn.ModuleList) and _child(decoder, NORMS) is not None
    return has_layers and isinstance(model.get_output_embeddings(), nn.Linear)


def text_decoder(model: PreTrainedModel) -> Any:
    """Returns the module that holds the embeddings, the layers and the norm after them."""
    if not has_towers(model.config):
        inner = getattr(model.base_model, "decoder", None)  # OPT
        return headless(model) if _child(inner, LAYERS) is None else inner
    decoder = model.get_decoder()
    return headless(decoder) if isinstance(decoder, PreTrainedModel) else decoder


def headless(model: Any) -> Any:
    """Returns the part of a transformers model that the head follows."""
    return _base_of(with_head(model))


def with_head(model: Any) -> Any:
    """Returns the model that makes the logits: the whole language model inside a composite that has one (Llama 4)."""
    base = _base_of(model)
    head_of = getattr(base, "get_output_embeddings", None)
    return model if base is model or head_of is None or head_of() is None else with_head(base)


def _base_of(model: Any) -> Any:
    base = model.base_model
    if base is not model:
        return base
    # A class may name another part as its base (Llama 4). An encoder of images has no embeddings of text.
    parts = (child for child in model.children() if hasattr(child, "get_input_embeddings"))
    return next((part for part in parts if model.get_input_embeddings() in part.modules()), base)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Returns the transformers model, which may be inside a wrapper such as PEFT's. Raises ValueError without one."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} is no transformers model, and holds none; pass a PreTrainedModel")
    return found


def attending_part(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model whose config says how the text decoder attends. Encoders of images attend in their own way."""
    part: PreTrainedModel = text_decoder(model) if has_towers(model.config) else model
    return part


def layers_of(decoder: nn.Module) -> nn.ModuleList:
    """Returns the layers of a text decoder in the order in which they run; none if it has no list of them."""
    layers: Any = _child(decoder, LAYERS)
    return layers if isinstance(layers, nn.ModuleList) else nn.ModuleList()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Returns the layers of a model in the order in which they run."""
    layers: Any = _child(text_decoder(model), LAYERS)
    return layers  # type: ignore[no-any-return]


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Returns the norm after the last layer."""
    norm: Any = _child(text_decoder(model), NORMS)
    return norm  # type: ignore[no-any-return]


def vocabulary_size(model: PreTrainedModel) -> int | None:
    """Returns the rows of a model's embeddings; more if its config gives images ids beyond them. None if not known."""
    rows: int | None = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return None if rows is None else max([rows, *(id + 1 for id in placeholder_ids(model.config))])


def positions_in_table(model: PreTrainedModel) -> int | None:
    """Returns the positions in a model's table of encodings, learned or computed; None if any position has one."""
    decoder, count = text_decoder(model), getattr(text_config(model.config), "max_position_embeddings", None)
    learned = any(
        isinstance(child, nn.Embedding) and POSITIONS.search(name) for name, child in decoder.named_children()
    )
    computed = any(POSITIONS.search(name) and len(buffer) == count for name, buffer in decoder.named_buffers())
    return count if learned or computed else None


def norms_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the norms inside a module, which may have a weight for each head."""
    for part in module.modules():
        has_epsilon = hasattr(part, "eps") or hasattr(part, "variance_epsilon")
        if has_epsilon and "norm" in type(part).__name__.lower():
            yield part


def _child(module: Any, names: Sequence[str]) -> nn.Module | None:
    """Returns the child that has one of the names."""
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def ties_embeddings(model: PreTrainedModel) -> bool:
    """Returns whether the head's weight is tied to the input embeddings."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def float32_parameters(model: PreTrainedModel, also_for_float16: bool = False) -> dict[str, nn.Parameter]:
    """Returns the parameters that a model keeps in float32 when it computes in another dtype, such as routers.

    `also_for_float16` adds those that its class lists for float16 only.
    """
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if also_for_float16 else [])]
    kept = [name for names in lists for name in getattr(model, names, None) or ()]
    patterns = [re.compile(re.escape(name).replace(r"\*", ".*")) for name in kept]
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if any(pattern.search(name) for pattern in patterns)
    }


def head_weight_name(model: PreTrainedModel) -> str:
    """Returns the name of the head's weight in the model."""
    return f"{module_name(model, model.get_output_embeddings())}.weight"


def module_name(model: nn.Module, part: nn.Module) -> str:
    """Returns the name of a module inside a model."""
    return next(name for name, module in model.named_modules() if module is part)
