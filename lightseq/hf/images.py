"""Images of a batch. A rank encodes only images with tokens on it, and keeps its tokens' features.

The sum of all ranks' gradients of encoders and projector then is that of one process, without communication.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.hf.image_attention import IMAGE_BLOCKS, ImageBlocks, image_blocks
from lightseq.hf.image_inputs import (
    ALL_INPUTS,
    BESIDE_PIXELS,
    IMAGE_INPUTS,
    MASK,
    PASS_ALL,
    PIXELS,
    REMEDY,
    TOKEN_TYPES,
    check_text_only,
    checked_images,
    forward_arguments,
    part_of_config,
)
from lightseq.models.decoder import has_towers, placeholder_ids
from lightseq.parts.changes import Changes
from lightseq.parts.probes import sees_later_tokens_of_images
from lightseq.sequence.documents import Documents

LOCAL_IMAGES: Final = "local_images"  # key of `LocalImages` in a batch
# Fields of a model's image features. The last two hold features of tokens.
FEATURE_FIELDS: Final = frozenset(
    {"last_hidden_state", "hidden_states", "attentions", "pooler_output", "deepstack_features"}
)
# Models by the name of their context, for `shard_batch`.
_MODELS: WeakValueDictionary[str, PreTrainedModel] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class LocalImages:
    """Choice of the features that a rank keeps. Not a tensor, because model wrappers move tensors to the device."""

    kept: Tensor  # int64 on the CPU: indices of this rank's features among the features of its images
    sizes: tuple[int, ...] | None  # features of each image that this rank runs; None if it runs all
    total: int  # features of all the rank's images
    positions: Tensor  # positions of this rank's tokens in their document, int64 (batch or 1, local)
    blocks: ImageBlocks | None  # image blocks for attention with later tokens of an image


class ImageFeatures:
    """State of a model's forward pass with images, which the checks of its inputs set."""

    def __init__(self) -> None:
        self._images: LocalImages | None = None
        self._used = False

    def begin(self, kwargs: dict[str, Any]) -> None:
        """Takes the images out of a pass's arguments. Raises ValueError for images that `shard_batch` has not split."""
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
        """Runs a model's `get_image_features`, and drops the features of other ranks' tokens."""
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


def install(model: PreTrainedModel, context: SequenceContext, changes: Changes) -> ImageFeatures:
    """Makes a model keep only image features of this rank's tokens, and registers it for `shard_batch`."""
    features, part = ImageFeatures(), model.base_model
    if has_towers(model.config):
        if hasattr(part, "get_image_features"):
            function = partial(features.of_local_tokens, part, part.get_image_features)
            changes.set_attribute(part, "get_image_features", function)
        _MODELS[context.name] = model
        changes.call_later(partial(_MODELS.pop, context.name, None))
    return features


def check_text(context: SequenceContext, input_ids: Tensor, remedy: str = PASS_ALL) -> None:
    """Raises ValueError for tokens of images or audio in a batch of text."""
    model = _MODELS.get(context.name)
    if model is not None and (placeholders := placeholder_ids(model.config)):
        check_text_only(input_ids, placeholders, remedy)


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
        check_text(context, input_ids)
        return None
    if PIXELS not in given:
        raise ValueError(f"{next(iter(given))} without {PIXELS}; {ALL_INPUTS}")
    if model is None or not hasattr(model.base_model, "get_image_features"):
        raise ValueError(f"{PIXELS} are given, but the context's model takes no images, or is gone; {REMEDY}")
    return model, checked_images(model, input_ids, given)


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
    encoders run on every rank. `positions` holds the positions of this rank's tokens in their documents.
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
    if pixels.ndim != 5 or MASK not in forward_arguments(model):
        return images
    is_real = (pixels.to(model.dtype) != 0).flatten(2).any(-1)
    if not is_real.any():
        return images
    return {name: value[is_real.to(value.device)].unsqueeze(1) for name, value in images.items()}


def _features_of_images(model: PreTrainedModel, images: Mapping[str, Tensor], count: int) -> tuple[int, ...] | None:
    """Returns the features of each image, `count` in all; None if they are not known before they are made."""
    vision, pixels = part_of_config(model, "vision_config"), images[PIXELS]
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
    elif pixels.ndim != 4 and not (pixels.ndim == 5 and pixels.shape[1] == 1 and MASK in forward_arguments(model)):
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
    return {PIXELS: torch.cat([patches[i] for i in chosen.tolist()]), "image_grid_thw": grid[chosen.to(grid.device)]}


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
    """Removes other ranks' features from a tensor of image tokens, or from one tensor per image."""
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
