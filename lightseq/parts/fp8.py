"""FP8 linear layers of torchao: hardware checks, and the conversion of modules."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn

from lightseq.kernels.attention.base import compute_capability
from lightseq.parts.experts import experts_modules
from lightseq.parts.identity import linear_change

MULTIPLE = 16  # torch._scaled_mm needs sizes that are multiples of it

# A fused recomputation skips roundings to bfloat16 that the forward pass made. FP8 turns such a difference into a whole
# step of its grid; recomputed queries and keys no longer match the stored log-sum-exp, and gradients explode
# (https://github.com/pytorch/pytorch/issues/150859).
FP8_COMPILE_OPTIONS: Final[dict[str, Any]] = {"emulate_precision_casts": True}


def check_fp8(recipe: str | None, emulate: bool, sizes: Mapping[str, int], device: torch.device) -> None:
    """Raises ValueError if the recipe cannot run here. Emulated, it runs everywhere.

    `sizes` holds the shapes of the layers' weight matrices by name.
    """
    if recipe is None:
        return
    if find_spec("torchao") is None:
        raise ValueError(f"--fp8 {recipe} needs torchao, which is not installed; pip install torchao")
    if emulate:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    check_hardware(recipe, name, compute_capability(device))
    if odd := [f"{what} {size}" for what, size in sizes.items() if size % MULTIPLE]:
        raise ValueError(f"--fp8 {recipe}: {odd[0]} is not a multiple of {MULTIPLE}; leave --fp8 out for this model")


def check_hardware(recipe: str, name: str, capability: tuple[int, int]) -> None:
    """Raises ValueError for a GPU without kernels for the recipe.

    Ada, Hopper and Blackwell multiply in FP8; torch has rowwise kernels for the first two and for 10.x only.
    """
    leave = "leave it out to train in bfloat16, or add --fp8_emulate to get its losses at low speed"
    if capability < (8, 9):
        raise ValueError(
            f"--fp8 {recipe} needs a GPU of compute capability 8.9 or newer, but {name} has no FP8; {leave}"
        )
    if recipe == "rowwise" and capability[0] > 10:
        raise ValueError(f"--fp8 rowwise has no kernel for {name}; use --fp8 tensorwise")


def to_fp8(layers: Any, recipe: str, emulate: bool, local_tokens: int) -> None:
    """Replaces linears of the layers by ones that cast their operands to FP8, with dynamic scales.

    Experts and their routers do not change, nor do master weights, gradients, the LM head and attention. The sum over
    tokens in a weight's gradient is padded if a rank's part of a sequence is not a multiple of 16. Raises ValueError
    for a linear with a hook or a forward of its own, which the new one would not have.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    routers = set(_routers(layers))
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear) and module not in routers and (change := linear_change(module)) is not None:
            raise ValueError(f"--fp8 {recipe}: linear {name} {change}, which would be lost; leave --fp8 out")
    pad = local_tokens % MULTIPLE != 0
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=pad)
    convert_to_float8_training(layers, config=config, module_filter_fn=lambda module, _: module not in routers)


def _routers(layers: nn.Module) -> Iterator[nn.Linear]:
    """Yields the linears beside experts that choose among them, or weigh the shared ones."""
    for name, experts in experts_modules(layers):
        for module in layers.get_submodule(name.rpartition(".")[0]).modules():
            if isinstance(module, nn.Linear) and module.out_features in (1, experts.num_experts):
                yield module
