"""Parts of a causal language model. transformers itself has accessors for the embeddings and the head."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def has_known_parts(model: PreTrainedModel) -> bool:
    """Returns whether a model consists of embeddings, a list of layers, a norm and a linear head."""
    decoder = text_decoder(model)
    has_layers = isinstance(getattr(decoder, "layers", None), nn.ModuleList) and hasattr(decoder, "norm")
    return has_layers and isinstance(model.get_output_embeddings(), nn.Linear)


def text_decoder(model: PreTrainedModel) -> Any:
    """Returns the module that holds the embeddings, the layers and the norm after them."""
    return model.base_model


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Returns the layers in the order in which they run."""
    layers: nn.ModuleList = text_decoder(model).layers
    return layers


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Returns the norm after the last layer."""
    norm: nn.Module = text_decoder(model).norm
    return norm


def head_weight_name(model: PreTrainedModel) -> str:
    """Returns the name of the head's weight in the model's files."""
    head = model.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)
