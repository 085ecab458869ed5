"""Quantization to and from bitsandbytes' NF4 (QLoRA, arXiv 2305.14314).

Every 64 elements share a scale. With double quantization, scales have 8 bits, and every 256 of them share a float32
scale. Their mean is the offset of the whole weight: a matrix, or the matrices of stacked experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from lightseq.models.packed import PackedWeight, packed
from lightseq.models.packed_bytes import PackedBytes

BLOCK, NESTED_BLOCK = 64, 256  # elements of a scale, scales of a nested one
SCALE: Final = torch.float32


@dataclass(frozen=True)
class Nf4Bytes(PackedBytes):
    """Bytes in NF4. Codes hold two elements each."""

    # `scales` is uint8: one byte per block, or without double quantization the four bytes of a float32.
    nested: Tensor  # float32, of NESTED_BLOCK scales each, for the whole matrix; empty without double quantization
    offset: Tensor  # float32 without dims, added to every scale

    SHARDED = ("codes", "scales")
    WORDS = "four bits"

    def sizes(self, elements: int) -> tuple[int, ...]:
        return elements // 2, scale_bytes(elements, len(self.nested) > 0)

    def dense(self, shape: list[int], first_row: int, dtype: torch.dtype, backward: bool) -> Tensor:
        start = first_row * torch.Size(shape[1:]).numel() // BLOCK
        found: Tensor = dequantize(*self.tensors, shape, start, dtype, backward)
        return found

    @classmethod
    def quantize(cls, dense: Tensor) -> "Nf4Bytes":
        """Quantizes a dense weight to four bits, with double quantization. Raises ValueError like `empty`."""
        from bitsandbytes.functional import quantize_4bit

        check_rows(dense.shape)
        codes, state = quantize_4bit(dense.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
        return cls(codes.flatten(), state.absmax, state.state2.absmax, state.offset)


def scale_bytes(elements: int, double: bool) -> int:
    """Returns the bytes of the scales of whole blocks, with or without `double` quantization."""
    return elements // BLOCK * (1 if double else SCALE.itemsize)


def quantize(dense: Tensor) -> PackedWeight:
    """Quantizes a dense weight to four bits. Raises ValueError like `empty`."""
    return packed(Nf4Bytes, dense)


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device, double: bool = True) -> PackedWeight:
    """Allocates a weight, with or without `double` quantization. Raises ValueError unless rows are whole blocks."""
    check_rows(shape)
    elements = shape.numel()

    def bytes_(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=device)

    nested = torch.empty(-(-elements // (BLOCK * NESTED_BLOCK)) if double else 0, device=device)
    raw = Nf4Bytes(bytes_(elements // 2), bytes_(scale_bytes(elements, double)), nested, torch.empty((), device=device))
    return PackedWeight(raw, shape, dtype, shape)


def check_rows(shape: torch.Size) -> None:
    if len(shape) < 2 or shape[-1] % BLOCK:
        raise ValueError(f"a weight of shape {[*shape]} has no rows of whole blocks of {BLOCK} elements")


@torch.library.custom_op("lightseq::dequantize_nf4", mutates_args=())
def dequantize(
    codes: Tensor, scales: Tensor, nested: Tensor, offset: Tensor, shape: Sequence[int], start: int,
    dtype: torch.dtype, backward: bool,
) -> Tensor:  # fmt: skip
    """Returns the dense form of elements, which begin with block `start` of their weight."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    if not len(codes):
        return torch.empty(shape, dtype=dtype, device=codes.device)
    absmax = _dequantized_scales(scales, nested, offset, start) if len(nested) else _floats(scales)
    state = QuantState(absmax, shape=torch.Size(shape), blocksize=BLOCK, quant_type="nf4", dtype=dtype)
    found: Tensor = dequantize_4bit(codes.unsqueeze(1), state)
    return found


@dequantize.register_fake
def _(
    codes: Tensor, scales: Tensor, nested: Tensor, offset: Tensor, shape: Sequence[int], start: int,
    dtype: torch.dtype, backward: bool,
) -> Tensor:  # fmt: skip
    return torch.empty(shape, dtype=dtype, device=codes.device)


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
