"""Published architectures by name, and their hub ids: Llama as `LlamaConfig` arguments, others from files."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from lightseq.models import published_configs

Preset = Mapping[str, object]  # arguments of the config class of its model_type; without one, of LlamaConfig


@dataclass(frozen=True)
class ModelFamily:
    """Published architectures by name, and the hub ids with the same architecture."""

    name: str
    presets: Mapping[str, Preset]
    aliases: Mapping[str, str]
    # Presets with a size in their name.
    scaled_preset: Callable[[str], Preset | None] = lambda _name: None
    program: str = ""  # training program; default: the train.py of its folder

    @property
    def command(self) -> str:
        """The command that trains a model of the family."""
        return self.program or f"{self.name}/train.py"

    def preset(self, name: str) -> Preset | None:
        """Returns the architecture of that name, if the family has one."""
        return self.presets.get(name) or self.scaled_preset(name)


# SentencePiece vocabulary of 32000 tokens, <s> 1 and </s> 2; context 4096; plain RoPE with base 10000.
LLAMA2_7B: Final[Preset] = {
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
}

LLAMA2_PRESETS: Final[Mapping[str, Preset]] = {
    "llama2-7b": LLAMA2_7B,
    "llama2-13b": {
        **LLAMA2_7B,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "llama2-70b": {
        **LLAMA2_7B,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    # The 7B with every other layer removed.
    "llama2-3b": {**LLAMA2_7B, "num_hidden_layers": 16},
    # 16 more tokens, for infilling, and a longer context from a larger RoPE base.
    "codellama-7b": {
        **LLAMA2_7B,
        "vocab_size": 32016,
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "tiny-llama2": {
        **LLAMA2_7B,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}

LLAMA2_ALIASES: Final[Mapping[str, str]] = {
    "meta-llama/Llama-2-7b-hf": "llama2-7b",
    "meta-llama/Llama-2-7b-chat-hf": "llama2-7b",
    "NousResearch/Llama-2-7b-hf": "llama2-7b",
    "meta-llama/Llama-2-13b-hf": "llama2-13b",
    "meta-llama/Llama-2-13b-chat-hf": "llama2-13b",
    "NousResearch/Llama-2-13b-hf": "llama2-13b",
    "meta-llama/Llama-2-70b-hf": "llama2-70b",
    "meta-llama/Llama-2-70b-chat-hf": "llama2-70b",
    "NousResearch/Llama-2-70b-hf": "llama2-70b",
    "winglian/Llama-2-3b-hf": "llama2-3b",
    "codellama/CodeLlama-7b-hf": "codellama-7b",
    "meta-llama/CodeLlama-7b-hf": "codellama-7b",
}

# tiktoken vocabulary of 128256 tokens, <|begin_of_text|> 128000 and <|end_of_text|> 128001; RoPE base 500000.
LLAMA3_THETA: Final = 500_000.0
LLAMA3_8B: Final[Preset] = {
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
    "rope_parameters": {"rope_type": "default", "rope_theta": LLAMA3_THETA},
    "tie_word_embeddings": False,
}


def llama3_scaling(factor: float, original: int = 8192) -> dict[str, object]:
    """Returns Llama 3.1's RoPE scaling: long wavelengths times `factor`, short ones unchanged, a ramp in between."""
    return {
        "rope_type": "llama3",
        "rope_theta": LLAMA3_THETA,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


# 3.1 and 3.2 are published with 131072 positions, although that is not factor times 8192.
LLAMA3_2: Final[Preset] = {
    **LLAMA3_8B,
    "max_position_embeddings": 131072,
    "rope_parameters": llama3_scaling(32.0),
    "tie_word_embeddings": True,
}

LLAMA3_PRESETS: Final[Mapping[str, Preset]] = {
    "llama3-8b": LLAMA3_8B,
    "llama3.1-8b": {**LLAMA3_8B, "max_position_embeddings": 131072, "rope_parameters": llama3_scaling(8.0)},
    "llama3-70b": {
        **LLAMA3_8B,
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
        **LLAMA3_8B,
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

LLAMA3_ALIASES: Final[Mapping[str, str]] = {
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


def scaled_preset(name: str) -> Preset | None:
    """Returns preset `scaled-all-S` or `scaled-n_layers-S`: a Llama of any size S, to find the largest that fits a GPU.

    `all` is 256·S wide, with 8·S layers and 8·S heads of 32; `n_layers` is Llama-3-8B with 32 + 8·(S - 1) layers. The
    vocabulary is 131072, the MLP 1.3 · 8/3 times as wide as the model, in multiples of 256.
    """
    found = re.fullmatch(r"scaled-(all|n_layers)-([1-9]\d*)", name)
    if found is None:
        return None
    scale = int(found[2])
    if found[1] == "n_layers":
        return {**LLAMA3_8B, "vocab_size": 131072, "num_hidden_layers": 32 + 8 * (scale - 1)}
    hidden = 256 * scale
    return {
        **LLAMA3_8B,
        "vocab_size": 131072,
        "hidden_size": hidden,
        "intermediate_size": -(-int(1.3 * int(8 * hidden / 3)) // 256) * 256,
        "num_hidden_layers": 8 * scale,
        "num_attention_heads": 8 * scale,
        "num_key_value_heads": 8 * scale,
    }


LLAMA2: Final = ModelFamily("llama2", LLAMA2_PRESETS, LLAMA2_ALIASES)
LLAMA3: Final = ModelFamily("llama3", LLAMA3_PRESETS, LLAMA3_ALIASES, scaled_preset)
OTHERS: Final = ModelFamily(
    "other families", published_configs.CONFIGS, published_configs.HUB_IDS, program="lightseq train"
)
FAMILIES: Final = (LLAMA2, LLAMA3, OTHERS)
