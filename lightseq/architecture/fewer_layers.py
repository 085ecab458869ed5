"""Copies of a config with fewer layers, for tools that need a model of the same kinds of layers and less memory."""

import copy
from collections.abc import Sequence
from typing import Any, Final

from transformers import PreTrainedConfig

from lightseq.architecture.inspection import inspect_architecture
from lightseq.models.decoder import text_config
from lightseq.parts.facts import distinct

# Settings with the index of the first layer of another kind.
FROM_FIRST: Final = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
FROM_LAST: Final = ("num_kv_shared_layers",)
LAST: Final = ("moe_layer_end_index",)  # settings that name the last layer of a kind by its index
PLACES: Final = ("moe_layers", "mlp_only_layers", "attn_layer_indices", "hybrid_layer_ids", "cross_attention_layers")


def with_layers(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """Returns a copy of a config with its first `count` layers, or with all if it has fewer."""
    return with_layers_at(config, range(min(count, text_config(config).num_hidden_layers)))


def places_of_kinds(config: PreTrainedConfig, count: int) -> list[int]:
    """Returns the places of at most `count` layers: one that attends, then the first of each kind, then the first.

    A layer that reads another layer's keys follows one that computes such keys, which is of an earlier kind.
    """
    layers = inspect_architecture(config).layers
    kinds = [layer.place for layer in sorted(distinct(layers), key=lambda layer: layer.place)]
    attending = next(layer.place for layer in layers if layer.attentions)
    return sorted(list(dict.fromkeys([attending, *kinds, *range(len(layers))]))[:count])


def with_layers_at(config: PreTrainedConfig, places: Sequence[int]) -> PreTrainedConfig:
    """Returns a copy of a config with the layers at these ascending places.

    Settings of each layer, counts of layers and lists of their places follow.
    """
    few = copy.deepcopy(config)
    text = text_config(few)
    total, kept = text.num_hidden_layers, list(places)
    text.num_hidden_layers = len(kept)
    _keep_sparse_layers(text, kept)
    for name, value in vars(text).items():
        if (changed := _kept(name, value, kept, total)) is not value:
            setattr(text, name, changed)
    if getattr(text, "is_heterogeneous", False):
        overrides = text._heterogeneity_spec.per_layer_overrides
        text.per_layer_config = {new: overrides[old] for new, old in enumerate(kept) if old in overrides}
    return few


def _keep_sparse_layers(text: Any, kept: Sequence[int]) -> None:
    """Replaces the step between layers of experts by a list of the dense layers."""
    if (step := getattr(text, "decoder_sparse_step", None)) and hasattr(text, "mlp_only_layers"):
        dense = [place for place in kept if (place + 1) % step]
        text.mlp_only_layers = sorted({*dense, *(text.mlp_only_layers or ())})
        text.decoder_sparse_step = 1


def _kept(name: str, value: Any, kept: Sequence[int], total: int) -> Any:
    """Restricts a per-layer setting to the layers that are kept."""
    if isinstance(value, int) and not isinstance(value, bool):
        if name in FROM_FIRST:
            return sum(place < value for place in kept)
        if name in FROM_LAST:
            return sum(place >= total - value for place in kept)
        if name in LAST:
            return sum(place <= value for place in kept) - 1
    if isinstance(value, list) and name in PLACES:
        return [new for new, old in enumerate(kept) if old in value]
    if isinstance(value, list) and len(value) == total:
        return [value[place] for place in kept]
    return value
