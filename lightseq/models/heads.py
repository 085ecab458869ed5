"""Attention heads of a model."""

from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Heads:
    """Attention heads of a layer: query heads, key/value heads, and their dimension."""

    query: int
    key_value: int
    dim: int


def heads_of(config: PreTrainedConfig) -> Heads:
    """Returns the heads of each layer. Raises ValueError if layers differ or the config has no number of heads."""
    try:
        query = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // query
        return Heads(query, getattr(config, "num_key_value_heads", None) or query, dim)
    except (AttributeError, RuntimeError) as error:  # RuntimeError: the config has one number per layer
        raise ValueError(f"{config.model_type} has no single number of attention heads for all layers") from error
