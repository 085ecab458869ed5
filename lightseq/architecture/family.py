"""Resolution of --model_name_or_path (a preset, its hub id, a local directory or any hub id), and RoPE scaling."""

import copy
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from lightseq.architecture.inspection import inspect_architecture
from lightseq.models import bnb4, fp8_blocks, mxfp4
from lightseq.models.decoder import text_config, with_text_settings
from lightseq.models.hub import hub_error
from lightseq.models.presets import FAMILIES, ModelFamily
from lightseq.parts.facts import heads_of

ROPE_TYPES: Final = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
WITH_ORIGINAL_LENGTH: Final = (
    "llama3",
    "yarn",
    "longrope",
)  # types that store the original length beside the extended one
MODEL_CONFIGS: Final = ("config.json", "adapter_config.json")  # of models, and of peft's adapters
FACTORS: Final = ("short_factor", "long_factor")  # keys of longrope, with one factor per frequency
# Keys of rope_parameters that belong to a type of scaling. Others, such as the axes of images, stay with the model.
OF_SCALING: Final = (
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "mscale",
    "mscale_all_dim",
    "short_mscale",
    "long_mscale",
    "low_freq_factor",
    "high_freq_factor",
    *FACTORS,
)


@dataclass(frozen=True)
class ModelSource:
    """Architecture of a model, and the directory or hub id of its weights, if it has any."""

    config: PreTrainedConfig
    weights: Path | str | None
    stored_form: str | None = None  # packed form of the files, even if not loaded: nf4, fp8 or mxfp4
    left_out: tuple[str, ...] = ()  # modules that are not in FP8
    quantization: str | None = None  # unsupported format of the weights


def resolve(family: ModelFamily, model_name_or_path: str, random_init: bool) -> ModelSource:
    """Returns the model that `--model_name_or_path` names. Raises ValueError for unknown names.

    Contacts the hub only for weights, or for an id that is not an alias of a preset.
    """
    name, directory = model_name_or_path, Path(model_name_or_path)
    if family.preset(name) is not None:
        if not random_init:
            remedy = "add --random_init, or give a directory (./name) or hub id that has weights"
            raise ValueError(f"--model_name_or_path {name} is a preset, which has no weights; {remedy}")
        return _source(preset_config(family, name), None, name)
    if random_init and name in family.aliases:
        return _source(preset_config(family, family.aliases[name]), None, name)
    if (directory / "config.json").is_file():
        return _source(_read_config(directory), None if random_init else directory, name)
    if (directory / "adapter_config.json").is_file():
        raise ValueError(
            f"--model_name_or_path {name} is an adapter; merge it with its model first: lightseq merge "
            f"--adapter {name} --output_dir DIR"
        )
    if directory.is_dir():
        raise ValueError(
            f"--model_name_or_path {name} is a directory without config.json; give {model_within(directory)}"
        )
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise ValueError(_unknown_name(family, name))
    _check_hub(family, name)
    return _source(_read_config(name), None if random_init else name, name)


def _source(config: PreTrainedConfig, weights: Path | str | None, name: str) -> ModelSource:
    stored, quantization = mxfp4.METHOD if mxfp4.is_mxfp4(vars(config)) else None, None
    left_out: tuple[str, ...] = ()
    if (settings := getattr(config, "quantization_config", None)) is not None:
        del config.quantization_config
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        bits, eight = bnb4.format_of(settings), fp8_blocks.format_of(settings)
        readable = (form for form in (bits, eight) if form in (bnb4.READ_FORMAT, fp8_blocks.METHOD))
        stored = stored or next(readable, None)
        method = f"{method or bnb4.METHOD} in {bits}" if bits else eight or method
        quantization = None if stored else method or "quantization_config"
        left_out = fp8_blocks.modules_left_out(settings) if stored == fp8_blocks.METHOD else ()
    source = ModelSource(config, weights, stored, left_out, quantization)
    if weights is not None:
        check_weights_are_not_quantized(source, name)
    return source


