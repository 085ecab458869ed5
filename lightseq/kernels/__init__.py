"""Attention kernels behind one interface: they compute a tile and know nothing of ranks."""

from lightseq.kernels.base import Kernel, KernelSpec, Saved
from lightseq.kernels.launches import Launches, addresses
from lightseq.kernels.merge import merge, merge_into
from lightseq.kernels.select import KERNELS, Selection, select
from lightseq.kernels.tile import VarlenKernel, backward_tile, forward_tile

__all__ = [
    "KERNELS",
    "Kernel",
    "KernelSpec",
    "Launches",
    "Saved",
    "Selection",
    "VarlenKernel",
    "backward_tile",
    "forward_tile",
    "merge",
    "merge_into",
    "select",
    "addresses",
]
