"""Tiny models of transformers' classes with random weights, for tests and for the sweep over all classes."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModel

from lightseq.models.build import model_class
from lightseq.models.decoder import PLACEHOLDER

LENGTH, VOCABULARY = 50, 64
MAX_PARAMETERS = 8_000_000
# Small sizes by config field. A config takes the fields that it has.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_size": 32, "n_embd": 32, "d_model": 32, "embedding_size": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 48, "n_inner": 48, "d_ff": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_dim": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256, "initializer_range": 0.2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "num_expert_group": 1, "mlp_layer_types": None, "n_groups": 1, "moe_k": 2,
    "moe_topk": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "rotary_dim": 8,
    "first_k_dense_replace": 1, "sliding_window": 9,
    "linear_num_heads": 4, "linear_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_n_groups": 1,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "state_size": 8, "ssm_state_size": 8, "hidden_size_per_layer_input": 8,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0, "attention_dropout": 0.0,
    "hidden_dropout": 0.0, "residual_dropout": 0.0, "activation_dropout": 0.0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
VQ = {"base_channels": 32, "latent_channels": 8, "embed_dim": 8, "num_embeddings": 8, "num_res_blocks": 1}
# Further fields that a class needs to be built small.
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "granitemoehybrid",
            "lara_mini", "bailing_hybrid",
        ),
        HYBRID,
    ),
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_expand": 2},
    "nemotron_h": {"layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "num_hidden_layers": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon": {"head_dim": None},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [48] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {  # as E2B, with fewer layers
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm4_moe_lite": {"v_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "glm4v_text": {"rope_parameters": THREE_AXES},
    "glm_ocr_text": {"rope_parameters": THREE_AXES},
    "glm4v_vision": {"out_hidden_size": 32, "depth": 2},
    "glm_ocr_vision": {"out_hidden_size": 32, "depth": 2},
    "llama4_vision_model": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    "paddleocr_vl_text": {"rope_parameters": THREE_AXES},
    "qwen2_vl_text": {"rope_parameters": THREE_AXES},
    "qwen2_vl_vision": {"embed_dim": 32, "depth": 2},
    "qwen2_5_vl_text": {"rope_parameters": THREE_AXES},
    "qwen2_5_vl_vision": {"out_hidden_size": 32, "depth": 2},
    "llama4_text": {
        "num_hidden_layers": 4, "attention_chunk_size": 7, "no_rope_layers": [1, 0, 1, 0], "floor_scale": 3,
        "attn_temperature_tuning": True, "moe_layers": [1, 2], "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
    },
    "apertus1p5": {"image_token_offset": 40, "audio_token_offset": 48},
    "apertus1p5_vision_tokenizer": VQ | {"codebook_size": 8, "attn_resolutions": []},
    "chameleon": {"vocabulary_map": {"<image>": 2}},
    "chameleon_vqgan": VQ,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_ocr2_sam_vision_model": {"mlp_dim": 48, "output_channels": 8, "downsample_channels": [16, 32]},
    "diffusion_gemma_text": {
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "emu3": {"vocabulary_map": {"<|extra_200|>": 3, "<image>": 2}},
    "emu3_vqgan": VQ | {"hidden_size": 32, "codebook_size": 8, "latent_channels": 4, "attn_resolutions": []},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16], "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": THREE_AXES | {"mrope_section": [1, 1, 2]},
    },
    "ernie4_5_vl_moe_vision": {"depth": 2},
    "gemma4_assistant": {
        "backbone_hidden_size": 32, "num_centroids": 4, "centroid_intermediate_top_k": 2,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "vocab_size": 64, "num_hidden_layers": 2,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False,
            "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        },
    },
    "glm4v_moe_text": {"rope_parameters": THREE_AXES | {"partial_rotary_factor": 1.0}},
    "glm4v_moe_vision": {"out_hidden_size": 32, "depth": 2},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2",
        "vision_config": {  # the projector has a head for every 64 dimensions
            "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    },
    "granite_docling_vision": {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    "hunyuan_vl_text": {"rope_parameters": THREE_AXES | {"mrope_section": [1, 1, 1, 1]}},
    "hunyuan_vl_vision": {"out_hidden_size": 32, "text_hidden_size": 32},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_vision": {"text_hidden_size": 32, "projection_hidden_dim": 32},
    "janus_vision_model": {"projection_dim": 32},
    "janus_vqgan": VQ | {"image_token_embed_dim": 32, "projection_dim": 32},
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "mistral4": {"head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "text_hidden_size": 32},
    "molmo2_text": {"additional_vocab_size": 4},
    "muse_glimmer": {"projector_hidden_size": 32, "out_hidden_size": 32},
    "muse_spark": {"projector_hidden_size": 32, "out_hidden_size": 32},
    "muse_spark_audio": {
        "num_hidden_layers": 2, "patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1],
        "out_hidden_size": 32,
    },
    "muse_spark_text": {"moe_hidden_size": 16},
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "model_args": {"embed_dim": 32}}},
    "qwen2_5_omni_audio_encoder": {"output_dim": 32},
    "qwen2_5_omni_text": {"rope_parameters": THREE_AXES},
    "qwen2_5_omni_vision_encoder": {"out_hidden_size": 32, "depth": 2},
    "wavtokenizer_encoder": {
        "codebook_dim": 32, "hidden_size": 32, "codebook_size": 8, "num_filters": 4, "decoder_hidden_size": 32,
        "decoder_intermediate_size": 48, "decoder_num_layers": 1,
    },
    "step3p5": {
        "share_expert_dim": 16, "num_sliding_attention_heads": 6, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "lfm3": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "sliding_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


class NotBuilt(Exception):
    """Error for a class that transformers cannot build or run at a small size."""


@contextmanager
def built_by_transformers() -> Iterator[None]:
    """Turns every exception of a model's or config's code into NotBuilt."""
    try:
        yield
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(named(error)) from error


def named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    with built_by_transformers():
        sizes = sizes_of(kind()) | SPECIAL.get(model_type, {})
        return kind(**{name: size for name, size in sizes.items() if size is not None} | changes)


def sizes_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the small sizes for the fields of a config and of the configs inside it."""
    published = config.to_dict()
    known = {name: size for name, size in SIZES.items() if published.get(name) is not None}
    # Placeholders of images that are ordinary tokens here become one that no row has.
    known |= {
        name: 2
        for name, token in published.items()
        if PLACEHOLDER.fullmatch(name) and isinstance(token, int) and token < VOCABULARY
    }
    if "head_dim" in config.to_dict():
        known["head_dim"] = SIZES["head_dim"]
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rope:  # its sum is half a head
        known["rope_parameters"] = {**rope, "mrope_section": [1, 1, 2]}
    if hasattr(config, "kv_lora_rank"):  # latent attention has as many key heads as query heads
        known["num_key_value_heads"] = 4
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    return known | {
        name: {**sizes_of(part), **SPECIAL.get(part.model_type, {}), "model_type": part.model_type}
        for name, part in parts.items()
    }


