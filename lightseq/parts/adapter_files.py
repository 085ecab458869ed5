"""Files of low-rank adapters, as peft writes them: plain LoRA is loaded and saved, everything else refused."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.config.train_config import TrainConfig
from lightseq.models.decoder import text_config
from lightseq.models.hub import download
from lightseq.models.tokenizer_files import PROCESSOR_FILES, copy_files, copy_tokenizer
from lightseq.models.weight_files import open_safetensors, open_tensors, save_tensors
from lightseq.models.weights import FillParameter, fill, global_shape, without_nan
from lightseq.parts.adapters import Lora, lora_parameters, peft_config
from lightseq.parts.packed_base import FORMS, PackedBase
from lightseq.utils.files import read_json_object

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ROPE_FILE: Final = "adapter_rope.json"  # RoPE settings that a run changed; peft's files cannot hold them
BITS_FILE: Final = "adapter_four_bits.json"  # how a run held the base weights, if packed
ROPE_SETTINGS: Final = ("rope_parameters", "max_position_embeddings")
# Keys of peft's adapter_config.json. These say where adapters are (as the file of tensors does), how they were trained,
# or configure an initialization that `init_lora_weights` names.
ANY_VALUE: Final = frozenset(
    ("r", "lora_alpha", "base_model_name_or_path", "revision", "peft_version", "auto_mapping", "task_type")
    + ("inference_mode", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform")
    + ("layers_pattern", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config")
    + ("corda_config", "eva_config", "loftq_config", "lora_ga_config")
)
OFF: Final[tuple[Any, ...]] = (None, False, {}, [], "")
# Other initializations (PiSSA, OLoRA, CorDA, LoftQ, ...) change the base model's weights, too.
PLAIN_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "bias": ("none",),
    "use_rslora": (True, False),
}


def load(model: PreTrainedModel, directory: Path, fill: FillParameter = fill) -> None:
    """Loads adapters from files of peft or a checkpoint. Raises ValueError unless these hold the same adapters."""
    parameters = {_name_in_file(name): parameter for name, parameter in lora_parameters(model)}
    path = directory / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{directory} has no {WEIGHTS}; give the directory of an adapter")
    with open_safetensors(path) as file:
        names = set(file.keys())
    if different := sorted(names ^ parameters.keys()):
        whose = "the run's adapters lack" if different[0] in names else "the file lacks the run's"
        raise ValueError(
            f"{path}: {whose} {different[0]}; give --lora_target_modules and --lora_target_parameters of it"
        )
    with open_tensors(dict.fromkeys(names, path)) as stored:
        for name, parameter in parameters.items():
            if tuple(stored(name).get_shape()) != global_shape(parameter):
                shapes = f"{stored(name).get_shape()}, not the run's {[*global_shape(parameter)]}"
                raise ValueError(f"{path}: {name} has shape {shapes}; give --lora_rank of it, and its base model")
            fill(parameter, without_nan(stored(name).__getitem__, f"{path}: {name}"))


def check_start(directory: Path, lora: Lora) -> None:
    """Raises ValueError unless the adapter in a directory is plain LoRA of the run's rank and scale."""
    settings = read_config(directory)
    facts: list[tuple[str, Any, Any]] = [("lora_rank", settings["r"], lora.rank)]
    if not math.isclose(lora_scale(settings), lora.scale):
        facts.append(("use_rslora", bool(settings.get("use_rslora")), lora.rank_stabilized))
        facts.append(("lora_alpha", settings["lora_alpha"], lora.alpha))
    for flag, before, now in facts:
        if not math.isclose(before, now):
            was, given = (x if isinstance(x, bool) else f"{x:g}" for x in (before, now))
            raise ValueError(f"--lora_adapter {directory} has {flag} {was}, not {given}; give --{flag} {was}")


def _name_in_file(name: str) -> str:
    return f"base_model.model.{name.replace('.default', '')}"


def changed_rope(config: TrainConfig, model_config: PreTrainedConfig) -> dict[str, Any] | None:
    """Returns the RoPE settings of config.json if a run's flags changed them, else None."""
    if config.rope_theta is None and config.rope_scaling is None:
        return None
    return rope_of(model_config)


