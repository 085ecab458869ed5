"""Low-rank adapters (LoRA, arXiv 2106.09685) in peft's layers and file format.

Only the adapters train. The model keeps its class, its module names and its own weights, in the compute dtype.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.config.train_config import TrainConfig
from lightseq.models.decoder import decoder_layers, float32_parameters, has_towers, module_name, text_config
from lightseq.models.random_weights import named_generator
from lightseq.models.weights import LORA_INFIX, FillParameter, fill
from lightseq.parts.adapter_targets import Targets, ends_with, find_targets, last_part
from lightseq.parts.changes import changes_of
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.expert_adapters import use_in_experts
from lightseq.parts.low_rank import RoundedOnce, adapter_in_use, has_plain_adapter, linear_weights, lora_linear

ALL_LINEARS: Final = "all-linear"


@dataclass(frozen=True)
class Lora:
    """Settings from the flags that begin with `--lora_`, and from `--use_rslora`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of linears in the layers, such as q_proj
    layers: str | None = None  # name of the layers, if other parts of the model have linears of these names
    parameters: tuple[str, ...] = ()  # weights of stacked experts, by their names in a layer
    pattern: str | None = None  # regular expression for whole names of linears; `targets` has their last parts
    rank_stabilized: bool = False  # arXiv 2312.03732

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def adapts(self, linear: str) -> bool:
        """Returns whether a linear of the layers gets an adapter, by its whole name."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, linear) is not None
        return last_part(linear) in self.targets


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
    flag = f"--lora_target_modules {config.lora_target_modules}"
    remedy = f"choose from {', '.join(linears)}, or {ALL_LINEARS}"
    pattern = config.lora_target_modules if _is_pattern(asked) else None
    if pattern is not None:
        targets = _matched(pattern, found)
    else:
        targets = linears if asked == [ALL_LINEARS] else asked
    if not targets and not parameters:
        raise ValueError(f"--lora_target_modules is empty; {remedy}")
    if taken := [name for name in targets if name in found.taken]:
        raise ValueError(
            f"{flag}: peft puts adapters for {taken[0]} on this model's experts or router; leave it out, and give "
            "experts with --lora_target_parameters"
        )
    if refused := [name for name in targets if name in found.refused]:
        raise ValueError(f"{flag}: peft adds no adapter to {refused[0]} of {model_config.model_type}; {remedy}")
    if unknown := [name for name in targets if name not in linears]:
        raise ValueError(f"{flag}: {unknown[0]} is not a linear of the model's layers; {remedy}")
    layers = None
    if has_towers(model_config):
        model = build_to_train(model_config)
        layers = module_name(model, decoder_layers(model))
    return Lora(
        rank=config.lora_rank,
        alpha=config.lora_alpha or 2.0 * config.lora_rank,
        targets=tuple(targets),
        layers=layers,
        parameters=parameters,
        pattern=pattern,
        rank_stabilized=config.use_rslora,
    )


def _is_pattern(words: list[str]) -> bool:
    """Returns whether the words of `--lora_target_modules` are a regular expression instead of names."""
    return words != [ALL_LINEARS] and not all(re.fullmatch(r"[\w.]+", word) for word in words)


def _matched(pattern: str, found: Targets) -> list[str]:
    """Returns the last parts of the names of linears that a regular expression matches. peft, too, takes whole names.

    Raises ValueError for an invalid expression, and for one that matches no linear, or another module.
    """
    given = f"--lora_target_modules {pattern}"
    try:
        matches = re.compile(pattern).fullmatch
    except re.error as error:
        raise ValueError(f"{given} is no regular expression ({error}); give names or a valid one") from None
    others = [name for name in found.modules if matches(name) and name not in found.linears]
    if others:
        raise ValueError(f"{given} matches {others[0]}, which is not a linear of the model's layers; make it narrower")
    names = [name for name in found.linears if matches(name)]
    if not names:
        raise ValueError(
            f"{given} matches no linear of the layers; it has to match whole names, such as {next(iter(found.linears))}"
        )
    return sorted({last_part(name) for name in names})


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
    """Returns a note if `all-linear` leaves out experts or some linears of a model."""
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


def add_adapters(model: PreTrainedModel, lora: Lora | None, dtype: torch.dtype) -> None:
    """Adds adapters to a model on the meta device, and freezes its own weights in the compute dtype."""
    if lora is None:
        return
    from peft import inject_adapter_in_model

    inject_adapter_in_model(peft_config(lora), model, low_cpu_mem_usage=True)
    changes = changes_of(model)
    for module in model.modules():
        if hasattr(module, "parameter_name"):
            use_in_experts(module, changes)
        elif hasattr(module, "lora_A") and has_plain_adapter(module):
            changes.set_attribute(module, "__class__", _rounded_once(type(module)))  # type: ignore[arg-type]
    freeze(model, dtype)


def freeze(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Freezes everything but adapters, and casts the model's own weights to the compute dtype."""
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
    """Returns the linears to adapt, in the form of peft's config."""
    if lora.pattern is not None:
        return lora.pattern
    if lora.layers is None or not lora.targets:
        return sorted(lora.targets)
    # a pattern, which peft compares with whole names
    return rf"{re.escape(lora.layers)}\..*\.({'|'.join(map(re.escape, lora.targets))})"


def peft_config(lora: Lora, base: str | None = None) -> Any:
    """Returns peft's config of adapters, to train them, or to save them with the name of their base model."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=target_modules(lora), lora_dropout=0.0, bias="none",
        target_parameters=list(lora.parameters) or None, task_type="CAUSAL_LM", base_model_name_or_path=base,
        inference_mode=base is not None, use_rslora=lora.rank_stabilized,
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


def lora_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the names and parameters of the adapters."""
    return ((name, p) for name, p in model.named_parameters() if LORA_INFIX in name)
