"""Tiny models that take images, with processors of transformers' own classes that need no torchvision."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final

from transformers import (
    AutoProcessor,
    Gemma3Processor,
    Gemma4Config,
    Gemma4Processor,
    Idefics3Processor,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.tiny_models import plain_model, tiny_config

PATCH: Final = 4
SIDE: Final = 16  # of an image, in pixels; one of Qwen's processors may keep another shape with as many pixels
FEATURES: Final = (SIDE // PATCH) ** 2 // 4  # of such an image where four patches make one


class ImagesOnly:
    """Mixin for processors of Qwen's models that leaves out videos, whose processors need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        for name in ("image", "video"):
            token = f"<|{name}_pad|>"
            vars(self).update({f"{name}_token": token, f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)})
        for name in ("start", "end"):
            token = f"<|vision_{name}|>"
            key = f"vision_{name}_token"
            vars(self).update({key: token, f"{key}_id": tokenizer.convert_tokens_to_ids(token)})
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)  # type: ignore[arg-type]


class Qwen2VLImagesProcessor(ImagesOnly, Qwen2VLProcessor): ...


class Qwen2_5_VLImagesProcessor(ImagesOnly, Qwen2_5_VLProcessor): ...


class Qwen3VLImagesProcessor(ImagesOnly, Qwen3VLProcessor): ...


def register_processors() -> None:
    """Lets AutoProcessor load the processors of this file."""
    AutoProcessor.register(Qwen2VLConfig, Qwen2VLImagesProcessor, exist_ok=True)
    AutoProcessor.register(Qwen2_5_VLConfig, Qwen2_5_VLImagesProcessor, exist_ok=True)
    AutoProcessor.register(Qwen3VLConfig, Qwen3VLImagesProcessor, exist_ok=True)
    AutoProcessor.register(Gemma4Config, Gemma4ImagesProcessor, exist_ok=True)


