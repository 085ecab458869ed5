"""Images in a loop and in Trainer: losses and all gradients, encoders included, equal those of one process."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from worlds import spawn

from benchmarks.architectures import plain_model, tiny_config
from lightseq import hf

VOCABULARY, LENGTH, IMAGE, PATCH = 64, 50, 60, 2  # IMAGE: the token that stands for features of images
# Small encoders by type of model.
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 32},
    "qwen2_5_vl": {"out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 8},
    "qwen3_vl": {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    "glm4v": {"out_hidden_size": 32, "image_size": 16},
    "mistral3": {"image_size": 16},
    "llava": {"image_size": 4},
    "internvl": {"image_size": [8, 8], "patch_size": [PATCH, PATCH]},
}
# Sides in patches of a row's images, and the tokens of text before each one and after the last. Images lie across the
# borders of chunks. Of the second case, most ranks hold no image; one row has none.
BATCHES: dict[str, tuple[list[tuple[int, int]], ...]] = {
    "many": ([(4, 4), (4, 8), (8, 4), (4, 4)], [(8, 4)]),
    "few": ([], [(4, 4)]),
}
Batch = dict[str, Tensor]


def model_of(kind: str) -> PreTrainedModel:
    config: PreTrainedConfig = tiny_config(kind)
    for name, value in {"patch_size": PATCH, **VISION[kind]}.items():
        setattr(config.vision_config, name, value)
    if "qwen" in kind or "glm" in kind:  # positions have three axes
        text = config.get_text_config()
        text.rope_parameters = {**text.rope_parameters, "mrope_section": [1, 1, 2], "rope_theta": 100.0}
    config.image_token_id = IMAGE
    return plain_model(config)


def batch_of(model: PreTrainedModel, case: str) -> Batch:
    """Returns what a processor would, and labels of the text."""
    generator, config = torch.Generator().manual_seed(1), model.config
    vision, rows, sides = config.vision_config, [], [side for row in BATCHES[case] for side in row]
    by_grid = hasattr(vision, "temporal_patch_size")
    equal = not by_grid and config.model_type != "mistral3"
    if equal:
        sides = [(2, 2) if config.model_type == "llava" else (4, 4)] * len(sides)
    for row in BATCHES[case]:
        tokens = list[int]()
        for height, width in row:
            size = 4 if equal else height * width // 4
            tokens += [*torch.randint(3, IMAGE, (5,), generator=generator).tolist(), *[IMAGE] * size]
        rows.append(tokens + torch.randint(3, IMAGE, (LENGTH - len(tokens),), generator=generator).tolist())
    ids = torch.tensor(rows)
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}
    if by_grid:
        grid = torch.tensor([(1, *side) for side in sides])
        size = 3 * vision.temporal_patch_size * PATCH**2
        pixels = torch.randn(int(grid.prod(-1).sum()), size, generator=generator)
        return {**batch, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}
    shapes = PATCH * torch.tensor(sides)
    pixels = torch.randn(len(sides), 3, *shapes.amax(0).tolist(), generator=generator)
    return {**batch, "pixel_values": pixels, **({} if equal else {"image_sizes": shapes})}


def gradients(model: PreTrainedModel, reduce: bool = False) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if reduce:
            dist.all_reduce(gradient)
        yield name, gradient


def compare(kind: str, case: str, schedule: str, **options: Any) -> None:
    """Compares a step in a loop around `hf.enable` with plain transformers on one process."""
    want = model_of(kind)
    got, batch = copy.deepcopy(want), batch_of(want, case)
    expected = want(**batch, use_cache=False).loss
    expected.backward()
    context = hf.enable(got, schedule=schedule, length=LENGTH)
    loss = got(**hf.shard_batch(context, **batch)).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    where = f"{kind}, {case}, {schedule}"
    assert abs(total - expected) < 1e-5, f"{where}: loss {total}, one process has {expected}"
    wanted = dict(gradients(want))
    whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    towers = 0
    for name, gradient in gradients(got, reduce=True):
        right = wanted[name]
        least = 1e-2 if name.endswith("k_proj.bias") else 1e-4  # keys' biases change no weight of attention
        error = (gradient - right).norm() / right.norm().clamp_min(least * whole)
        assert error < 1e-5, f"{where}: gradient of {name} off by {error:.1e}"
        towers += "vis" in name and bool(right.any())
    assert towers > 10, "the encoder learns"
    hf.disable(got)


def compare_all(_rank: int, kinds: list[str]) -> None:
    for kind in kinds:
        for case in BATCHES:
            compare(kind, case, "zigzag" if case == "many" else "ring")


@pytest.mark.parametrize("world", [2])
def test_images(world: int) -> None:
    spawn(world, compare_all, list(VISION))
