"""Attention kernels behind one interface: they compute a tile and know nothing of ranks."""

from lightseq.kernels.base import Kernel, KernelSpec
from lightseq.kernels.launches import Launches, addresses
from lightseq.kernels.merge import merge, merge_into
from lightseq.kernels.rows import row_terms
from lightseq.kernels.segments import VarlenKernel, backward_tile, forward_tile
from lightseq.kernels.select import KERNELS, Selection, select

__all__ = [
    "KERNELS",
    "Kernel",
    "KernelSpec",
    "Launches",
    "Selection",
    "VarlenKernel",
    "backward_tile",
    "forward_tile",
    "merge",
    "merge_into",
    "row_terms",
    "select",
    "addresses",
]