class Gemma4ImagesProcessor(Gemma4Processor):
    """Processor of Gemma 4 without sounds and videos."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        for name in ("image", "boi", "eoi", "boa", "eoa", "audio", "video"):
            setattr(self, f"{name}_token", GEMMA4_TOKENS[f"{name}_token"])
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(GEMMA4_TOKENS[f"{name}_token"]))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)  # type: ignore[arg-type]


GEMMA4_TOKENS: Final = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
QWEN_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IDS: Final = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QWEN_VISION: Final = {"patch_size": PATCH, "out_hidden_size": 32}
DEEP: Final = {**QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
SHALLOW: Final = {**DEEP, "deepstack_visual_indexes": []}
GEMMA_TOKENS: Final = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
SQUARE: Final = {"height": SIDE, "width": SIDE}


def _of_qwen(kind: type[ProcessorMixin]) -> Callable[..., ProcessorMixin]:
    def make(tokenizer: PreTrainedTokenizerFast, template: str) -> ProcessorMixin:
        size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": SIDE**2}
        images = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, size=size)
        return kind(images, tokenizer, chat_template=template)

    return make


def _of_gemma3(tokenizer: PreTrainedTokenizerFast, template: str) -> ProcessorMixin:
    return Gemma3Processor(Gemma3ImageProcessorPil(size=SQUARE), tokenizer, template, image_seq_length=FEATURES)


def _of_gemma4(tokenizer: PreTrainedTokenizerFast, template: str) -> ProcessorMixin:
    return Gemma4ImagesProcessor(Gemma4ImageProcessorPil(patch_size=PATCH, max_soft_tokens=70), tokenizer, template)


def _of_idefics3(tokenizer: PreTrainedTokenizerFast, template: str) -> ProcessorMixin:
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=FEATURES, chat_template=template)


def _of_llava(tokenizer: PreTrainedTokenizerFast, template: str) -> ProcessorMixin:
    images = LlavaImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SQUARE)
    return LlavaProcessor(images, tokenizer, PATCH, "default", template, num_additional_image_tokens=1)


def _of_llava_next(tokenizer: PreTrainedTokenizerFast, template: str) -> ProcessorMixin:
    pinpoints = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    images = LlavaNextImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SQUARE, image_grid_pinpoints=pinpoints)
    return LlavaNextProcessor(images, tokenizer, PATCH, "default", template, num_additional_image_tokens=1)


@dataclass(frozen=True)
class Family:
    """Needs of a kind of model beside the sizes of `tiny_config`."""

    template: str  # among TRL's chat templates
    processor: Callable[[PreTrainedTokenizerFast, str], ProcessorMixin]
    tokens: tuple[str, ...] | Mapping[str, str]  # special ones; a mapping also names them for the tokenizer
    ids: Mapping[str, str]  # fields of the config that hold ids of tokens
    vision: Mapping[str, Any]  # of the encoder's config
    text: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)


CLIP: Final = {"patch_size": PATCH, "image_size": SIDE}
HYBRID: Final = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
PINPOINTS: Final = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
FAMILIES: Final[Mapping[str, Family]] = {
    "qwen2_vl": Family(
        "qwen2_5_vl", _of_qwen(Qwen2VLImagesProcessor), QWEN_TOKENS, QWEN_IDS,
        {"patch_size": PATCH, "embed_dim": 32, "hidden_size": 32},
    ),
    "qwen2_5_vl": Family(
        "qwen2_5_vl", _of_qwen(Qwen2_5_VLImagesProcessor), QWEN_TOKENS, QWEN_IDS,
        {**QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 4 * PATCH},
    ),
    "qwen3_vl": Family(
        "qwen3_vl", _of_qwen(Qwen3VLImagesProcessor), QWEN_TOKENS, QWEN_IDS, DEEP, text={"num_hidden_layers": 3}
    ),
    "qwen3_5": Family(
        "qwen3_5_nothink", _of_qwen(Qwen3VLImagesProcessor), QWEN_TOKENS, QWEN_IDS, SHALLOW, text=HYBRID
    ),
    "qwen3_5_moe": Family(
        "qwen3_6", _of_qwen(Qwen3VLImagesProcessor), QWEN_TOKENS, QWEN_IDS, SHALLOW, text=HYBRID
    ),
    "gemma3": Family(
        "gemma3", _of_gemma3, GEMMA_TOKENS,
        {"image_token_id": "<image_soft_token>", "boi_token_index": "<start_of_image>",
         "eoi_token_index": "<end_of_image>"},
        {**CLIP, "vision_use_head": False}, {"layer_types": ["sliding_attention", "full_attention"]},
        {"mm_tokens_per_image": FEATURES},
    ),
    "gemma4": Family(
        "gemma4", _of_gemma4, GEMMA4_TOKENS,
        {f"{name}_id": GEMMA4_TOKENS[name] for name in GEMMA4_TOKENS if name != "eoa_token"},
        {"patch_size": PATCH, "position_embedding_size": 630, "default_output_length": 70},
    ),
    "idefics3": Family(
        "idefics3", _of_idefics3, ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        {"image_token_id": "<image>"}, CLIP, whole={"scale_factor": 2},
    ),
    "llava": Family("llava_next", _of_llava, ("<image>",), {"image_token_id": "<image>"}, CLIP),
    "llava_next": Family(
        "llava_next", _of_llava_next, ("<image>",), {"image_token_id": "<image>"}, CLIP,
        whole={"image_grid_pinpoints": PINPOINTS},
    ),
}  # fmt: skip


def processor_of(kind: str, tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    """Returns a processor with a tokenizer of its own, which has the tokens of `tokenizer` and those of images."""
    family, tokens = FAMILIES[kind], FAMILIES[kind].tokens
    own = PreTrainedTokenizerFast(
        tokenizer_object=deepcopy(tokenizer.backend_tokenizer),
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        extra_special_tokens=dict(tokens) if isinstance(tokens, Mapping) else [*tokens],
    )
    template = (files("trl") / "chat_templates" / f"{family.template}.jinja").read_text()
    return family.processor(own, template)


def config_of(kind: str, processor: Any, **text: Any) -> PreTrainedConfig:
    """Returns the config of a tiny model for a processor; `text` changes fields of its decoder."""
    family, tokenizer = FAMILIES[kind], processor.tokenizer
    encoder = {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    encoder |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    config: Any = tiny_config(kind, **({"vision_config": encoder} if kind == "gemma4" else {}))
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in family.ids.items()}
    own = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    vars(config.vision_config).update(family.vision)
    vars(config.get_text_config()).update({**own, **family.text, **text})
    if kind == "gemma4":
        config.get_text_config().vocab_size_per_layer_input = len(tokenizer)
    if "qwen" in kind:  # positions have three axes
        of_text = config.get_text_config()
        of_text.rope_parameters = {**of_text.rope_parameters, "mrope_section": [1, 1, 2], "rope_theta": 100.0}
    for name, value in {**own, **ids, **family.whole}.items():
        setattr(config, name, value)
    return config


def model_of(kind: str, processor: Any, **text: Any) -> PreTrainedModel:
    """Returns a tiny model with random weights, the same at every call."""
    return plain_model(config_of(kind, processor, **text))
