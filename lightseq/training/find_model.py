"""The model that the flags of a run name: its config, weights, tokenizer and adapters, checked against the flags."""

from dataclasses import dataclass
from pathlib import Path
from warnings import filterwarnings

import torch
from transformers import PreTrainedConfig

from lightseq.architecture.family import apply_rope, context_warning, resolve
from lightseq.architecture.flops import matrix_sizes
from lightseq.architecture.inspection import inspect_architecture
from lightseq.checkpoint.manifest import check_weights
from lightseq.config.train_config import TrainConfig
from lightseq.data.tokenizer import ByteTokenizer
from lightseq.distributed.parallel_dims import ParallelDims, parallel_dims
from lightseq.distributed.world import World, check_devices
from lightseq.kernels.attention.base import compute_capability
from lightseq.models import hub, mxfp4
from lightseq.models.decoder import has_towers
from lightseq.models.presets import ModelFamily
from lightseq.parts.adapters import Lora, lora_from_config, notes_on_targets
from lightseq.parts.fp8 import check_fp8
from lightseq.parts.packed_base import PackedBase, held_as_stored, mark
from lightseq.training.setup_checks import (
    Notes,
    bfloat16_warning,
    check_kernel,
    check_layers,
    check_mixers,
    check_packing,
    flag_warnings,
)
from lightseq.utils.versions import UntestedVersionWarning, untested_versions


@dataclass(frozen=True)
class FoundModel:
    """Model that was checked for a split of the ranks. Its weights may not be downloaded yet."""

    config: PreTrainedConfig
    weights: Path | str | None  # directory, or Hub id; None: random
    tokenizer: str | None  # directory, Hub id or `byte`
    dims: ParallelDims
    warnings: Notes
    lora: Lora | None = None
    unscaled: PreTrainedConfig | None = None  # the config without --rope_scaling, if that was given
    packed_base: PackedBase | None = None  # how frozen weights are stored


def find_model(config: TrainConfig, family: ModelFamily, world: World) -> FoundModel:
    """Finds the model that the flags name. Raises ValueError if there is none, or it cannot run with these flags."""
    check_devices(world)
    dims = parallel_dims(world, config.sequence_parallel_size, config.fsdp_mode, config.expert_ranks)
    source = resolve(family, config.model_name, config.random_init)
    model_config = apply_rope(source.config, config.rope_theta, config.rope_scaling, config.model_max_length)
    check_layers(config, inspect_architecture(model_config))
    check_mixers(config, inspect_architecture(model_config), dims.sequence)
    check_kernel(config, model_config, world.device, dims.sequence)
    if config.packing != "none":
        check_packing(config.packing, model_config)
    check_fp8(config.fp8, config.fp8_emulate, matrix_sizes(model_config), world.device)
    tokenizer = config.tokenizer or (str(source.weights) if source.weights else None)
    unscaled = source.config if config.rope_scaling else None
    filterwarnings("ignore", category=UntestedVersionWarning)  # printed with the other warnings below
    lines = [*untested_versions()]
    if config.packing == "none":  # else the longest document counts, and `prepare` warns
        context = context_warning(model_config, config.model_max_length, unscaled)
        lines += [context] if context else []
    lines += flag_warnings(config.resolve_memory_flags(world.device.type == "cuda"), dims.sequence)
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    lines += bfloat16_warning(config, name, compute_capability(world.device))
    warnings = tuple(f"warning: {line}" for line in lines)
    lora = lora_from_config(config, model_config)
    warnings += notes_on_targets(config, lora, model_config)
    if config.fp8 and any(layer.experts for layer in inspect_architecture(model_config).layers):
        warnings += (f"--fp8 {config.fp8} is for linear layers; experts and their routers stay in bfloat16",)
    if config.random_init and config.save_strategy != "no" and has_towers(model_config):
        warnings += (
            "--random_init: checkpoints will lack the weights of the image and audio encoders; to keep them, save a "
            "whole model with save_pretrained and train it without --random_init",
        )
    form = held_as_stored(config, source.stored_form) if source.weights is not None else None
    if source.stored_form == mxfp4.METHOD and source.weights is not None and form is None:
        warnings += (f"{config.model_name_or_path}: weights in MXFP4 are read as bfloat16; checkpoints have no MXFP4",)
    packed_base = None
    if form is not None:
        packed_base = PackedBase(True, config.compute_dtype, form)
        mark(model_config, form, source.left_out)
    elif config.load_in_4bit:
        packed_base = PackedBase(False, config.compute_dtype)
    return FoundModel(model_config, source.weights, tokenizer, dims, warnings, lora, unscaled, packed_base)


def fetch_weights(model: FoundModel, world: World, verified: Path | None = None) -> Path | None:
    """Returns the directory of a model's weights, after downloading them if needed; None for random weights.

    Raises ValueError if their manifest shows damage. A `verified` directory is not read again.
    """
    directory = hub.download(model.weights) if isinstance(model.weights, str) else model.weights
    if world.is_main and directory is not None and directory != verified:
        check_weights(directory)
    return directory


def tokenizer_directory(model: FoundModel, directory: Path | None) -> Path | None:
    """Returns the tokenizer's directory: the weights' own, or the one given by --tokenizer; None for `byte`."""
    named = model.tokenizer
    if named == ByteTokenizer.name or named is None:
        return None
    if named == str(model.weights):
        return directory
    return Path(named) if Path(named).is_dir() else hub.download_tokenizer(named)
