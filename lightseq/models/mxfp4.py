"""Weights that gpt-oss publishes in MXFP4: read as bfloat16, which holds their values exactly, and never written.

A weight (experts, inputs, outputs) is stored as blocks (experts, outputs, groups, 16) of two 4-bit numbers a byte, and
scales (experts, outputs, groups), each for 32 inputs.
"""

from collections.abc import Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any, Final

import torch
from torch import Tensor

from lightseq.utils.files import read_json

METHOD: Final = "mxfp4"  # in quantization_config of config.json
BLOCKS, SCALES = "_blocks", "_scales"  # ends of tensors' names
BYTES: Final = 16  # of a group
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


class PackedSlice:
    """Slices of a weight in MXFP4, which has the methods of a safetensors slice."""

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
