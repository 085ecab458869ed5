"""The list of attention kernels. Loads without torch: a kernel's module is imported when the kernel is made."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightseq.kernels.base import Kernel, KernelSpec


def _class(module: str, name: str) -> Any:
    return getattr(import_module(f"lightseq.kernels.{module}"), name)


KERNELS: dict[str, Callable[[KernelSpec], Kernel]] = {
    "fa4": lambda spec: _class("flash_attn", "FlashAttention4")(spec.deterministic),
    "fa3": lambda spec: _class("flash_attn", "FlashAttention3")(spec.deterministic),
    "fa2": lambda spec: _class("flash_attn", "FlashAttention2")(spec.deterministic),
    "cudnn": lambda spec: _class("torch_native", "CudnnKernel")(),
    "aten": lambda spec: _class("torch_native", "AtenKernel")(spec.deterministic),
    "cpu": lambda spec: _class("torch_native", "CpuKernel")(),
    "reference": lambda spec: _class("reference", "ReferenceKernel")(),
}
