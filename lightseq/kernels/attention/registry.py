"""The list of attention kernels. Loads without torch: a kernel's module is imported when the kernel is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightseq.kernels.attention.base import Kernel, KernelSpec


def _class(module: str, name: str) -> Any:
    return getattr(import_module(f"lightseq.kernels.attention.{module}"), name)


@dataclass(frozen=True)
class RegisteredKernel:
    """A row of the list of kernels; `make` imports the kernel's module."""

    make: Callable[[KernelSpec], Kernel]
    description: str
    runs_on: str


KERNELS: dict[str, RegisteredKernel] = {
    "fa4": RegisteredKernel(
        lambda spec: _class("flash_attn", "FlashAttention4")(spec.deterministic),
        "FlashAttention-4, from the package flash-attn-4 (a wheel); on Hopper, gradients of heads of 256 by cuDNN",
        "Hopper, Blackwell",
    ),
    "fa3": RegisteredKernel(
        lambda spec: _class("flash_attn", "FlashAttention3")(spec.deterministic),
        "FlashAttention-3, built from source",
        "Hopper",
    ),
    "fa2": RegisteredKernel(
        lambda spec: _class("flash_attn", "FlashAttention2")(spec.deterministic),
        "FlashAttention-2, from the package flash-attn (built from source)",
        "Ampere and newer",
    ),
    "cudnn": RegisteredKernel(
        lambda spec: _class("torch_native", "CudnnKernel")(), "cuDNN, called through torch", "Ampere and newer"
    ),
    "aten": RegisteredKernel(
        lambda spec: _class("torch_native", "AtenKernel")(spec.deterministic),
        "torch's own FlashAttention-2",
        "Ampere and newer",
    ),
    "cublas": RegisteredKernel(
        lambda spec: _class("cublas", "CublasKernel")(),
        "cuBLAS over blocks of scores, for heads of any dimension",
        "GPUs with Triton",
    ),
    "cpu": RegisteredKernel(
        lambda spec: _class("torch_native", "CpuKernel")(), "torch's flash attention for CPUs", "CPU"
    ),
    "reference": RegisteredKernel(
        lambda spec: _class("reference", "ReferenceKernel")(),
        "Plain attention in torch: any dtype, memory quadratic in the length",
        "everywhere",
    ),
}
