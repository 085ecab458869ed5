"""Weights that gpt-oss publishes in MXFP4: held as they are, or read as bfloat16, which has their values exactly.

A weight (experts, inputs, outputs) is stored as blocks (experts, outputs, groups, 16) of two 4-bit numbers a byte, and
scales (experts, outputs, groups), each for 32 inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, Final

import torch
from torch import Tensor

from lightseq.models.packed import PackedWeight
from lightseq.models.packed_bytes import PackedBytes
from lightseq.models.packed_slice import PackedSlice
from lightseq.utils.files import read_json

METHOD: Final = "mxfp4"  # in quantization_config of config.json
BLOCKS, SCALES = "_blocks", "_scales"  # ends of tensors' names
BYTES: Final = 16  # bytes of a group
GROUP: Final = 32  # elements
EXPERTS_AT_ONCE: Final = 4  # converted, which takes several times their memory


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json says that its weights are in MXFP4."""
    settings = config.get("quantization_config")
    return isinstance(settings, Mapping) and settings.get("quant_method") == METHOD


def join_packed(files: Mapping[str, Path], directory: Path) -> dict[str, Path]:
    """Returns the files of a model's tensors, with one name for the blocks and the scales of a weight in MXFP4."""
    config = directory / "config.json"
    if not any(name.endswith(BLOCKS) for name in files) or not (config.is_file() and is_mxfp4(read_json(config))):
        return dict(files)
    packed = {name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)}
    if missing := sorted(name + SCALES for name in packed if name + SCALES not in files):
        raise ValueError(f"{directory} has no {missing[0]}; copy the whole directory")
    parts = {name + end for name in packed for end in (BLOCKS, SCALES)}
    return {name: file for name, file in files.items() if name not in parts} | {
        name: files[name + BLOCKS] for name in sorted(packed)
    }


@dataclass(frozen=True)
class Mxfp4Bytes(PackedBytes):
    """Bytes in MXFP4, in the order of the files: (experts, outputs, inputs)."""

    SHARDED = ("codes", "scales")
    WORDS = "MXFP4"

    def sizes(self, elements: int) -> tuple[int, ...]:
        return elements // 2, elements // GROUP

    def dense(self, shape: list[int], first_row: int, dtype: torch.dtype, backward: bool) -> Tensor:
        found: Tensor = dequantize(self.codes, self.scales, shape, dtype, backward)
        return found

    @classmethod
    def quantize(cls, dense: Tensor) -> "Mxfp4Bytes":
        raise ValueError(f"a dense weight of shape {[*dense.shape]} cannot become MXFP4; give weights stored so")


@torch.library.custom_op("lightseq::dequantize_mxfp4", mutates_args=())
def dequantize(codes: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype, backward: bool) -> Tensor:
    """Returns the dense form (experts, inputs, outputs) of some experts, exactly, for scales below 2**114."""
    found = torch.empty(shape, dtype=dtype, device=codes.device)
    if not len(codes):
        return found
    experts, _, outputs = shape
    packed = (x.view(experts, outputs, -1).split(EXPERTS_AT_ONCE) for x in (codes, scales))
    for target, some, exponents in zip(found.split(EXPERTS_AT_ONCE), *packed, strict=True):
        # float8_e5m2 of value / 2**14
        low, high = (some & 8) << 4 | (some & 7) << 1, some & 128 | some >> 3 & 14
        numbers = torch.stack([low, high], dim=-1).view(torch.float8_e5m2).to(dtype)
        powers = ((exponents.int() + 14).clamp(max=255) << 23).view(torch.float32)  # 2**14 of the scale
        numbers = numbers.view(len(some), outputs, -1, GROUP).mul_(powers[..., None])
        target.copy_(numbers.flatten(-2).transpose(1, 2))
    return found


@dequantize.register_fake
def _(codes: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype, backward: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=codes.device)


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> PackedWeight:
    """Allocates a weight of stacked experts."""
    codes, scales = (
        torch.empty(shape.numel() // elements, dtype=torch.uint8, device=device) for elements in (2, GROUP)
    )
    return PackedWeight(Mxfp4Bytes(codes, scales), shape, dtype, shape)


class Mxfp4Slice(PackedSlice):
    """Slices of a weight in MXFP4, which are read as bfloat16."""

    WORDS = Mxfp4Bytes.WORDS

    def __init__(self, blocks: Any, scales: Any) -> None:
        experts, outputs, groups, width = self._packed = tuple(blocks.get_shape())
        if width != BYTES or tuple(scales.get_shape()) != (experts, outputs, groups):
            shapes = f"{[*self._packed]} and {[*scales.get_shape()]}"
            raise ValueError(f"blocks and scales of {shapes} are not MXFP4 weights; download them again")
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        experts, outputs, groups, width = self._packed
        return [experts, 2 * groups * width, outputs]

    def get_dtype(self) -> str:
        return "BF16"

    def empty(self, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        return empty(torch.Size(self.get_shape()), dtype, device)

    def packed(self) -> PackedWeight:
        shape = torch.Size(self.get_shape())
        codes, scales = (x[...].flatten() for x in (self._blocks, self._scales))
        return PackedWeight(Mxfp4Bytes(codes, scales), shape, torch.bfloat16, shape)

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        device = "cuda" if torch.cuda.is_available() else "cpu"  # a hundred times as fast
        experts, *others = (slice(None),) if place is ... else place
        parts = [
            convert_moe_packed_tensors(blocks.to(device), scales.to(device), dtype=torch.bfloat16).cpu()
            for blocks, scales in zip(
                self._blocks[experts].split(EXPERTS_AT_ONCE), self._scales[experts].split(EXPERTS_AT_ONCE), strict=True
            )
        ]
        return torch.cat(parts)[(slice(None), *others)]
