"""Low-rank adapters (LoRA, arXiv 2106.09685) in peft's layers and file format.

Only the adapters train. The model keeps its class, its module names and its own weights, in the compute dtype.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.config.train_config import TrainConfig
from lightseq.models.decoder import decoder_layers, float32_parameters, has_towers, module_name, text_config
from lightseq.models.random_weights import named_generator
from lightseq.models.tokenizer_files import PROCESSOR_FILES, copy_files, copy_tokenizer
from lightseq.models.weights import (
    LORA_INFIX,
    FillParameter,
    download,
    fill,
    global_shape,
    open_safetensors,
    open_tensors,
    save_tensors,
    without_nan,
)
from lightseq.parts.adapter_targets import Targets, ends_with, find_targets, last_part
from lightseq.parts.changes import changes_of
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.expert_adapters import use_in_experts
from lightseq.parts.low_rank import (
    RoundedOnce,
    adapter_in_use,
    has_plain_adapter,
    linear_weights,
    lora_linear,
)
from lightseq.utils.files import read_json
from lightseq.utils.formatting import first_line

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ROPE_FILE: Final = "adapter_rope.json"  # RoPE settings that a run changed; peft's files cannot hold them
ROPE_SETTINGS: Final = ("rope_parameters", "max_position_embeddings")
ALL_LINEARS: Final = "all-linear"
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


@dataclass(frozen=True)
class Lora:
    """Settings from the flags `--lora_rank`, `--lora_alpha`, `--lora_target_modules` and `--lora_target_parameters`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of linears in the layers, such as q_proj
    layers: str | None = None  # name of the layers, if other parts of the model have linears of these names
    parameters: tuple[str, ...] = ()  # weights of stacked experts, by their names in a layer

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def lora_from_config(config: TrainConfig, model_config: PreTrainedConfig) -> Lora | None:
    """Returns the adapters that the flags ask for; None without `--lora_rank`. Raises ValueError for invalid flags."""
    if config.lora_rank is None:
        return None
    if find_spec("peft") is None:
        raise ValueError(f"--lora_rank {config.lora_rank} needs peft, which is not installed; pip install peft")
    if config.lora_rank > (hidden := text_config(model_config).hidden_size):
        raise ValueError(
            f"--lora_rank {config.lora_rank} exceeds the model's hidden size of {hidden:,}; give a lower rank"
        )
    found = find_targets(model_config)
    parameters = _asked_parameters(config.lora_target_parameters, found)
    linears = sorted({last_part(name) for name in found.linears} - found.taken - found.refused)
    asked = config.lora_target_modules.replace(",", " ").split()
    targets = linears if asked == [ALL_LINEARS] else asked
    if not targets and not parameters:
        raise ValueError(f"--lora_target_modules is empty; choose from {', '.join(linears)}, or {ALL_LINEARS}")
    if taken := [name for name in targets if name in found.taken]:
        raise ValueError(
            f"--lora_target_modules {config.lora_target_modules}: peft puts adapters for {taken[0]} on this model's "
            f"experts or router; leave it out, and give experts with --lora_target_parameters"
        )
    if refused := [name for name in targets if name in found.refused]:
        raise ValueError(
            f"--lora_target_modules {config.lora_target_modules}: peft adds no adapter to {refused[0]} of "
            f"{model_config.model_type}; choose from {', '.join(linears)}, or {ALL_LINEARS}"
        )
    if unknown := [name for name in targets if name not in linears]:
        raise ValueError(
            f"--lora_target_modules {config.lora_target_modules}: {unknown[0]} is not a linear of the model's layers; "
            f"choose from {', '.join(linears)}, or {ALL_LINEARS}"
        )
    layers = _layers_name(model_config) if has_towers(model_config) else None
    return Lora(config.lora_rank, config.lora_alpha or 2.0 * config.lora_rank, tuple(targets), layers, parameters)


def _asked_parameters(flag: str | None, found: Targets) -> tuple[str, ...]:
    """Returns the names in a layer of the experts' weights that `--lora_target_parameters` names by their ends."""
    known = found.parameters
    asked = flag.replace(",", " ").split() if flag else []
    for end in asked:
        if not known:
            raise ValueError(f"--lora_target_parameters {flag}: the model has no stacked experts; leave it out")
        if not any(ends_with(name, end) for name in known):
            raise ValueError(
                f"--lora_target_parameters {flag}: {end} is not a weight of the model's experts; choose from "
                f"{', '.join(known)}"
            )
    return tuple(name for name in known if any(ends_with(name, end) for end in asked))


def notes_on_targets(config: TrainConfig, lora: Lora | None, model_config: PreTrainedConfig) -> tuple[str, ...]:
    """Returns a line if `all-linear` leaves out some linears of a model, or its experts."""
    if lora is None or config.lora_target_modules != ALL_LINEARS:
        return ()
    found = find_targets(model_config)
    left = [f"{', '.join(sorted(found.taken))} (peft takes these names for experts)"] if found.taken else []
    if found.refused:
        left.append(f"{', '.join(sorted(found.refused))} (peft adds no adapter there in {model_config.model_type})")
    remedy = ""
    if found.parameters and not lora.parameters:
        left.insert(0, "the experts")
        remedy = f"; to adapt experts, add --lora_target_parameters {','.join(found.parameters)}"
    return (f"--lora_target_modules {ALL_LINEARS} leaves out {' and '.join(left)}{remedy}",) if left else ()