def check_weights_are_not_quantized(source: ModelSource, name: str) -> None:
    """Raises ValueError for weights in another quantized format than MXFP4, FP8 and NF4, which are read."""
    if source.quantization is not None:
        raise ValueError(
            f"--model_name_or_path {name} has quantized weights ({source.quantization} in its config.json); give a "
            "version in 16 or 32 bits, in NF4 of bitsandbytes, or in FP8 in blocks of 128 x 128"
        )


def model_within(directory: Path) -> str:
    """Returns advice for a directory without a model: the newest checkpoint, if it is a run's output."""
    saved = [path.parent for name in MODEL_CONFIGS for path in directory.glob(f"checkpoint-*/{name}")]
    numbered = [path for path in saved if re.fullmatch(r"checkpoint-\d+", path.name)]
    if not numbered:
        return "the directory of a saved model"
    return f"a checkpoint, such as {max(numbered, key=lambda path: int(path.name.split('-')[1]))}"


def preset_config(family: ModelFamily, preset: str) -> PreTrainedConfig:
    """Returns a new config of a preset, which shares nothing with other configs."""
    fields: dict[str, Any] = copy.deepcopy(dict(family.preset(preset) or {}))  # transformers modifies what it is given
    assert fields, preset
    model_type = fields.pop("model_type", "llama")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"--model_name_or_path {preset} is a {model_type}, which transformers {transformers.__version__} does not "
            "have; install a newer transformers"
        )
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**fields)
    return config