def rope_of(model_config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the RoPE settings of a model's config."""
    found = text_config(model_config).to_dict()
    return {key: found[key] for key in ROPE_SETTINGS}


def base_model_name(name: str) -> str:
    """Returns the base model's name for an adapter's config: an absolute path for a directory, else the hub id."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def save(
    whole: Iterable[tuple[str, Tensor]],
    directory: Path,
    lora: Lora,
    base: str,
    tokenizer_from: Path | None,
    rope: Mapping[str, Any] | None,
    packed_base: PackedBase | None = None,
) -> None:
    """Writes whole adapter tensors for `PeftModel.from_pretrained`, and `rope` and `packed_base` in their own files."""
    tensors = {_name_in_file(name): x.contiguous() for name, x in whole}
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, directory / WEIGHTS)
    peft_config(lora, base_model_name(base)).save_pretrained(str(directory))
    if rope is not None:
        (directory / ROPE_FILE).write_text(json.dumps(rope, indent=2) + "\n")
    if packed_base is not None and not packed_base.is_exact:
        (directory / BITS_FILE).write_text(json.dumps(asdict(packed_base), indent=2) + "\n")
    if tokenizer_from is not None:
        copy_tokenizer(tokenizer_from, directory)
        copy_files(PROCESSOR_FILES, tokenizer_from, directory)


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the config of a saved adapter. Raises ValueError unless it is plain LoRA: base + scale · B·A.

    Every key is known and means that, or is off.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise ValueError(f"{directory} has no {CONFIG}; give the directory of an adapter")
    found = read_json_object(path)
    for key, value in found.items():
        if key not in ANY_VALUE and value not in PLAIN_VALUES.get(key, OFF):
            remedy = "use peft's merge_and_unload"
            if key == "init_lora_weights":  # peft needs the changed base model, too
                remedy = "save it as plain LoRA with path_initial_model_for_weight_conversion of peft's save_pretrained"
            raise ValueError(f"{path}: {key} is {value!r:.80}, which is not plain LoRA; {remedy}")
    check_numbers(found, path)
    if "peft_type" not in found:
        raise ValueError(f"{path} has no peft_type, so it may not be LoRA; copy the adapter again")
    return found


def check_numbers(settings: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError unless the rank and alpha of LoRA are numbers above 0. `path` is the file of the settings."""
    if settings.get("peft_type", "LORA") != "LORA":
        return
    for key in ("r", "lora_alpha"):
        value = settings.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{path}: {key} is {value!r}, not a number above 0; copy the adapter again")


def base_directory(settings: Mapping[str, Any], adapter: Path, given: str | None, remedy: str) -> Path:
    """Returns the directory of an adapter's base model: `given`, or the one in the adapter's settings.

    Raises ValueError if they name none, or a revision, with the remedy.
    """
    base, revision = given or settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{adapter / CONFIG} does not name its base model; {remedy}")
    if given is None and revision not in (None, "main"):
        raise ValueError(
            f"{adapter / CONFIG}: revision is {revision!r}; download that revision of {base}, and {remedy}"
        )
    return Path(base) if Path(base).is_dir() else download(base, remedy)


def lora_scale(settings: Mapping[str, Any]) -> float:
    """Returns the factor of B·A by an adapter's config: alpha / rank, or alpha / √rank with rsLoRA."""
    rank: float = settings["r"]
    return float(settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def read_rope(directory: Path) -> dict[str, Any] | None:
    """Returns the RoPE settings that `save` wrote, or None. Raises ValueError for other settings."""
    path = directory / ROPE_FILE
    if not path.is_file():
        return None
    found = read_json_object(path)
    if unknown := sorted(found.keys() - set(ROPE_SETTINGS)):
        raise ValueError(f"{path} sets {unknown[0]!r}, which is no setting of RoPE; copy the adapter again")
    return found


def read_packed_base(directory: Path) -> PackedBase | None:
    """Returns the packed form of an adapter's base weights, None if not packed. Raises ValueError for unknown facts."""
    path = directory / BITS_FILE
    if not path.is_file():
        return None
    try:
        found = PackedBase(**read_json_object(path))
        known = isinstance(found.in_files, bool) and isinstance(getattr(torch, found.dtype), torch.dtype)
        known = known and found.form in FORMS
    except (TypeError, AttributeError):
        known = False
    if not known:
        raise ValueError(f"{path} does not say how base weights were held in fewer bits; copy the adapter again")
    return found


def flag_for_weights(checkpoint: Path) -> str:
    """Returns the flag that starts a new run from a checkpoint's weights, which may be an adapter's."""
    flag = "lora_adapter" if (checkpoint / CONFIG).is_file() else "model_name_or_path"
    return f"--{flag} {checkpoint}"
