"""Attention kernels behind one interface: they compute a tile and know nothing of ranks."""

from lightseq.kernels.base import Kernel, KernelSpec, backward_tile, forward_tile
from lightseq.kernels.merge import add_into, copy_all, merge, merge_into
from lightseq.kernels.select import KERNELS, Selection, select

__all__ = [
    "KERNELS",
    "Kernel",
    "KernelSpec",
    "Selection",
    "add_into",
    "backward_tile",
    "copy_all",
    "forward_tile",
    "merge",
    "merge_into",
    "select",
]
