"""Adapters of peft that cannot train on split sequences."""

from typing import Any

from torch import nn


def check_adapters(model: nn.Module) -> None:
    """Raises ValueError for adapters of peft that add tokens to sequences, or that train and add to the loss."""
    configs = (getattr(module, "active_peft_config", None) for module in model.modules())
    config: Any = next((config for config in configs if config is not None), None)
    if config is None:
        return
    kind = config.peft_type.value
    if config.is_prompt_learning:
        raise ValueError(f"{kind} adapters add tokens to each sequence, so ranks cannot share one; use LoRA")
    if kind == "ADALORA" and any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("ADALORA adapters add a penalty to the loss, which every rank would add again; use LoRA")
