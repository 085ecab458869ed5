"""Check that a run has the model of its checkpoint; names and shapes of tensors alone do not show it."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from lightseq.config.train_config import TrainConfig
from lightseq.models import adapters
from lightseq.models.adapters import Lora, read_json_object

CONFIG = "config.json"
# What changes the arithmetic and no shape. Of a context's length the frequencies tell.
TELLING = (
    *("rope_parameters", "hidden_act", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"),
)
ROUNDED = 1e-4  # of a number that a command line gives: some digits fewer are no other model


def check_same_model(
    directory: Path, config: TrainConfig, model: PreTrainedConfig, lora: Lora | None
) -> tuple[str, ...]:
    """Returns notes on the model of a resumed run. Raises ValueError naming the first setting that differs."""
    differences = _of_adapter(directory, config, model, lora) if lora else _of_model(directory, model)
    if (difference := next(differences, None)) is not None:
        name, before, now = difference
        raise ValueError(
            f"--resume_from_checkpoint {directory} was trained with {name} {before}, this run has {now}; give the "
            "flags and the model that it was trained with, or begin anew in another directory"
        )
    return _another_base(directory, config) if lora else ()


def _of_model(directory: Path, model: PreTrainedConfig) -> Iterator[tuple[str, Any, Any]]:
    if not (directory / CONFIG).is_file():
        return
    read = read_json_object(directory / CONFIG)
    kind = read.get("model_type", model.model_type)
    if kind != model.model_type:
        yield "model_type", kind, model.model_type
    saved = type(model).from_dict(read)
    for name in TELLING:
        before, now = (_plain(getattr(x, name, None)) for x in (saved, model))
        if not _alike(before, now):
            yield name, before, now


def _of_adapter(
    directory: Path, config: TrainConfig, model: PreTrainedConfig, lora: Lora
) -> Iterator[tuple[str, Any, Any]]:
    saved = _adapter_config(directory)
    rank, alpha = saved.get("r", lora.rank), saved.get("lora_alpha", lora.alpha)
    if rank != lora.rank:
        yield "lora_rank", rank, lora.rank
    if alpha != lora.alpha:
        yield "lora_alpha", alpha, lora.alpha
    targets = saved.get("target_modules", lora.targets)
    if set(targets) != set(lora.targets):
        yield "lora_target_modules", ",".join(sorted(targets)), ",".join(sorted(lora.targets))
    both = adapters.read_rope(directory), adapters.changed_rope(config, model)
    before, now = (_plain((rope or {}).get("rope_parameters", "like its model's")) for rope in both)
    if not _alike(before, now):
        yield "rope_parameters", before, now


def _another_base(directory: Path, config: TrainConfig) -> tuple[str, ...]:
    """Returns a warning if an adapter's base model has another name; its directory may have moved."""
    before = _adapter_config(directory).get("base_model_name_or_path")
    now = adapters.base_model_name(config.model_name_or_path)
    if before in (None, now):
        return ()
    return (f"warning: {directory} was trained beside the weights of {before}, and goes on beside those of {now}",)


def _adapter_config(directory: Path) -> Mapping[str, Any]:
    path = directory / adapters.CONFIG
    return read_json_object(path) if path.is_file() else {}


def _alike(before: Any, now: Any) -> bool:
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_alike(before[key], now[key]) for key in before)
    if isinstance(before, int | float) and isinstance(now, int | float):
        return math.isclose(before, now, rel_tol=ROUNDED)
    return bool(before == now)


def _plain(value: Any) -> Any:
    """Drops entries of a mapping that are None, which configs may also leave out."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value
