"""Attention kernels behind one interface. They compute tiles and know nothing of ranks.

Names load on first use, so that the registry needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightseq.kernels.registry import KERNELS

if TYPE_CHECKING:
    from lightseq.kernels.base import Kernel, KernelSpec, Saved, compute_capability
    from lightseq.kernels.launches import Launches, addresses
    from lightseq.kernels.lse_merge import merge, merge_into
    from lightseq.kernels.selection import Selection, select
    from lightseq.kernels.tile import VarlenKernel, backward_tile, forward_tile

_MODULES = {
    "base": ("Kernel", "KernelSpec", "Saved", "compute_capability"),
    "launches": ("Launches", "addresses"),
    "lse_merge": ("merge", "merge_into"),
    "selection": ("Selection", "select"),
    "tile": ("VarlenKernel", "backward_tile", "forward_tile"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "KERNELS",
    "Kernel",
    "KernelSpec",
    "Launches",
    "Saved",
    "Selection",
    "VarlenKernel",
    "addresses",
    "backward_tile",
    "compute_capability",
    "forward_tile",
    "merge",
    "merge_into",
    "select",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