def options_of(config: PreTrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields options that are easy to get wrong, with the config changes that turn them on."""
    if hasattr(config, "output_router_logits"):
        yield "router loss", {"output_router_logits": True}
    if hasattr(config, "z_loss_coefficient"):
        yield "z loss", {"z_loss_coefficient": 0.5}
    published = getattr(config, "rope_parameters", None) or {}
    for name, length in (("dynamic", 16), ("longrope", 128)):
        if any(isinstance(value, dict) for value in published.values()):  # one entry per kind of layer
            ropes = {kind: rope(config, value or {}, name) for kind, value in published.items()}
            yield f"rope {name}", {"rope_parameters": ropes}
        elif published:
            changed = rope(config, published, name)
            yield f"rope {name}", {"rope_parameters": changed, "max_position_embeddings": length}


def rope(config: PreTrainedConfig, published: dict[str, Any], kind: str) -> dict[str, Any]:
    changed = {"rope_theta": 1e4, **published, "rope_type": kind, "factor": 4.0}
    if kind == "longrope":
        published_dims = config.to_dict()
        dim = published_dims.get("qk_rope_head_dim") or published_dims.get("head_dim") or 8
        frequencies = int(dim * changed.get("partial_rotary_factor", 1.0)) // 2
        changed |= {"short_factor": [1.0] * frequencies, "long_factor": [2.0] * frequencies}
        changed |= {"original_max_position_embeddings": 32, "short_mscale": 1.0, "long_mscale": 1.0}
    return changed


def plain_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Builds the model for plain transformers. Noise on the weights gives zero-initialized parts an effect."""
    config, kind = copy.deepcopy(config), model_class(config)
    with built_by_transformers():
        with torch.device("meta"):
            count = sum(p.numel() for p in kind._from_config(copy.deepcopy(config)).parameters())
        if count > MAX_PARAMETERS:
            raise NotBuilt(f"{count:,} parameters")
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
        return model


def empty_timm_towers() -> None:
    """Empties towers that the package timm builds. Text does not pass through them, so timm need not be installed."""
    TimmWrapperModel.__init__ = lambda tower, config: PreTrainedModel.__init__(tower, config)  # type: ignore[method-assign]


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
