"""Adapters of peft that cannot work on split sequences."""

from typing import Any

from torch import nn


def check_adapters(model: nn.Module) -> None:
    """Raises ValueError for adapters of peft that add tokens, compute across tokens, or train and add to the loss."""
    configs = (getattr(module, "active_peft_config", None) for module in model.modules())
    config: Any = next((config for config in configs if config is not None), None)
    if config is None:
        return
    kind = config.peft_type.value
    if config.is_prompt_learning:
        raise ValueError(f"{kind} adapters add tokens to each sequence, so ranks cannot share one; use LoRA")
    if (option := _across_tokens(config, kind)) is not None:
        raise ValueError(f"{option} computes with tokens that other ranks hold; use plain LoRA")
    if kind == "ADALORA" and any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("ADALORA adapters add a penalty to the loss, which every rank would add again; use LoRA")


def _across_tokens(config: Any, kind: str) -> str | None:
    """Returns the kind or option of adapters that compute across the tokens of a sequence, None without one."""
    if kind == "LILY":  # averages the weights of its experts over tokens
        return "peft's adapter LILY"
    # aLoRA begins at given tokens. VeLoRA projects on the mean of the first batch.
    names = ("alora_invocation_tokens", "velora_config")
    return next((f"peft's LoRA with {name}" for name in names if getattr(config, name, None)), None)
