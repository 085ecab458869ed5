"""Quantized weights of bitsandbytes and torchao under `hf.enable`, DDP and FSDP2: which train, and which are refused.

Their own modules and tensors compute the products; parts that read weights leave them alone.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightseq.parts.changes import Changes

TORCHAO: Final = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")  # which train; see the tests
ACTIVATIONS: Final = (
    "act_quant_kwargs",
    "activation_quantization",
)  # set if inputs are rounded, too
WHAT_TRAINS: Final = (
    "load the model with BitsAndBytesConfig, or torchao's Int8WeightOnlyConfig, Float8WeightOnlyConfig or "
    "IntxWeightOnlyConfig"
)
KEEPS_BYTES: Final = Version("2.13")  # torch's FSDP2 casts bytes to `param_dtype` before


def check_quantized(model: nn.Module) -> None:
    """Raises ValueError if a model that trains has torchao weights that may pass no gradient."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    for name, weight in _of_torchao(model):
        kind = type(weight).__name__
        if kind not in TORCHAO:
            raise ValueError(f"{name} is a {kind} of torchao, with which no test trains; {WHAT_TRAINS}")
        if any(getattr(weight, attribute, None) is not None for attribute in ACTIVATIONS):
            raise ValueError(f"{name} is a {kind} that rounds its inputs, too, and passes no gradient; {WHAT_TRAINS}")


def skip_in_ddp(model: nn.Module, changes: Changes) -> None:
    """Excludes torchao's frozen weights from DDP, which cannot broadcast them. All ranks load them from files."""
    if names := [name for name, _ in _of_torchao(model)]:
        before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        changes.set_attribute(model, "_ddp_params_and_buffers_to_ignore", [*before, *names])


def check_before_sharding(model: nn.Module) -> None:
    """Raises ValueError for weights with which FSDP2's own code or the first step would fail."""
    for name, weight in _of_torchao(model):
        raise ValueError(f"{name} is a {type(weight).__name__} of torchao, which FSDP2 cannot shard; use DDP")
    for name, linear in _of_bitsandbytes(model):
        _check_bits(name, linear)


def check_sharded(model: nn.Module) -> None:
    """Raises ValueError if FSDP2 has sharded weights of bitsandbytes that it does not gather bit for bit."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    sharded = [
        (name, x) for name, x in _of_bitsandbytes(model) if type(x.weight).__module__.partition(".")[0] == "torch"
    ]
    if not units or not sharded:
        return
    for name, linear in sharded:
        _check_bits(name, linear)
    casts: list[Any] = [unit._get_fsdp_state()._mp_policy.param_dtype for unit in units]
    if Version(torch.__version__) < KEEPS_BYTES and any(casts):
        raise ValueError(
            f"FSDP2 of torch {torch.__version__} casts the bytes of {sharded[0][0]} to param_dtype; leave param_dtype "
            "out, or install torch 2.13"
        )


def _check_bits(name: str, linear: Any) -> None:
    if "8bit" in type(linear).__name__:
        raise ValueError(f"{name} is in 8 bits of bitsandbytes, which FSDP2 cannot shard; use DDP, or load_in_4bit")
    if linear.quant_storage is not torch.uint8:
        raise ValueError(
            f"{name} has bnb_4bit_quant_storage={linear.quant_storage}, whose bits FSDP2 may change; load the model "
            "with torch.uint8"
        )


def _of_torchao(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the frozen weights of torchao's classes, with their names."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and type(parameter).__module__.partition(".")[0] == "torchao":
            yield name, parameter


def _of_bitsandbytes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the linears of bitsandbytes, with their names."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("bitsandbytes.")}
        if kinds & {"Linear4bit", "Linear8bitLt"}:
            yield name, module
