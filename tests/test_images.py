"""Images in a loop and in Trainer: losses and all gradients, encoders included, equal those of one process."""

import copy
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from datasets import Dataset
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trainer_numbers import Numbers, UsesFsdp2, check_equal, common, shared_folder, trained
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from worlds import spawn

from benchmarks.tiny_models import plain_model, tiny_config
from lightseq import hf
from lightseq.hf.image_inputs import IMAGE_INPUTS, why_refused
from lightseq.integrations import SequenceParallel, SequenceParallelSFTTrainer, SequenceParallelTrainer
from lightseq.integrations.whole_batches import WholeBatches
from lightseq.models.decoder import text_decoder

LENGTH, IMAGE, PATCH = 50, 60, 2  # IMAGE: the token that stands for features of images
Sides = list[tuple[int, int]]  # of a row's images, in patches
# Small encoders by type of model.
VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    "qwen2_5_vl": {"out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 8},
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 32},
    "glm4v": {"out_hidden_size": 32, "image_size": 16},
    "mistral3": {"image_size": 16},
    "gemma3": {"image_size": 8},
    "llava": {"image_size": 4},
    "internvl": {"image_size": [8, 8], "patch_size": [PATCH, PATCH]},
    "idefics2": {"image_size": 8},
    "idefics3": {"image_size": 8},
    "smolvlm": {"image_size": 8},
    "lfm2_vl": {"num_patches": 16},
}
# The same of models with experts.
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    "qwen3_5_moe": {"out_hidden_size": 32, "deepstack_visual_indexes": [], "num_position_embeddings": 64},
    "ernie4_5_vl_moe": {"hidden_size": 32, "out_hidden_size": 32, "temporal_patch_size": 1},
    "glm4v_moe": {"out_hidden_size": 32, "image_size": 16},
    "minimax_m3_vl": {},
}
HEADS = ("gemma3", "lfm2_vl")  # the encoder has a head that does not run
PADDED = ("idefics2", "idefics3", "smolvlm")  # take (rows, images), padded to the longest row and the largest image
# Images lie across the borders of chunks. Of the second batch, most ranks hold no image. Some rows have none.
BATCHES: dict[str, list[Sides]] = {
    "many": [[(4, 4), (4, 8), (8, 4), (4, 4)], [(8, 4)]],
    "few": [[], [(4, 4)]],
}
ROWS: list[Sides] = [[(4, 4), (4, 8)], [], [(8, 4)], [(4, 4)], [(8, 8)], [(4, 4), (4, 4)]]  # for trainers
Batch = dict[str, Any]
EXAMPLES = Path(__file__).parent.parent / "examples" / "README.md"


def model_of(kind: str) -> PreTrainedModel:
    config: PreTrainedConfig = tiny_config(kind)
    for name, value in {"patch_size": PATCH, **(VISION | EXPERTS)[kind]}.items():
        setattr(config.vision_config, name, value)
    if "qwen" in kind or "glm" in kind:  # positions have three axes
        text = config.get_text_config()
        text.rope_parameters = {**text.rope_parameters, "mrope_section": [1, 1, 2], "rope_theta": 100.0}
    config.image_token_id = IMAGE
    if kind in ("idefics3", "smolvlm"):
        config.scale_factor = 2
    if kind == "idefics2":
        perceiver = {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4, "resampler_head_dim": 8}
        vars(config.perceiver_config).update(perceiver, num_key_value_heads=2, hidden_size=32)
    if kind == "gemma3":
        config.mm_tokens_per_image, config.text_config.sliding_window = 4, 3  # the window ends inside an image
    return plain_model(config)


