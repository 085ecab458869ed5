"""Images of a batch: a rank runs the encoders on those images whose tokens it holds, and keeps their features only.

The sum of all ranks' gradients of encoders and projector then is that of one process, without communication.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.hf.image_attention import IMAGE_BLOCKS, ImageBlocks, image_blocks
from lightseq.models.decoder import has_towers, placeholder_ids
from lightseq.parts.changes import Changes
from lightseq.parts.probes import sees_later_tokens_of_images
from lightseq.sequence.documents import Documents
from lightseq.utils.tensors import upload

PIXELS: Final = "pixel_values"
TOKEN_TYPES: Final = ("mm_token_type_ids", "token_type_ids")  # 1 for tokens of images
MASK: Final = "pixel_attention_mask"  # 0 for padding of images that are smaller than the largest
BESIDE_PIXELS: Final = ("image_grid_thw", "image_sizes", "spatial_shapes", MASK)  # have a row for each image
IMAGE_INPUTS: Final = (PIXELS, *BESIDE_PIXELS, *TOKEN_TYPES)  # what `shard_batch` takes of images
LOCAL_IMAGES: Final = "local_images"  # key of `LocalImages` in a batch
# Fields of a model's image features. Features of tokens are in the last two.
FEATURE_FIELDS: Final = frozenset(
    {"last_hidden_state", "hidden_states", "attentions", "pooler_output", "deepstack_features"}
)
# Models by the name of their context, for `shard_batch`.
_MODELS: WeakValueDictionary[str, PreTrainedModel] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class LocalImages:
    """Choice of the features that a rank keeps. Not a tensor, because model wrappers move tensors to the device."""

    kept: Tensor  # int64 on the CPU: features of this rank's tokens, among those of the images that it runs
    sizes: tuple[int, ...] | None  # features of each image that this rank runs; None if it runs all
    total: int  # features of all of them
    positions: Tensor  # of this rank's tokens in their document, int64 (batch or 1, local)
    blocks: ImageBlocks | None  # for attention, where tokens of an image see later ones


class ImageFeatures:
    """State of a model's forward pass with images, which the checks of its inputs set."""

    def __init__(self) -> None:
        self._images: LocalImages | None = None
        self._used = False

    def begin(self, kwargs: dict[str, Any]) -> None:
        """Takes the images of a pass. Raises ValueError for images that `shard_batch` has not made."""
        images, pixels = kwargs.pop(LOCAL_IMAGES, None), kwargs.get(PIXELS)
        if pixels is not None and images is None:
            raise ValueError(
                f"{PIXELS} belong to the tokens of the whole batch; pass them to shard_batch, and what it returns to "
                "the model"
            )
        self._images, self._used = images, False
        if images is not None and images.blocks is not None:
            kwargs[IMAGE_BLOCKS] = images.blocks

    def end(self, name: str, failed: bool) -> None:
        """Forgets the images of a pass. Raises ValueError if the model has not asked for their features."""
        images, self._images = self._images, None
        if images is not None and not self._used and not failed:
            raise ValueError(f"{name} did not call get_image_features, so its images cannot be split; {REMEDY}")

    @property
    def positions(self) -> Tensor | None:
        """Returns the positions in the sequence of this pass's tokens; None without images."""
        return None if self._images is None else self._images.positions

    def of_local_tokens(self, model: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what a model's `get_image_features` does, without the features of other ranks' tokens."""
        images, output = self._images, function(*args, **kwargs)
        if images is None:
            return output
        name, self._used = type(model).__name__, True
        known = {field: value for field, value in dict(output).items() if value is not None}
        # Without experts in the encoder, the router logits that were asked for are an empty tuple.
        fields = {field: value for field, value in known.items() if field in FEATURE_FIELDS or len(value)}
        deepstack = fields.get("deepstack_features", [])
        if fields.keys() - FEATURE_FIELDS or "pooler_output" not in fields or not isinstance(deepstack, list | tuple):
            raise ValueError(f"{name} returns features of images in an unknown form; {REMEDY}")
        fields["pooler_output"] = _kept(fields["pooler_output"], images, name)
        if deepstack:
            fields["deepstack_features"] = [_kept(level, images, name) for level in deepstack]
        return type(output)(**fields)  # DDP could not make an output with unknown fields anew


ALL_INPUTS: Final = "pass all that the processor returns"
REMEDY: Final = "train the model on rows of text, or on one rank without lightseq"


def install(model: PreTrainedModel, context: SequenceContext, changes: Changes) -> ImageFeatures:
    """Lets a model with images keep the features of a rank's own tokens, and `shard_batch` find the model."""
    features, part = ImageFeatures(), model.base_model
    if has_towers(model.config):
        if hasattr(part, "get_image_features"):
            function = partial(features.of_local_tokens, part, part.get_image_features)
            changes.set_attribute(part, "get_image_features", function)
        _MODELS[context.name] = model
        changes.call_later(partial(_MODELS.pop, context.name, None))
    return features


def other_inputs(model: PreTrainedModel) -> frozenset[str]:
    """Returns the arguments of a model that are neither text nor options of text models."""
    if not has_towers(model.config):
        return frozenset()
    return frozenset(_parameters(model) - _TEXT_ARGUMENTS)


_TEXT_ARGUMENTS: Final = frozenset(
    {
        "self", "args", "kwargs", "input_ids", "attention_mask", "position_ids", "past_key_values", "cache",
        "cache_position", "inputs_embeds", "labels", "use_cache", "logits_to_keep", "output_attentions",
        "output_hidden_states", "output_router_logits", "return_dict",
    }
)  # fmt: skip


def _parameters(model: PreTrainedModel) -> set[str]:
    return {name for part in (model, model.base_model) for name in signature(type(part).forward).parameters}


def whole_images(
    context: SequenceContext, input_ids: Tensor, given: Mapping[str, Any]
) -> tuple[PreTrainedModel, dict[str, Tensor]] | None:
    """Returns the model and the images of a whole batch; None for a batch of text.

    Raises ValueError for other inputs than images, and for a model whose images cannot be split exactly.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if unknown := [name for name in given if name not in IMAGE_INPUTS]:
        raise ValueError(
            f"{unknown[0]} is not supported: shard_batch splits text and images ({', '.join(IMAGE_INPUTS)}); {REMEDY}"
        )
    if wrong := [name for name, value in given.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{wrong[0]} is a {type(given[wrong[0]]).__name__}; give a tensor")
    model = _MODELS.get(context.name)
    if given.keys() <= set(TOKEN_TYPES) and not any(bool(value.any()) for value in given.values()):
        if model is not None and (placeholders := placeholder_ids(model.config)):
            check_text_only(input_ids, placeholders)
        return None
    if PIXELS not in given:
        raise ValueError(f"{next(iter(given))} without {PIXELS}; {ALL_INPUTS}")
    if model is None or not hasattr(model.base_model, "get_image_features"):
        raise ValueError(f"{PIXELS} are given, but the context's model takes no images, or is gone; {REMEDY}")
    if (reason := why_refused(model)) is not None:
        raise ValueError(f"{type(model).__name__} {reason}; {REMEDY}")
    check_shapes(model, given)
    is_image = (input_ids == model.config.image_token_id).to(given[PIXELS].device)
    if sees_later_tokens_of_images(model) and not given.keys() & set(TOKEN_TYPES):
        raise ValueError(
            f"{PIXELS} without token_type_ids, by which tokens of an image see each other in {type(model).__name__}; "
            "pass all that the processor returns"
        )
    for name in TOKEN_TYPES:
        types = given.pop(name, None)
        if types is not None and (
            types.shape != is_image.shape or not bool((types.to(is_image.device) == is_image).all())
        ):
            raise ValueError(
                f"{name} are not 1 for image tokens and 0 for others, such as those of videos; pass what the processor "
                "returns for text and images"
            )
    return model, given


def check_shapes(model: PreTrainedModel, images: Mapping[str, Tensor]) -> None:
    """Raises ValueError for images without a part, or with parts of shapes or types that no processor returns."""
    pixels = images[PIXELS]
    if pixels.ndim < 2 or not pixels.numel():
        raise ValueError(f"{PIXELS} are {tuple(pixels.shape)}, without an image; leave them out of a batch of text")
    if "image_grid_thw" in _parameters(model) and "image_grid_thw" not in images:
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


def check_text_only(input_ids: Tensor, placeholders: Mapping[int, str]) -> None:
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
            "pixel_values; pass all that the processor returns, or leave the row out"
        )


def why_refused(model: PreTrainedModel) -> str | None:
    """Returns why a model's images cannot be split exactly over ranks, None if they can."""
    takes = _parameters(model)
    if not isinstance(getattr(model.config, "image_token_id", None), int):
        return "has no image_token_id in its config, which tells where its images are"
    index = getattr(model.base_model, "get_rope_index", None)
    if index is None and takes & set(TOKEN_TYPES) and not sees_later_tokens_of_images(model):
        kind = next(name for name in TOKEN_TYPES if name in takes)
        return f"takes {kind}, by which tokens attend to later ones in a way that attention over ranks does not know"
    if index is not None and not {"mm_token_type_ids", "image_grid_thw"} <= signature(index).parameters.keys():
        return "computes positions from other inputs than image_grid_thw"
    for part in ("vision_config", "perceiver_config"):
        for name, rate in _part_of_config(model, part).items():
            if isinstance(rate, float) and rate > 0 and "drop" in name:
                return f"has {name} {rate} in its {part}, and ranks would drop other parts of an image; set it to 0"
    return None


def _part_of_config(model: PreTrainedModel, name: str) -> dict[str, Any]:
    config = getattr(model.config, name, None)
    return {} if config is None else dict(config.to_dict())


def local_images(
    context: SequenceContext,
    model: PreTrainedModel,
    images: Mapping[str, Tensor],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    documents: Documents | None,
    boundaries: tuple[int, ...] | None,
    positions: Tensor,
) -> dict[str, Any]:
    """Returns the images that this rank runs, and position ids if the model has its own, as arguments of the model.

    A rank that holds no token of an image runs the smallest one and keeps nothing of it, so that FSDP2 and DDP see the
    encoders run on every rank. `positions` are those of this rank's tokens in their documents.
    """
    images = _without_padding(model, images)
    is_image = (input_ids == model.config.image_token_id).cpu()
    count = int(is_image.sum())
    sizes = _features_of_images(model, images, count)
    number = torch.where(is_image, is_image.flatten().cumsum(0).view_as(is_image) - 1, -1)
    shard = partial(context.sequence.shard, documents=documents)
    local = shard(number, fill=-1)
    kept, chosen = local[local >= 0], None
    inputs = dict(images)
    if sizes is not None:
        ends = torch.tensor(sizes).cumsum(0)
        owners = torch.bucketize(kept, ends, right=True)
        chosen = owners.unique() if len(kept) else torch.tensor([sizes.index(min(sizes))])
        own = torch.tensor(sizes)[chosen]
        first, own_first = ends - torch.tensor(sizes), torch.zeros(len(sizes), dtype=torch.int64)
        own_first[chosen] = own.cumsum(0) - own
        kept = kept - first[owners] + own_first[owners]
        count, inputs = int(own.sum()), _chosen(images, chosen)
    if hasattr(model.base_model, "get_rope_index"):
        if sizes is None:
            grid = images["image_grid_thw"]
            raise ValueError(
                f"{count} image tokens do not match image_grid_thw {grid.tolist()}; give one row per image"
            )
        axes = _rope_positions(model.base_model, input_ids.cpu(), is_image, images, sizes, attention_mask, boundaries)
        inputs["position_ids"] = shard(axes.movedim(0, -1)).movedim(-1, 0).contiguous().to(input_ids.device)
    run = None if chosen is None or sizes is None else tuple(sizes[i] for i in chosen.tolist())
    blocks = image_blocks(context, is_image, documents, boundaries) if sees_later_tokens_of_images(model) else None
    return {**inputs, LOCAL_IMAGES: LocalImages(kept, run, count, positions, blocks)}


def _without_padding(model: PreTrainedModel, images: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns images of a model that takes (rows, images, ...), padded with images of zeros, as (images, 1, ...).

    The model drops images of zeros, and takes the others row by row.
    """
    pixels = images[PIXELS]
    if pixels.ndim != 5 or MASK not in _parameters(model):
        return images
    is_real = (pixels.to(model.dtype) != 0).flatten(2).any(-1)
    if not is_real.any():
        return images
    return {name: value[is_real.to(value.device)].unsqueeze(1) for name, value in images.items()}


def _features_of_images(model: PreTrainedModel, images: Mapping[str, Tensor], count: int) -> tuple[int, ...] | None:
    """Returns the features of each image, `count` in all; None if they are not known before they are made."""
    vision, pixels = _part_of_config(model, "vision_config"), images[PIXELS]
    grid, shapes, in_patches = (images.get(name) for name in BESIDE_PIXELS[:3])
    if grid is not None:
        if int(grid.prod(-1).sum()) != len(pixels):
            return None
        merge = vision.get("spatial_merge_size") or 1
        found = grid.prod(-1) // merge**2
    elif in_patches is not None:
        side = getattr(model.config, "downsample_factor", None)
        if len(in_patches) != len(pixels) or not isinstance(side, int):
            return None
        found = (in_patches // side).prod(-1)
    elif pixels.ndim != 4 and not (pixels.ndim == 5 and pixels.shape[1] == 1 and MASK in _parameters(model)):
        return None
    elif shapes is not None:
        if len(shapes) != len(pixels) or not isinstance(patch := vision.get("patch_size"), int):
            return None
        found = (shapes // (patch * getattr(model.config, "spatial_merge_size", 1))).prod(-1)
    else:
        found = torch.full((len(pixels),), count // len(pixels))
    sizes = tuple(found.tolist())
    return sizes if sum(sizes) == count and all(sizes) else None


def _chosen(images: Mapping[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    """Returns the inputs of some of the images."""
    grid = images.get("image_grid_thw")
    if grid is None:
        return {name: value[chosen.to(value.device)] for name, value in images.items()}
    patches = images[PIXELS].split(grid.prod(-1).tolist())
    return {
        PIXELS: torch.cat([patches[i] for i in chosen.tolist()]),
        "image_grid_thw": grid[chosen.to(grid.device)],
    }


def _rope_positions(
    model: Any,
    input_ids: Tensor,
    is_image: Tensor,
    images: Mapping[str, Tensor],
    sizes: tuple[int, ...],
    attention_mask: Tensor | None,
    boundaries: tuple[int, ...] | None,
) -> Tensor:
    """Returns the model's own positions of a whole batch, int64 (axes, batch, length); each document starts anew."""
    grid = images["image_grid_thw"].cpu()
    if boundaries is None:
        mask = None if attention_mask is None else attention_mask.cpu()
        types = is_image.int()
        found: Tensor = model.get_rope_index(
            input_ids=input_ids, mm_token_type_ids=types, image_grid_thw=grid, attention_mask=mask
        )[0]
        return found
    parts, done = [], 0
    for start, end in zip(boundaries, [*boundaries[1:], input_ids.shape[1]], strict=True):
        if start == end:
            continue
        tokens, first = int(is_image[:, start:end].sum()), done
        while tokens > 0:
            tokens, done = tokens - sizes[done], done + 1
        if tokens < 0:
            raise ValueError(f"the document that ends at token {end} ends inside an image; keep images whole")
        part = slice(start, end)
        own = dict(images) | {"image_grid_thw": grid[first:done]}
        parts.append(_rope_positions(model, input_ids[:, part], is_image[:, part], own, (), None, None))
    return torch.cat(parts, -1)


def _kept(features: Any, images: LocalImages, name: str) -> Any:
    """Returns features of image tokens, a tensor or one per image, without those of other ranks."""
    if isinstance(features, Tensor):
        flat, per_image = features.reshape(-1, features.shape[-1]), features.ndim > 2
        sizes = (flat.shape[0] // len(features),) * len(features) if per_image else None
    elif isinstance(features, list | tuple) and all(isinstance(x, Tensor) for x in features):
        flat = torch.cat([x.reshape(-1, x.shape[-1]) for x in features])
        sizes = tuple(x.shape[:-1].numel() for x in features)
    else:
        raise ValueError(f"{name} returns features of images in an unknown form; {REMEDY}")
    if len(flat) != images.total:
        raise ValueError(f"{name} made {len(flat)} features of images for {images.total} image tokens; give one each")
    if images.sizes is not None and len(images.sizes) > 1 and sizes != images.sizes:
        raise ValueError(f"{name} made {sizes or 'unknown'} features of its images, not {images.sizes}; {REMEDY}")
    local = flat.index_select(0, images.kept.to(flat.device))
    if not isinstance(features, Tensor):
        return type(features)([local])
    return local.reshape(*(1,) * (features.ndim - 2), *local.shape)
