"""A whole model on one device, loaded with the same checks of files as in training."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from lightseq.architecture.family import MODEL_CONFIGS, model_within
from lightseq.models import fp8_blocks
from lightseq.models.build import build, model_class
from lightseq.models.decoder import float32_parameters, has_towers, text_config, with_text_settings
from lightseq.models.hub import download, hub_error
from lightseq.models.mxfp4 import is_mxfp4
from lightseq.models.weight_files import open_safetensors, tensor_files
from lightseq.models.weights import GENERATION_CONFIG, load_or_refuse, materialize, refuse_nan
from lightseq.parts import adapter_files
from lightseq.parts.packed_base import check_package, round_to_four_bits
from lightseq.utils.files import read_json_object
from lightseq.utils.formatting import first_line

CONFIG: Final = "config.json"
AGAIN: Final = "copy or download it again"


def find_directory(checkpoint: str) -> Path:
    """Returns the directory of a model or an adapter, from the hub if it is an id. Raises ValueError without one."""
    directory = Path(checkpoint)
    if directory.is_dir() and not any((directory / name).is_file() for name in MODEL_CONFIGS):
        raise ValueError(f"{checkpoint} is a directory without config.json; give {model_within(directory)}")
    if (directory / CONFIG).is_file():
        read_json_object(directory / CONFIG)
    if directory.is_dir():
        return directory
    if not directory.exists() and checkpoint.count("/") > 1:  # no id of the Hub
        raise ValueError(f"{checkpoint} does not exist; give a directory, or a Hub id such as Qwen/Qwen3-0.6B")
    if directory.exists():
        raise ValueError(f"{checkpoint} is not a directory; give a directory, or a Hub id such as Qwen/Qwen3-0.6B")
    if reason := hub_error(checkpoint, CONFIG):
        raise ValueError(f"{checkpoint} is not a directory, and cannot be fetched from the hub ({reason}); check it")
    return download(checkpoint, "give a local directory")


def load_pretrained(directory: Path, device: torch.device) -> PreTrainedModel:
    """Returns the model in a directory, or the one that an adapter in it changes, for generation.

    Raises ValueError for files that cannot be read, or that do not hold exactly the model's weights, or NaN.
    """
    is_adapter = (directory / adapter_files.CONFIG).is_file()
    model = _load_adapted(directory, device) if is_adapter else _load_whole(directory, device)
    refuse_nan(model, directory)
    model.eval()
    return model


def _load_whole(directory: Path, device: torch.device, rope: Mapping[str, Any] | None = None) -> PreTrainedModel:
    config = read_model_config(directory)
    if rope:
        config = with_text_settings(config, rope)
    tensor_files(directory, "save the model as safetensors")
    if is_mxfp4(vars(config)) or fp8_blocks.dtype_in(directory):
        del config.quantization_config
    if getattr(config, "quantization_config", None) is not None:
        model = _load_quantized(directory, config)
        model.to(device)
    else:
        dtype = config.dtype or text_config(config).dtype or torch.float32
        model = _guarded(directory / CONFIG, lambda: _build(config, dtype))
        materialize(model, device, dtype=dtype)
        load_or_refuse(model, directory, "checkpoint")
    if (directory / GENERATION_CONFIG).is_file():
        model.generation_config = _guarded(
            directory / GENERATION_CONFIG, lambda: GenerationConfig.from_pretrained(directory)
        )
    return model


def read_model_config(directory: Path) -> PreTrainedConfig:
    """Returns the config of the model in a directory, or of the one that an adapter in it changes.

    Raises ValueError for one that transformers cannot read.
    """
    if (directory / adapter_files.CONFIG).is_file():
        return read_model_config(find_base(directory))
    if not (directory / CONFIG).is_file():
        raise ValueError(f"{directory} has no {CONFIG}; {AGAIN}")
    return _guarded(directory / CONFIG, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False))  # type: ignore[no-any-return]


def _build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Builds the model on the meta device, with the parameters in the dtype in which transformers loads them."""
    with torch.device("meta"):
        model = build(config)
    in_float32 = float32_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in in_float32 else dtype)
    return model


def _load_quantized(directory: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Loads weights in a format that only transformers reads. Raises ValueError unless they are exactly the model's."""
    kind: Any = model_class(config)
    model, about = _guarded(directory, lambda: kind.from_pretrained(directory, dtype="auto", output_loading_info=True))
    for fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if about.get(fault):
            raise ValueError(f"{directory} does not match the model: {fault} {sorted(map(str, about[fault]))[:3]}")
    return model  # type: ignore[no-any-return]


def find_base(adapter: Path) -> Path:
    """Returns the directory of an adapter's base model. Raises ValueError for settings that cannot be used."""
    settings = read_json_object(adapter / adapter_files.CONFIG)
    adapter_files.check_numbers(settings, adapter / adapter_files.CONFIG)
    remedy = (
        f"edit base_model_name_or_path in {adapter / adapter_files.CONFIG}, or merge the adapter with "
        "`lightseq merge --model_name_or_path BASE` and generate from that"
    )
    return adapter_files.base_directory(settings, adapter, None, remedy)


def _load_adapted(directory: Path, device: torch.device) -> Any:
    """Loads a model and its peft adapter."""
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise ValueError(f"{directory} is an adapter, which needs peft; pip install peft") from error
    path = directory / adapter_files.WEIGHTS
    with open_safetensors(path) as file:
        stored = set(file.keys())
    model = _load_whole(find_base(directory), device, adapter_files.read_rope(directory))
    bits = adapter_files.read_packed_base(directory)
    if bits is not None and not bits.in_files:
        check_package(f"{directory}, which was trained on weights in four bits,")
        round_to_four_bits(model, getattr(torch, bits.dtype))
    with warnings.catch_warnings():  # peft asks whether the model checkpoints by a name that transformers renamed
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted = _guarded(directory, lambda: PeftModel.from_pretrained(model, str(directory)))
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    known = get_peft_model_state_dict(adapted, save_embedding_layers=True).keys()  # peft may add the base's weights
    unknown = set() if has_towers(model.config) else stored - known - expected  # an adapter may be of towers, too
    if wrong := sorted({*(expected - stored), *unknown}):
        fault = "lacks" if wrong[0] in expected else "has, unlike the adapted model,"
        raise ValueError(f"{path} {fault} {wrong[0]}; {AGAIN}, or give its base model")
    return adapted


def _guarded(path: Path, read: Callable[[], Any]) -> Any:
    """Calls foreign code that reads files. Raises ValueError for whatever it raises."""
    try:
        return read()
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} cannot be loaded by transformers: {_reason(error, path)}; correct it, or {AGAIN}"
        ) from error


def _reason(error: Exception, path: Path) -> str:
    """Returns an error's first line. For an unknown value in a config, returns the keys with this value."""
    if not isinstance(error, KeyError) or path.name != CONFIG:
        return first_line(error)
    (value,) = error.args or (None,)
    found = read_json_object(path)
    inner = [each for each in found.values() if isinstance(each, dict)]
    keys = [key for each in (found, *inner) for key, held in each.items() if held == value]
    return f"{' or '.join(dict.fromkeys(keys))} is {value!r}" if keys else f"KeyError: {value!r}"