def row_of(sides: Sides, length: int, seed: int) -> Tensor:
    """Returns ids of text with images of these sides, which have a feature for four patches."""
    generator, tokens = torch.Generator().manual_seed(seed), list[int]()
    for height, width in sides:
        tokens += [*torch.randint(3, IMAGE, (4,), generator=generator).tolist(), *[IMAGE] * (height * width // 4)]
    return torch.tensor(tokens + torch.randint(3, IMAGE, (length - len(tokens),), generator=generator).tolist())


def batch_of(config: PreTrainedConfig, rows: list[Sides], lengths: list[int] | None = None, seed: int = 1) -> Batch:
    """Returns what a processor would, and labels of the text. Padding is on the right."""
    vision, lengths = config.vision_config, lengths or [LENGTH] * len(rows)
    by_grid = hasattr(vision, "temporal_patch_size")
    if config.model_type in ("llava", "internvl", "gemma3", *PADDED):  # images of one size
        rows = [[(4, 4)] * len(row) for row in rows]
    ids = [row_of(row, length, seed + i) for i, (row, length) in enumerate(zip(rows, lengths, strict=True))]
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    whole, is_image = labels.clamp_min(0), labels == IMAGE
    batch = {
        "input_ids": whole,
        "attention_mask": (labels != -100).long(),
        "labels": labels.masked_fill(is_image, -100),
    }
    if by_grid:
        batch["mm_token_type_ids"] = is_image.int()
    if config.model_type == "gemma3":
        batch["token_type_ids"] = is_image.int()
    sides = torch.tensor([side for row in rows for side in row])
    if not len(sides):
        return batch
    generator = torch.Generator().manual_seed(seed)
    if by_grid:
        size = 3 * vision.temporal_patch_size * PATCH**2
        pixels = torch.randn(int(sides.prod(-1).sum()), size, generator=generator)
        return {**batch, "pixel_values": pixels, "image_grid_thw": torch.nn.functional.pad(sides, (1, 0), value=1)}
    if config.model_type == "lfm2_vl":
        patches = sides.prod(-1)
        mask = (torch.arange(int(patches.max())) < patches[:, None]).long()
        pixels = torch.randn(*mask.shape, 3 * PATCH**2, generator=generator) * mask[..., None]
        return {**batch, "pixel_values": pixels, "spatial_shapes": sides, "pixel_attention_mask": mask}
    if config.model_type in PADDED:
        pixels = torch.zeros(len(rows), max(map(len, rows)), 3, 8, 8)
        mask = torch.zeros(len(rows), max(map(len, rows)), 8, 8, dtype=torch.long)
        for row, images in enumerate(rows):
            for i in range(len(images)):
                height, width = (8, 4) if i % 2 else (4, 8)  # of an image smaller than the largest
                pixels[row, i, :, :height, :width] = torch.randn(3, height, width, generator=generator)
                mask[row, i, :height, :width] = 1
        return {**batch, "pixel_values": pixels, "pixel_attention_mask": mask}
    shapes = sides if config.model_type == "llava" else PATCH * sides  # LLaVA has a feature for every patch
    pixels = torch.randn(len(sides), 3, *shapes.amax(0).tolist(), generator=generator)
    return {**batch, "pixel_values": pixels, **({"image_sizes": shapes} if config.model_type == "mistral3" else {})}


def check_gradients(
    got: PreTrainedModel, want: PreTrainedModel, where: str, mean: bool = False, limit: float = 1e-5
) -> None:
    """Compares the sum of the ranks' gradients with one process; `mean` for wrappers that have summed them."""
    whole = torch.stack([p.grad.norm() for p in want.parameters() if p.grad is not None]).norm()
    of_encoder = 0
    for (name, parameter), mine in zip(want.named_parameters(), got.parameters(), strict=True):
        right = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = torch.zeros_like(right) if mine.grad is None else mine.grad
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
        if not mean:
            dist.all_reduce(gradient)
        least = 1e-2 if name.endswith("k_proj.bias") else 1e-4  # keys' biases change no weight of attention
        error = (gradient - right).norm() / right.norm().clamp_min(least * whole)
        assert error < limit, f"{where}: gradient of {name} off by {error:.1e}"
        of_encoder += "vis" in name and bool(right.any())
    assert of_encoder > 10, "the encoder learns"


def check_step(
    got: Any, want: PreTrainedModel, context: Any, batch: Batch, where: str, mean: bool = False, limit: float = 1e-5
) -> None:
    want.zero_grad()
    expected = want(**batch, use_cache=False).loss
    expected.backward()
    loss = got(**hf.shard_batch(context, **batch)).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert abs(total - expected) < 1e-5, f"{where}: loss {total}, one process has {expected}"
    check_gradients(got, want, where, mean, limit)


# ---- a loop --------------------------------------------------------------------------------------------------------


def loop(_rank: int, kinds: list[str]) -> None:
    for kind in kinds:
        for case, rows in BATCHES.items():
            want = model_of(kind)
            got = copy.deepcopy(want)
            has_windows = kind in ("gemma3", "idefics2")
            schedule = "prefix" if has_windows else "zigzag" if case == "many" else "ring"
            context = hf.enable(got, schedule=schedule, length=LENGTH)
            batch = batch_of(want.config, rows)
            check_step(got, want, context, batch, f"{kind}, {case}, {schedule}")
            hf.disable(got)
            assert torch.equal(got(**batch, use_cache=False).loss, want(**batch, use_cache=False).loss)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4)])
