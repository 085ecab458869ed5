"""The published Llama 2 and Code Llama architectures as `LlamaConfig` arguments, and the hub ids that have them."""

from collections.abc import Mapping
from typing import Final

# SentencePiece vocabulary of 32000 tokens, <s> 1 and </s> 2; context 4096; plain RoPE with base 10000.
LLAMA2: Final[Mapping[str, object]] = {
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

PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "llama2-7b": LLAMA2,
    "llama2-13b": {
        **LLAMA2,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "llama2-70b": {
        **LLAMA2,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    # The 7B with every other layer removed.
    "llama2-3b": {**LLAMA2, "num_hidden_layers": 16},
    # 16 more tokens, for infilling, and a longer context from a larger RoPE base.
    "codellama-7b": {
        **LLAMA2,
        "vocab_size": 32016,
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "tiny-llama2": {
        **LLAMA2,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}

ALIASES: Final[Mapping[str, str]] = {
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