def check_config(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """Returns the config. Raises ValueError if training does not support every part of the architecture."""
    rope = _rope_parameters(config)
    if "rope_type" in rope:
        _check_rope_type(rope, name)
    try:
        attentions = inspect_architecture(config).attentions
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    for heads in {attention.heads for attention in attentions}:
        if min(heads.query, heads.key_value) < 1 or heads.query % heads.key_value:
            raise ValueError(
                f"{name} has {heads.query} attention heads, not a multiple of its {heads.key_value} key/value heads; "
                "use another model"
            )
    return config


def apply_rope(
    config: PreTrainedConfig,
    rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    length: int = 0,
) -> PreTrainedConfig:
    """Returns a new config with another RoPE base or scaling. Raises ValueError for invalid settings.

    Scaling replaces the model's own and starts from the model's unscaled context length. llama3, yarn and longrope
    store that length and set the config's length to the extended one; other types multiply the config's length. A
    larger base extends the config's length to the training length.
    """
    current, text = _rope_parameters(config), text_config(config)
    if (rope_theta is not None or rope_scaling is not None) and _has_rope_per_layer_type(config):
        given = f"--rope_theta {rope_theta}" if rope_scaling is None else f"--rope_scaling {dict(rope_scaling)}"
        raise ValueError(
            f"{given}: {text.model_type} has a RoPE for each type of layer ({', '.join(current)}), which cannot be "
            "changed; leave it out"
        )
    if (rope_theta is not None or rope_scaling is not None) and not current:
        raise ValueError(f"{text.model_type} has no RoPE parameters; leave --rope_theta and --rope_scaling out")
    published = text.max_position_embeddings
    unscaled = current.get("original_max_position_embeddings", published)
    context = published if rope_scaling is None else unscaled
    rope = current
    if rope_scaling is not None:
        frequencies = int(heads_of(config).dim * current.get("partial_rotary_factor", 1.0)) // 2
        rope = _scaled_rope(current, rope_scaling, unscaled, frequencies)
    if rope_theta is not None:
        if rope_scaling is not None and rope_scaling.get("rope_theta", rope_theta) != rope_theta:
            raise ValueError(
                f"--rope_theta {rope_theta} and rope_theta in --rope_scaling {rope_scaling} differ; give one"
            )
        if rope_scaling is None and rope_theta > current["rope_theta"]:
            context = max(context, length)
        rope["rope_theta"] = float(rope_theta)
    if rope_scaling is not None and rope["rope_type"] in WITH_ORIGINAL_LENGTH:
        # Most factors are not exact in binary, so the product may be just below the length.
        reached = round(rope["original_max_position_embeddings"] * rope["factor"])
        context = max(reached, published) if rope["rope_type"] == "llama3" else reached
    try:
        return with_text_settings(config, {"rope_parameters": rope, "max_position_embeddings": context})
    except KeyError as error:  # transformers names missing keys
        raise ValueError(f"--rope_scaling {dict(rope_scaling or {})}: {error.args[0]}; add them") from None


def context_warning(config: PreTrainedConfig, length: int, before: PreTrainedConfig | None = None) -> str | None:
    """Returns a warning if `length` tokens exceed the positions that the model and its scaling cover, else None.

    `before` is the config without --rope_scaling, if that was given; a scaling that covers fewer positions also warns.
    """
    if not _rope_parameters(config) and inspect_architecture(config).positions is None:
        return None  # nothing in the model depends on the position
    covered, had = covered_positions(config), covered_positions(before) if before is not None else 0
    if length <= covered and had <= covered:
        return None
    if had > covered:
        asked = f", and sequences have {length} tokens" if length > covered else ""
        leave = ", or leave it out" if length <= had else ""
        left = f"--rope_scaling reduces the positions that the model covers from {had} to {covered}{asked}"
        return f"{left}; {_needed_factor(config, max(length, had))}{leave}"
    beyond = f"sequences of {length} tokens exceed the {covered} positions that the model covers"
    if _has_rope_per_layer_type(config):
        return f"{beyond}; give {covered} or less"
    remedy = "extend the positions with --rope_scaling" if before is None else _needed_factor(config, length)
    return f"{beyond}; {remedy}, or give {covered} or less"


def covered_positions(config: PreTrainedConfig) -> int:
    """Returns the number of positions that the model and its scaling cover."""
    rope = _rope_parameters(config)
    factor = 1.0 if rope.get("rope_type") in (*WITH_ORIGINAL_LENGTH, "default") else rope.get("factor", 1.0)
    return round(text_config(config).max_position_embeddings * factor)


def _has_rope_per_layer_type(config: PreTrainedConfig) -> bool:
    """Returns whether layers with and without a window have RoPE parameters of their own, as in Gemma 3."""
    return any(isinstance(value, Mapping) for value in _rope_parameters(config).values())


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    return dict(getattr(text_config(config), "rope_parameters", None) or {})


def _needed_factor(config: PreTrainedConfig, length: int) -> str:
    """Returns advice on --rope_scaling: the length that a factor multiplies, and the smallest factor for `length`."""
    rope = _rope_parameters(config)
    start = rope.get("original_max_position_embeddings", text_config(config).max_position_embeddings)
    factor = f"{math.ceil(100 * length / start) / 100:g}"
    if rope.get("rope_type") == "default":
        return f"rope_type default has no factor: give yarn with factor {factor} for {length}"
    return f"the factor of --rope_scaling multiplies {start}: give {factor} for {length}"


def _check_factors(scaling: Mapping[str, Any], frequencies: int) -> None:
    for key in FACTORS:
        given = scaling.get(key)
        numbers = isinstance(given, list) and all(isinstance(x, int | float) for x in given)
        if not numbers or len(given) != frequencies:  # type: ignore[arg-type]
            found = f"{len(given)} numbers" if isinstance(given, list) and numbers else f"{given!r:.40}"
            raise ValueError(f"--rope_scaling: {key} of longrope is {found}; give a list of {frequencies} numbers")


def _scaled_rope(
    current: Mapping[str, Any], scaling: Mapping[str, Any], unscaled: int, frequencies: int
) -> dict[str, Any]:
    rope = {key: value for key, value in current.items() if key not in OF_SCALING} | dict(scaling)
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type")  # `type` is the older spelling
    _check_rope_type(rope, f"--rope_scaling {dict(scaling)}")
    if rope["rope_type"] == "longrope":
        _check_factors(scaling, frequencies)
    for key in sorted(scaling.keys() - {"rope_type", "type", *FACTORS}):
        number = scaling[key]
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"--rope_scaling {dict(scaling)}: {key} is {scaling[key]!r}; give a number")
    if rope["rope_type"] != "default" and rope.get("factor", 0) < 1:
        raise ValueError(f"--rope_scaling {dict(scaling)}: factor is {rope.get('factor')}; give a number of at least 1")
    if rope["rope_type"] in WITH_ORIGINAL_LENGTH or "llama_4_scaling_beta" in rope:  # Ministral 3
        rope.setdefault("original_max_position_embeddings", unscaled)
    return rope