def test_every_family_equals_one_process(world: int) -> None:
    spawn(world, loop, list(VISION))


def wrapped_and_packed(rank: int, kind: str, wrappers: list[str]) -> None:
    loop(rank, [kind])
    packed(kind)
    for wrapper in wrappers:
        wrapped(kind, wrapper)


def packed(kind: str) -> None:
    """Documents with images in one row equal their own rows."""
    want = model_of(kind)
    got = copy.deepcopy(want)
    batch = batch_of(want.config, BATCHES["many"], [45, 30])
    context = hf.enable(got, length=LENGTH, packed=True)
    is_real = batch["attention_mask"] == 1
    ids, labels = (batch[name][is_real][None] for name in ("input_ids", "labels"))
    expected = want(**batch, use_cache=False).loss
    expected.backward()
    images = {name: batch[name] for name in IMAGE_INPUTS[:5] if name in batch}
    images |= {name: batch[name][is_real][None] for name in ("token_type_ids",) if name in batch}
    loss = got(**hf.shard_batch(context, ids, labels, cu_seqlens=[0, 45, 75], **images)).loss
    loss.backward()
    dist.all_reduce(total := loss.detach().clone())
    assert abs(total - expected) < 1e-5, f"{kind}, packed: loss {total}, one process has {expected}"
    check_gradients(got, want, f"{kind}, packed")
    hf.disable(got)


def wrapped(kind: str, wrapper: str) -> None:
    """FSDP2 with the encoder's layers as units, or DDP without unused parameters: most ranks hold no image."""
    want = model_of(kind)
    got: Any = copy.deepcopy(want)
    context = hf.enable(got, length=LENGTH)
    if wrapper == "FSDP2":
        encoder = next(m for name, m in got.base_model.named_children() if "vis" in name)
        for layers in (m for part in (encoder, text_decoder(got)) for m in part.modules() if hasattr(m, "__len__")):
            for layer in layers:
                fully_shard(layer)
        fully_shard(got)
    else:
        got = DistributedDataParallel(got, find_unused_parameters=kind in HEADS)
    with pytest.warns(UserWarning, match="multiplies them") if dist.get_rank() == 0 else nullcontext():
        check_step(got, want, context, batch_of(want.config, BATCHES["few"]), f"{kind}, {wrapper}", mean=True)


def test_images_equal_one_process() -> None:
    spawn(2, wrapped_and_packed, "qwen3_vl", ["FSDP2"])


@pytest.mark.parametrize("kind", slow_except(["idefics3"], [*PADDED, "lfm2_vl"]))
def test_masks_of_images_smaller_than_the_largest_change_the_loss_as_in_one_process(kind: str) -> None:
    spawn(2, wrapped_and_packed, kind, [])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["qwen3_vl", "mistral3", "gemma3"])
def test_images_in_wrappers_equal_one_process(kind: str, world: int) -> None:
    spawn(world, wrapped_and_packed, kind, ["FSDP2", "DDP"])


REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {  # the kind of model, the error, and what else is passed
    "video": ("qwen3_vl", "pixel_values_videos is not supported: .*train the model on", {"pixel_values_videos": 1}),
    "numbers": ("qwen3_vl", "image_grid_thw is a list; give a tensor", {"image_grid_thw": [[1, 4, 4]]}),
    "no pixels": ("qwen3_vl", "without pixel_values; pass all", {"pixel_values": None}),
    "other tokens": ("qwen3_vl", "mm_token_type_ids are not 1 for", {"mm_token_type_ids": torch.ones(2, 50)}),
    "other grid": ("qwen3_vl", "do not match image_grid_thw", {"image_grid_thw": torch.tensor([[1, 4, 8]])}),
    "no token types": ("gemma3", "pixel_values without token_type_ids", {"token_type_ids": None}),
    "no grid": ("qwen3_vl", "pixel_values without image_grid_thw, which Qwen3VL", {"image_grid_thw": None}),
    "float grid": ("qwen3_vl", "image_grid_thw are torch.float32", {"image_grid_thw": torch.ones(1, 3)}),
    "flat grid": ("qwen3_vl", r"image_grid_thw are \(3,\); give \(images, 3\)", {"image_grid_thw": torch.arange(3)}),
    "no images": ("llava", r"\(0, 3, 4, 4\), without an image", {"pixel_values": torch.zeros(0, 3, 4, 4)}),
    "no patches": ("qwen3_vl", r"\(0, 24\), without an image", {"pixel_values": torch.zeros(0, 24)}),
    "other mask": ("idefics3", "does not fit pixel_values", {"pixel_attention_mask": torch.ones(1, 8, 8)}),
    "too many": ("llava", "features of images for 4 image tokens", {"pixel_values": torch.zeros(2, 3, 4, 4)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_cannot_be_split_are_refused(name: str, alone: None) -> None:
    kind, error, given = REFUSED[name]
    model = model_of(kind)
    context = hf.enable(model, length=LENGTH)
    batch = batch_of(model.config, BATCHES["few"])
    with pytest.raises(ValueError, match=error):
        model(**hf.shard_batch(context, **{**batch, **given}))


def test_images_must_come_from_shard_batch(alone: None) -> None:
    model = model_of("qwen3_vl")
    context = hf.enable(model, length=LENGTH)
    batch = batch_of(model.config, BATCHES["few"])
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 3)
    text = hf.shard_batch(context, ids, mm_token_type_ids=torch.zeros(2, LENGTH))
    model(**text)
    for name in ("pixel_values", "pixel_values_videos", "mm_token_type_ids"):
        with pytest.raises(ValueError, match=f"{name} (belong to the tokens|is not supported)"):
            model(**text, **{name: torch.zeros(1)})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("paligemma", "takes token_type_ids"), ("qwen2_5_omni_thinker", "computes positions from other inputs")],
)
def test_models_whose_images_are_not_exact_are_refused(kind: str, reason: str) -> None:
    assert (why_refused(plain_model(tiny_config(kind))) or "").startswith(reason)


def other_images(rank: int) -> None:
    """Gives ranks images of the same sum, and grids of the same product."""
    model = model_of("qwen3_vl")
    batch = batch_of(model.config, [[(4, 8), (8, 4)]])
    pixels, grid = batch["pixel_values"], batch["image_grid_thw"]
    for other in (
        {"pixel_values": pixels.flip(0)},
        {"pixel_values": pixels.flip(1)},
        {"pixel_values": pixels.index_select(0, torch.tensor([1, 0, *range(2, len(pixels))]))},
        {"image_grid_thw": grid[:, [0, 2, 1]]},
    ):
        context = hf.enable(model, length=LENGTH)
        with pytest.raises(ValueError, match="different batches"):
            model(**hf.shard_batch(context, **{**batch, **(other if rank else {})}))


def test_ranks_with_other_images_are_refused() -> None:
    spawn(2, other_images)


def experts(rank: int, kind: str) -> None:
    """Compares in DDP, which makes the model's output anew."""
    want = model_of(kind)
    want.config.output_router_logits = want.config.get_text_config().output_router_logits = True
    got, limit = copy.deepcopy(want), 1e-4 if kind == "qwen3_5_moe" else 1e-5  # a scan rounds more
    context = hf.enable(got, length=LENGTH)
    batch, wrapper = batch_of(want.config, BATCHES["many"]), DistributedDataParallel(got, find_unused_parameters=True)
    with pytest.warns(UserWarning, match="multiplies them") if rank == 0 else nullcontext():
        check_step(wrapper, want, context, batch, kind, mean=True, limit=limit)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_except(["qwen3_vl_moe"], EXPERTS))
def test_images_with_a_router_loss_equal_one_process(kind: str) -> None:
    spawn(2, experts, kind)


# ---- trainers ------------------------------------------------------------------------------------------------------


