"""Bytes of NF4 (QLoRA, arXiv 2305.14314) as bitsandbytes has them: made of a dense weight, and made dense again.

Every 64 elements share a scale. With double quantization, scales have 8 bits, and every 256 of them share a float32
scale. Their mean is the offset of the whole weight: a matrix, or the matrices of stacked experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
from torch import Tensor

BLOCK, NESTED_BLOCK = 64, 256  # elements of a scale, scales of a nested one
SCALE: Final = torch.float32


@dataclass(frozen=True)
class Nf4Bytes:
    """Bytes of a weight, or of some of its rows, which are the slices along its first axis."""

    nibbles: Tensor  # uint8, two elements each, rows one after the other
    scales: Tensor  # uint8, of blocks: a byte each, or the four of a float32 without double quantization
    nested: Tensor  # float32, of NESTED_BLOCK scales each, for the whole matrix; empty without double quantization
    offset: Tensor  # float32 without dims, added to every scale

    def map(self, change: Callable[[Tensor], Tensor]) -> "Nf4Bytes":
        """Applies a function to each tensor."""
        return Nf4Bytes(change(self.nibbles), change(self.scales), change(self.nested), change(self.offset))

    def elements(self, start: int, end: int) -> "Nf4Bytes":
        """Returns the bytes of some elements, which begin and end with a block."""
        scales = slice(self.scale_bytes(start), self.scale_bytes(end))
        return replace(self, nibbles=self.nibbles[start // 2 : end // 2], scales=self.scales[scales])

    def scale_bytes(self, elements: int) -> int:
        """Returns the bytes of the scales of whole blocks."""
        return elements // BLOCK * (1 if len(self.nested) else SCALE.itemsize)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.nibbles, self.scales, self.nested, self.offset


def empty_bytes(elements: int, nested: int, device: torch.device) -> Nf4Bytes:
    """Allocates bytes of some elements with so many nested scales, 0 without double quantization."""

    def bytes_(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=device)

    return Nf4Bytes(
        bytes_(elements // 2), bytes_(elements // BLOCK * (1 if nested else SCALE.itemsize)),
        torch.empty(nested, device=device),
        torch.empty((), device=device),
    )  # fmt: skip


def quantize(dense: Tensor) -> Nf4Bytes:
    """Returns a dense weight in four bits, with double quantization."""
    from bitsandbytes.functional import quantize_4bit

    nibbles, state = quantize_4bit(dense.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    return Nf4Bytes(nibbles.flatten(), state.absmax, state.state2.absmax, state.offset)


@torch.library.custom_op("lightseq::dequantize_nf4", mutates_args=())
def dequantize(
    nibbles: Tensor, scales: Tensor, nested: Tensor, offset: Tensor, shape: Sequence[int], start: int,
    dtype: torch.dtype, backward: bool,
) -> Tensor:  # fmt: skip
    """Returns the dense form of elements, which begin with block `start` of their weight.

    Calls in the backward pass say so. The compiler would else see one value, and save it from the forward pass.
    """
    from bitsandbytes.functional import QuantState, dequantize_4bit

    if not len(nibbles):
        return torch.empty(shape, dtype=dtype, device=nibbles.device)
    absmax = _dequantized_scales(scales, nested, offset, start) if len(nested) else _floats(scales)
    state = QuantState(absmax, shape=torch.Size(shape), blocksize=BLOCK, quant_type="nf4", dtype=dtype)
    found: Tensor = dequantize_4bit(nibbles.unsqueeze(1), state)
    return found


@dequantize.register_fake
def _(
    nibbles: Tensor, scales: Tensor, nested: Tensor, offset: Tensor, shape: Sequence[int], start: int,
    dtype: torch.dtype, backward: bool,
) -> Tensor:  # fmt: skip
    return torch.empty(shape, dtype=dtype, device=nibbles.device)


def _dequantized_scales(scales: Tensor, nested: Tensor, offset: Tensor, start: int) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_blockwise

    skipped = start % NESTED_BLOCK  # scales of earlier blocks under the first nested one
    scales = torch.cat([scales.new_zeros(skipped), scales]) if skipped else scales
    code = dynamic_map(scales.device)
    state = QuantState(nested[start // NESTED_BLOCK :], code=code, blocksize=NESTED_BLOCK, dtype=SCALE)
    found: Tensor = dequantize_blockwise(scales, state)[skipped:].add_(offset)
    return found


def _floats(scales: Tensor) -> Tensor:
    aligned = scales.storage_offset() % SCALE.itemsize == 0
    return (scales if aligned else scales.clone()).view(SCALE)


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """Returns the values of the scales' 8 bits."""
    from bitsandbytes.functional import create_dynamic_map

    found: Tensor = create_dynamic_map().to(device)
    return found