def _check_rope_type(rope: Mapping[str, Any], where: str) -> None:
    if rope.get("rope_type") not in ROPE_TYPES:
        raise ValueError(
            f"{where}: rope_type {rope.get('rope_type')!r} is unknown; choose from {', '.join(ROPE_TYPES)}"
        )


def _read_config(source: Path | str) -> PreTrainedConfig:
    try:
        # Without trust_remote_code=False, transformers may prompt.
        config = AutoConfig.from_pretrained(source, local_files_only=isinstance(source, Path), trust_remote_code=False)
        type(config).from_dict(config.to_dict())  # apply_rope handles RoPE settings later
    except Exception as error:  # the config's class may raise anything
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--model_name_or_path {source}: its config cannot be read ({reason}); give another model"
        ) from error
    return check_config(config, f"--model_name_or_path {source}")


CONFIG_IS_ENOUGH: Final = (
    "A directory with only the model's config.json is enough for lightseq plan and verify, and for --random_init"
)


def _check_hub(family: ModelFamily, hub_id: str) -> None:
    reason = hub_error(hub_id, "config.json")
    if reason is None:
        return
    if hub_id in family.aliases:
        remedy = "add --random_init to train its architecture from fresh weights"
    else:
        elsewhere = _presets_elsewhere(family)
        nearest = [name for name in _nearest_presets(family, hub_id.split("/")[-1]) if name not in elsewhere]
        remedy = f"give --random_init and a preset, such as {[*nearest, *family.presets][0]}"
    raise ValueError(
        f"--model_name_or_path {hub_id} is not a local directory and cannot be fetched from the hub "
        f"({reason}); check the id and the network, or {remedy}. {CONFIG_IS_ENOUGH}"
    )


CLOSE_NAMES: Final = 3  # presets that an unknown name may have meant


def _unknown_name(family: ModelFamily, name: str) -> str:
    other = next((each for each in FAMILIES if each.preset(name) is not None), None)
    if other is not None:
        return f"--model_name_or_path {name} is a preset of {other.name}: use {other.command}"
    elsewhere = _presets_elsewhere(family)
    given = f"--model_name_or_path {name} is not a directory, hub id or preset of {family.name}"
    nearest = _nearest_presets(family, name)[:CLOSE_NAMES]
    if not nearest:
        return f"{given} ({', '.join(family.presets)}). {CONFIG_IS_ENOUGH}"
    names = [f"{each}, of {elsewhere[each].command}" if each in elsewhere else each for each in nearest]
    return f"{given}; did you mean {' or '.join(names)}? {CONFIG_IS_ENOUGH}"


def _presets_elsewhere(family: ModelFamily) -> dict[str, ModelFamily]:
    return {preset: each for each in FAMILIES for preset in each.presets if preset not in family.presets}


def _nearest_presets(family: ModelFamily, name: str) -> list[str]:
    """Returns presets with similar names, most similar first. Ties go to the family's own."""
    elsewhere, wanted = _presets_elsewhere(family), name.lower()
    known = [*family.presets, *elsewhere]
    return sorted(
        difflib.get_close_matches(wanted, known, n=len(known)),
        key=lambda preset: (-difflib.SequenceMatcher(None, preset, wanted).ratio(), preset in elsewhere),
    )