def test_a_whole_batch_with_images_has_the_loss_of_one_process(alone: None) -> None:
    want = model_of("qwen3_vl")
    got = copy.deepcopy(want)
    WholeBatches(got, hf.enable(got, length=LENGTH))
    batch = batch_of(want.config, BATCHES["few"])
    torch.testing.assert_close(got(**batch).loss, want(**batch).loss, rtol=0, atol=1e-5)


class FullySharded(SequenceParallel, UsesFsdp2, Trainer): ...


class Recomputing(SequenceParallelTrainer):
    """Trainer whose layers store attention's output and recompute the rest."""


def collate(config: PreTrainedConfig, rows: list[dict[str, int]]) -> Batch:
    numbers = [row["row"] for row in rows]
    lengths = [40 + 2 * number for number in numbers]
    return batch_of(config, [ROWS[number] for number in numbers], lengths, seed=100 * numbers[0])


def train(_rank: int, trainer_class: type[Trainer], kind: str, data_ranks: int, **options: Any) -> Numbers:
    model = model_of(kind)
    rows = Dataset.from_list([{"row": row} for row in range(len(ROWS))])
    case = {"ddp_find_unused_parameters": kind in HEADS, "learning_rate": 1e-2, "prediction_loss_only": True}
    case |= {"gradient_checkpointing": trainer_class is Recomputing, "remove_unused_columns": False}
    config: Any = TrainingArguments
    if issubclass(trainer_class, SFTTrainer):
        config, case["dataset_kwargs"] = SFTConfig, {"skip_prepare_dataset": True}
    options["data_collator"] = partial(collate, copy.deepcopy(model.config))
    return trained(trainer_class, config, case, data_ranks, model, rows, len(rows), **options)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("kind", "trainer"),
    [
        *((kind, SequenceParallelTrainer) for kind in ("qwen3_vl", "mistral3", "gemma3")),
        *((kind, SequenceParallelSFTTrainer) for kind in ("qwen3_vl", "mistral3", "gemma3")),
        *((kind, Recomputing) for kind in ("qwen3_vl", "gemma3")),
        *((kind, FullySharded) for kind in ("qwen3_vl", "mistral3")),  # accelerate cannot wrap all layers of Gemma 3
    ],
)
def test_trainer_with_images_equals_one_process(kind: str, trainer: type[Trainer], world: int) -> None:
    plain = SFTTrainer if issubclass(trainer, SFTTrainer) else Trainer
    check_equal(train, plain, trainer, kind, world)


class Processor:
    """Stands in for a processor: the text of a row is its length, and an image its sides."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config, self.tokenizer = config, SimpleNamespace(padding_side="left")

    def __call__(self, text: list[int], images: list[Sides], padding: bool, return_tensors: str) -> Batch:
        assert (self.tokenizer.padding_side, padding, return_tensors) == ("right", True, "pt")
        batch = batch_of(self.config, images, text, seed=text[0])
        del batch["labels"]
        return batch


def run_the_page(_rank: int, kind: type[Trainer]) -> list[float]:
    """Runs the lines for trainers in the examples' page, and returns the losses."""
    code = next(
        x for x in re.findall(r"```python\n(.*?)```", EXAMPLES.read_text(), re.DOTALL) if "processor.token" in x
    )
    model = model_of("qwen3_vl")
    with shared_folder() as folder:
        settings = common(folder, eval_strategy="no", learning_rate=1e-2)
        names: dict[str, Any] = {
            "model": model,
            "processor": Processor(copy.deepcopy(model.config)),
            "rows": [{"text": 40 + 2 * i, "images": sides} for i, sides in enumerate(ROWS) if sides],
            "TrainingArguments": lambda _, **given: TrainingArguments(**settings | given),
            "SequenceParallelTrainer": kind,
        }
        exec(code, names)
    return [record["loss"] for record in names["trainer"].state.log_history if "loss" in record]


@pytest.mark.slow
def test_the_examples_page_trains_a_trainer_on_images() -> None:
    (wanted,) = spawn(1, run_the_page, Trainer)
    assert wanted[-1] < wanted[0]
    for losses in spawn(2, run_the_page, SequenceParallelTrainer):
        assert losses == pytest.approx(wanted, abs=1e-4)
