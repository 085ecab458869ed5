"""Inputs of a model with images, as its processor makes them, and checks of the model and of each batch."""

from collections.abc import Mapping
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightseq.models.decoder import has_towers
from lightseq.parts.probes import sees_later_tokens_of_images
from lightseq.utils.tensors import upload

PIXELS: Final = "pixel_values"
TOKEN_TYPES: Final = ("mm_token_type_ids", "token_type_ids")  # 1 for tokens of images
MASK: Final = "pixel_attention_mask"  # 0 for padding of images that are smaller than the largest
BESIDE_PIXELS: Final = ("image_grid_thw", "image_sizes", "spatial_shapes", MASK)  # have a row for each image
IMAGE_INPUTS: Final = (PIXELS, *BESIDE_PIXELS, *TOKEN_TYPES)  # image arguments of `shard_batch`
ALL_INPUTS: Final = "pass all that the processor returns"
PASS_ALL: Final = f"{ALL_INPUTS}, or leave the row out"
REMEDY: Final = "train the model on rows of text, or on one rank without lightseq"
TEXT_ARGUMENTS: Final = frozenset(
    {
        "self", "args", "kwargs", "input_ids", "attention_mask", "position_ids", "past_key_values", "cache",
        "cache_position", "inputs_embeds", "labels", "use_cache", "logits_to_keep", "output_attentions",
        "output_hidden_states", "output_router_logits", "return_dict",
    }
)  # fmt: skip


def other_inputs(model: PreTrainedModel) -> frozenset[str]:
    """Returns the arguments of a model that are neither text nor options of text models."""
    if not has_towers(model.config):
        return frozenset()
    return frozenset(forward_arguments(model) - TEXT_ARGUMENTS)


def forward_arguments(model: PreTrainedModel) -> set[str]:
    """Returns the names of the arguments that a model or the model below its head takes."""
    return {name for part in (model, model.base_model) for name in signature(type(part).forward).parameters}


def checked_images(model: PreTrainedModel, input_ids: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the images of a batch without token types. Raises ValueError if they cannot be split exactly."""
    name, images = type(model).__name__, dict(given)
    if (reason := why_refused(model)) is not None:
        raise ValueError(f"{name} {reason}; {REMEDY}")
    check_shapes(model, images)
    is_image = (input_ids == model.config.image_token_id).to(images[PIXELS].device)
    if sees_later_tokens_of_images(model) and not images.keys() & set(TOKEN_TYPES):
        raise ValueError(
            f"{PIXELS} without token_type_ids, by which tokens of an image see each other in {name}; {ALL_INPUTS}"
        )
    for key in TOKEN_TYPES:
        types = images.pop(key, None)
        if types is not None and (
            types.shape != is_image.shape or not bool((types.to(is_image.device) == is_image).all())
        ):
            raise ValueError(
                f"{key} are not 1 for image tokens and 0 for others, such as those of videos; pass what the processor "
                "returns for text and images"
            )
    return images


def check_shapes(model: PreTrainedModel, images: Mapping[str, Tensor]) -> None:
    """Raises ValueError for images without a part, or with parts of shapes or types that no processor returns."""
    pixels = images[PIXELS]
    if pixels.ndim < 2 or not pixels.numel():
        raise ValueError(f"{PIXELS} are {tuple(pixels.shape)}, without an image; leave them out of a batch of text")
    if "image_grid_thw" in forward_arguments(model) and "image_grid_thw" not in images:
        raise ValueError(f"{PIXELS} without image_grid_thw, which {type(model).__name__} needs; {ALL_INPUTS}")
    for key, sides in {key: images[key] for key in BESIDE_PIXELS[:3] if key in images}.items():
        if sides.is_floating_point() or sides.is_complex() or sides.dtype == torch.bool:
            raise ValueError(f"{key} are {sides.dtype}; give whole numbers, as the processor does")
        if sides.ndim != 2 or sides.shape[1] != (3 if key == "image_grid_thw" else 2):
            wanted = "(images, 3)" if key == "image_grid_thw" else "(images, 2)"
            raise ValueError(f"{key} are {tuple(sides.shape)}; give {wanted}, as the processor does")
    if (mask := images.get(MASK)) is not None:
        shape = tuple(pixels.shape)
        if tuple(mask.shape) not in [shape[:i] + shape[i + 1 :] for i in range(1, len(shape))]:
            raise ValueError(f"{MASK} {tuple(mask.shape)} does not fit {PIXELS} {shape}; {ALL_INPUTS}")


def check_text_only(input_ids: Tensor, placeholders: Mapping[int, str], remedy: str = PASS_ALL) -> None:
    """Raises ValueError for tokens of images or audio in a batch without any. Those on a GPU are checked there.

    `placeholders` are the names of such token ids.
    """
    found = torch.isin(input_ids, upload(torch.tensor([*placeholders]), input_ids.device))
    if input_ids.device.type != "cpu":
        torch._assert_async(~found.any(), "input_ids have tokens of images or audio, but there are no pixel_values")
    elif found.any():
        row, token = (int(x) for x in found.nonzero()[0])
        name = placeholders[int(input_ids[row, token])]
        raise ValueError(
            f"row {row} has token id {int(input_ids[row, token])}, the model's {name}, but the batch has no "
            f"pixel_values; {remedy}"
        )


def why_refused(model: PreTrainedModel) -> str | None:
    """Returns why a model's images cannot be split exactly over ranks, None if they can."""
    takes = forward_arguments(model)
    if not isinstance(getattr(model.config, "image_token_id", None), int):
        return "has no image_token_id in its config, which tells where its images are"
    index = getattr(model.base_model, "get_rope_index", None)
    if index is None and takes & set(TOKEN_TYPES) and not sees_later_tokens_of_images(model):
        kind = next(name for name in TOKEN_TYPES if name in takes)
        return f"takes {kind}, by which tokens attend to later ones in a way that attention over ranks does not know"
    if index is not None and not {"mm_token_type_ids", "image_grid_thw"} <= signature(index).parameters.keys():
        return "computes positions from other inputs than image_grid_thw"
    for part in ("vision_config", "perceiver_config"):
        for name, rate in part_of_config(model, part).items():
            if isinstance(rate, float) and rate > 0 and "drop" in name:
                return f"has {name} {rate} in its {part}, and ranks would drop other parts of an image; set it to 0"
    return None


def part_of_config(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """Returns the settings of a part of a model, such as `vision_config`; none without it."""
    config = getattr(model.config, name, None)
    return {} if config is None else dict(config.to_dict())
