"""The published Llama 3, 3.1 and 3.2 architectures as `LlamaConfig` arguments, and the hub ids that have them."""

import re
from collections.abc import Mapping
from typing import Final

# tiktoken vocabulary of 128256 tokens, <|begin_of_text|> 128000 and <|end_of_text|> 128001; RoPE base 500000.
THETA: Final = 500_000.0
LLAMA3: Final[Mapping[str, object]] = {
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    "tie_word_embeddings": False,
}


def llama3_scaling(factor: float, original: int = 8192) -> dict[str, object]:
    """Returns Llama 3.1's RoPE scaling: long wavelengths times `factor`, short ones unchanged, a ramp in between."""
    return {
        "rope_type": "llama3",
        "rope_theta": THETA,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


# 3.1 and 3.2 are published with 131072 positions, although that is not factor times 8192.
LLAMA3_2: Final[Mapping[str, object]] = {
    **LLAMA3,
    "max_position_embeddings": 131072,
    "rope_parameters": llama3_scaling(32.0),
    "tie_word_embeddings": True,
}

PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "llama3-8b": LLAMA3,
    "llama3.1-8b": {**LLAMA3, "max_position_embeddings": 131072, "rope_parameters": llama3_scaling(8.0)},
    "llama3-70b": {
        **LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama3.2-1b": {
        **LLAMA3_2,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
    },
    "llama3.2-3b": {
        **LLAMA3_2,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
    "tiny-llama3": {
        **LLAMA3,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rope_parameters": llama3_scaling(8.0, original=1024),
        "tie_word_embeddings": True,
    },
}

ALIASES: Final[Mapping[str, str]] = {
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "NousResearch/Meta-Llama-3-8B": "llama3-8b",
    "unsloth/llama-3-8b": "llama3-8b",
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
    "meta-llama/Meta-Llama-3.1-8B": "llama3.1-8b",
    "NousResearch/Meta-Llama-3.1-8B": "llama3.1-8b",
    "unsloth/Meta-Llama-3.1-8B": "llama3.1-8b",
    "meta-llama/Meta-Llama-3-70B": "llama3-70b",
    "NousResearch/Meta-Llama-3-70B": "llama3-70b",
    "meta-llama/Llama-3.2-1B": "llama3.2-1b",
    "unsloth/Llama-3.2-1B": "llama3.2-1b",
    "meta-llama/Llama-3.2-3B": "llama3.2-3b",
    "unsloth/Llama-3.2-3B": "llama3.2-3b",
}


def scaled_preset(name: str) -> Mapping[str, object] | None:
    """Returns preset `scaled-all-S` or `scaled-n_layers-S`: a Llama of any size S, to find the largest that fits a GPU.

    `all` is 256·S wide, with 8·S layers and 8·S heads of 32; `n_layers` is Llama-3-8B with 32 + 8·(S - 1) layers. The
    vocabulary is 131072, the MLP 1.3 · 8/3 times as wide as the model, in multiples of 256.
    """
    found = re.fullmatch(r"scaled-(all|n_layers)-([1-9]\d*)", name)
    if found is None:
        return None
    scale = int(found[2])
    if found[1] == "n_layers":
        return {**LLAMA3, "vocab_size": 131072, "num_hidden_layers": 32 + 8 * (scale - 1)}
    hidden = 256 * scale
    return {
        **LLAMA3,
        "vocab_size": 131072,
        "hidden_size": hidden,
        "intermediate_size": -(-int(1.3 * int(8 * hidden / 3)) // 256) * 256,
        "num_hidden_layers": 8 * scale,
        "num_attention_heads": 8 * scale,
        "num_key_value_heads": 8 * scale,
    }
