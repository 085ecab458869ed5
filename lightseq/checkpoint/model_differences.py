"""Differences between a run's model and the one that a checkpoint or an adapter was trained with."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from lightseq.config.train_config import TrainConfig
from lightseq.models.decoder import text_config
from lightseq.parts import adapter_files, adapters
from lightseq.parts.adapters import Lora
from lightseq.parts.packed_base import PackedBase
from lightseq.utils.files import read_json_object

CONFIG = "config.json"
# Model settings that change the computation without changing a shape.
COMPARED_SETTINGS = (
    *("rope_parameters", "hidden_act", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"),
    *("sliding_window", "layer_types", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
)
RELATIVE_TOLERANCE = 1e-4  # flags may have fewer digits than the saved config


def check_model(
    directory: Path,
    config: TrainConfig,
    model: PreTrainedConfig,
    lora: Lora | None,
    packed_base: PackedBase | None = None,
) -> tuple[str, ...]:
    """Returns notes on the model of a resumed run. Raises ValueError with the first setting that differs."""
    if lora is None:
        differences = _model_differences(directory, model)
    else:
        differences = _adapter_differences(directory, config, model, lora, packed_base)
    if (difference := next(differences, None)) is not None:
        name, before, now = difference
        raise ValueError(
            f"--resume_from_checkpoint {directory} was trained with {name} {before}, but this run has {now}; give the "
            "flags and the model that it was trained with, or start over in another directory"
        )
    return _base_model_note(directory, config) if lora else ()


def _model_differences(directory: Path, model: PreTrainedConfig) -> Iterator[tuple[str, Any, Any]]:
    if not (directory / CONFIG).is_file():
        return
    read = read_json_object(directory / CONFIG)
    kind = read.get("model_type", model.model_type)
    if kind != model.model_type:
        yield "model_type", kind, model.model_type
    settings, _ = type(model).get_config_dict(directory)  # infinity has a form of its own in the file
    saved, wanted = (text_config(x).to_dict() for x in (type(model).from_dict(settings), model))
    for name in COMPARED_SETTINGS:
        before, now = (_without_none(x.get(name)) for x in (saved, wanted))
        if not _are_equal(before, now):
            yield name, before, now


def _adapter_differences(
    directory: Path, config: TrainConfig, model: PreTrainedConfig, lora: Lora, packed_base: PackedBase | None
) -> Iterator[tuple[str, Any, Any]]:
    saved = _adapter_config(directory)
    rank, alpha = saved.get("r", lora.rank), saved.get("lora_alpha", lora.alpha)
    if rank != lora.rank:
        yield "lora_rank", rank, lora.rank
    if alpha != lora.alpha:
        yield "lora_alpha", alpha, lora.alpha
    if bool(saved.get("use_rslora")) != lora.rank_stabilized:
        yield "use_rslora", not lora.rank_stabilized, lora.rank_stabilized
    for name, wanted in (("modules", adapters.target_modules(lora)), ("parameters", sorted(lora.parameters))):
        found = saved.get(f"target_{name}", wanted) or []
        before, now = (each if isinstance(each, str) else ",".join(sorted(each)) for each in (found, wanted))
        if before != now:
            yield f"lora_target_{name}", before or "none", now or "none"
    yield from _base_differences(directory, adapter_files.changed_rope(config, model), packed_base)


def _base_differences(
    directory: Path, rope: Mapping[str, Any] | None, packed_base: PackedBase | None
) -> Iterator[tuple[str, Any, Any]]:
    """Yields what the base of an adapter's run has otherwise than this run. `rope`: None for the base model's own."""
    before, now = map(_kind_of_bits, (adapter_files.read_packed_base(directory), packed_base))
    if before != now:
        yield "base weights in", before, now
    both = adapter_files.read_rope(directory), rope
    before, now = (_without_none((found or {}).get("rope_parameters", "the base model's")) for found in both)
    if not _are_equal(before, now):
        yield "rope_parameters", before, now


def start_notes(
    directory: Path, config: TrainConfig, model: PreTrainedConfig, packed_base: PackedBase | None
) -> tuple[str, ...]:
    """Returns warnings if an adapter that starts a run was trained on another base, RoPE or form of weights."""
    rope = adapter_files.changed_rope(config, model)
    if adapter_files.read_rope(directory) is not None:  # a merged model may have these settings as its own
        rope = adapter_files.rope_of(model)
    return _base_model_note(directory, config) + tuple(
        f"warning: --lora_adapter {directory} was trained with {name} {before}, but this run has {now}"
        for name, before, now in _base_differences(directory, rope, packed_base)
    )


def _kind_of_bits(bits: PackedBase | None) -> str:
    if bits is None or bits.is_exact:
        return "16 or 32 bits"
    return f"{bits.words} as their files store it" if bits.in_files else f"{bits.words} by --load_in_4bit True"


def _base_model_note(directory: Path, config: TrainConfig) -> tuple[str, ...]:
    """Returns a warning if an adapter's base model has another name. Its directory may only have moved."""
    before = _adapter_config(directory).get("base_model_name_or_path")
    now = adapter_files.base_model_name(config.model_name_or_path)
    if before in (None, now):
        return ()
    return (f"warning: the adapter in {directory} was trained on {before} and continues on {now}",)


def _adapter_config(directory: Path) -> Mapping[str, Any]:
    return adapter_files.read_config(directory) if (directory / adapter_files.CONFIG).is_file() else {}


def _are_equal(before: Any, now: Any) -> bool:
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_are_equal(before[key], now[key]) for key in before)
    if isinstance(before, int | float) and isinstance(now, int | float):
        return math.isclose(before, now, rel_tol=RELATIVE_TOLERANCE)
    return bool(before == now)


def _without_none(value: Any) -> Any:
    """Drops the None entries of a mapping. Configs may store them or leave them out."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value
