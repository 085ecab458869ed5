"""Models of benchmarks/step.py: presets of Llama, the presets below, and directories of any architecture."""

from collections.abc import Callable, Mapping

from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig

import llama2
import llama3
from lightseq.architecture.family import resolve
from lightseq.architecture.fewer_layers import with_layers
from lightseq.cli import BOTH
from lightseq.models.decoder import text_config
from lightseq.models.presets import ModelFamily


def gemma3_4b() -> Gemma3TextConfig:
    """Returns the text model of google/gemma-3-4b-pt: every sixth layer sees all tokens, the others 1,024."""
    return Gemma3TextConfig(
        vocab_size=262208,
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=1024,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(34)],
        max_position_embeddings=131072,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        tie_word_embeddings=True,
    )


# Presets of other architectures than Llama.
PRESETS: Mapping[str, Callable[[], PreTrainedConfig]] = {"gemma3-4b": gemma3_4b}


def model_of(name: str, layers: int | None = None) -> tuple[ModelFamily, PreTrainedConfig]:
    """Returns a model's family and its config, cut to its first layers. The family of other models than Llama is BOTH.

    Raises ValueError for an unknown name, and for more layers than the model has.
    """
    families = (llama2.FAMILY, llama3.FAMILY)
    family = next((f for f in families if f.preset(name) is not None or name in f.aliases), llama3.FAMILY)
    config = PRESETS[name]() if name in PRESETS else resolve(BOTH, name, random_init=True).config
    if layers is not None and layers > (all_layers := text_config(config).num_hidden_layers):
        raise ValueError(f"--layers {layers} exceeds the {all_layers} layers of {name}; give fewer")
    if layers is not None:
        config = with_layers(config, layers)
    return (family if isinstance(config, LlamaConfig) else BOTH), config