def _layers_name(model_config: PreTrainedConfig) -> str:
    """Returns the name of the list of decoder layers in a model."""
    model = build_to_train(model_config)
    return module_name(model, decoder_layers(model))


def add_adapters(model: PreTrainedModel, lora: Lora | None, dtype: torch.dtype) -> None:
    """Adds adapters to a model on the meta device, and freezes its own weights in the compute dtype."""
    if lora is None:
        return
    from peft import inject_adapter_in_model

    inject_adapter_in_model(_peft_config(lora), model, low_cpu_mem_usage=True)
    changes = changes_of(model)
    for module in model.modules():
        if hasattr(module, "parameter_name"):
            use_in_experts(module, changes)
        elif hasattr(module, "lora_A") and has_plain_adapter(module):
            changes.set_attribute(module, "__class__", _rounded_once(type(module)))  # type: ignore[arg-type]
    freeze(model, dtype)


def freeze(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Lets only adapters train, if there are any, and casts the model's own weights to the compute dtype."""
    in_float32 = float32_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(LORA_INFIX in name)
        if LORA_INFIX not in name and name not in in_float32:
            parameter.data = parameter.data.to(dtype)


@cache
def _rounded_once(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass of peft's layer that computes the base and the adapter product in one matrix product.

    peft rounds both products before it adds them. In bfloat16 an adapter's contribution below half a rounding step of
    the base product is lost; early in training that is all of it.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        if not adapter_in_use(self):
            return kind.forward(self, x)
        out = lora_linear(x.flatten(0, -2), linear_weights(self, x.dtype)).view(*x.shape[:-1], -1)
        return out if self.base_layer.bias is None else out + self.base_layer.bias

    return type(f"RoundedOnce{kind.__name__}", (kind, RoundedOnce), {"forward": forward})


def target_modules(lora: Lora) -> list[str] | str:
    """Returns the linears to adapt as peft's config has them."""
    if lora.layers is None or not lora.targets:
        return sorted(lora.targets)
    # a pattern, which peft compares with whole names
    return rf"{re.escape(lora.layers)}\..*\.({'|'.join(map(re.escape, lora.targets))})"


def _peft_config(lora: Lora, base: str | None = None) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=target_modules(lora), lora_dropout=0.0, bias="none",
        target_parameters=list(lora.parameters) or None, task_type="CAUSAL_LM", base_model_name_or_path=base,
        inference_mode=base is not None,
    )  # fmt: skip


def initialize(
    model: PreTrainedModel, seed: int, fill: FillParameter = fill, device: torch.device | None = None
) -> None:
    """Initializes adapters as peft does: A uniform in ±1/√inputs, B zero. The number of ranks does not matter."""
    for name, parameter in lora_parameters(model):
        shape, on = tuple(parameter.shape), device or parameter.device
        whole = torch.zeros(shape, device=on)
        if "lora_A" in name:
            bound = 1 / math.sqrt(shape[1])
            whole.uniform_(-bound, bound, generator=named_generator(name, seed, on))
        fill(parameter, whole.__getitem__)


def load(model: PreTrainedModel, directory: Path, fill: FillParameter = fill) -> None:
    """Fills the adapters from the files of one, by peft or a checkpoint. Raises ValueError unless it has the same."""
    parameters = {_name_in_file(name): parameter for name, parameter in lora_parameters(model)}
    path = directory / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{directory} has no {WEIGHTS}; give the directory of an adapter")
    with open_safetensors(path) as file:
        names = set(file.keys())
    if different := sorted(names ^ parameters.keys()):
        whose = "the run's adapters lack" if different[0] in names else "which lacks the run's"
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
    for flag, before, now in (
        ("rank", settings["r"], lora.rank),
        ("alpha", lora_scale(settings) * lora.rank, lora.alpha),
    ):
        if not math.isclose(before, now):
            raise ValueError(
                f"--lora_adapter {directory} has lora_{flag} {before:g}, not {now:g}; give --lora_{flag} {before:g}"
            )


def _name_in_file(name: str) -> str:
    return f"base_model.model.{name.replace('.default', '')}"


def lora_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the names and parameters of the adapters."""
    return ((name, p) for name, p in model.named_parameters() if LORA_INFIX in name)


def changed_rope(config: TrainConfig, model_config: PreTrainedConfig) -> dict[str, Any] | None:
    """Returns the RoPE settings of config.json if a run's flags changed them, else None."""
    if config.rope_theta is None and config.rope_scaling is None:
        return None
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
) -> None:
    """Writes whole adapter tensors for `PeftModel.from_pretrained`, and `rope` in a file of its own."""
    tensors = {_name_in_file(name): x.contiguous() for name, x in whole}
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, directory / WEIGHTS)
    _peft_config(lora, base_model_name(base)).save_pretrained(str(directory))
    if rope is not None:
        (directory / ROPE_FILE).write_text(json.dumps(rope, indent=2) + "\n")
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
    """Returns the directory of an adapter's base model: of `given`, or as the adapter's settings say.

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


def flag_for_weights(checkpoint: Path) -> str:
    """Returns the flag that starts a new run from a checkpoint's weights, which may be an adapter's."""
    flag = "lora_adapter" if (checkpoint / CONFIG).is_file() else "model_name_or_path"
    return f"--{flag} {checkpoint}"


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ValueError naming the file if it holds no object."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)}); copy it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object; copy it again")
    return found
