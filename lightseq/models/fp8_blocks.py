"""Weights in FP8 (e4m3) with a scale for each block of 128 x 128 elements, as DeepSeek and Qwen publish them.

The tensor of a weight's name holds the codes. A tensor of a longer name holds the scales, by which they are multiplied.
Both are read without conversion, and never written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lightseq.models.packed import PackedWeight
from lightseq.models.packed_bytes import PackedBytes
from lightseq.models.packed_slice import PackedSlice
from lightseq.utils.files import read_json

METHOD: Final = "fp8"  # in quantization_config of config.json
BLOCK: Final = 128
SCALES: Final = "_scale_inv"  # end of a tensor's name
CODES: Final = "F8_E4M3"  # dtype, as safetensors name it
READABLE: Final = {  # values of a quantization_config, the first of which it may leave out
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),  # training does not round inputs
    "expert_dtype": ("fp8", None),
}
LEFT_OUT: Final = ("modules_to_not_convert", "ignored_layers")
DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # as safetensors name them


@dataclass(frozen=True)
class Fp8Bytes(PackedBytes):
    """Bytes in FP8. Scales are float32, (rows, columns) of blocks, and of stacked experts (experts, rows, columns)."""

    SHARDED = ("codes",)
    WORDS = "FP8"

    def sizes(self, elements: int) -> tuple[int, ...]:
        return (elements,)

    def dense(self, shape: list[int], first_row: int, dtype: torch.dtype, backward: bool) -> Tensor:
        found: Tensor = dequantize(self.codes, self.scales, shape, first_row, dtype, backward)
        return found

    @classmethod
    def quantize(cls, dense: Tensor) -> "Fp8Bytes":
        raise ValueError(f"a dense weight of shape {[*dense.shape]} cannot become FP8; give weights that are stored so")

    @classmethod
    def joined(cls, parts: Sequence[PackedBytes], shapes: Sequence[torch.Size], dim: int | None) -> "Fp8Bytes | None":
        lengths = [shape[-2] for shape in shapes]
        scales = [part.scales for part in parts]
        if dim is None:
            return cls(torch.cat([part.codes for part in parts]), torch.stack(scales))
        if dim - len(shapes[0]) != -2 or any(rows % BLOCK for rows in lengths[:-1]):
            return None
        codes = torch.cat([part.codes.view(tuple(x)) for part, x in zip(parts, shapes, strict=True)], dim)
        return cls(codes.flatten(), torch.cat(scales, dim))


@torch.library.custom_op("lightseq::dequantize_fp8", mutates_args=())
def dequantize(
    codes: Tensor, scales: Tensor, shape: Sequence[int], first_row: int, dtype: torch.dtype, backward: bool
) -> Tensor:
    """Returns the dense form of rows, which begin with `first_row` of their weight.

    Products are rounded once, from float32. The 4 bits of a code's mantissa fit every dtype. Rows after the last of the
    weight are zeros, with which FSDP2 pads.
    """
    if not len(codes):
        return torch.empty(shape, dtype=dtype, device=codes.device)
    found = codes.view(torch.float8_e4m3fn).to(dtype).view(shape)
    *_, rows, columns = shape
    matrices, start = found.view(-1, rows, columns), first_row
    if len(shape) > 2:  # rows of the weight are matrices
        scales, start = scales[first_row : first_row + shape[0]], 0
        matrices = matrices[: len(scales)]
    scales = scales.view(-1, *scales.shape[-2:]).repeat_interleave(BLOCK, dim=-1)[..., None, :columns]
    begin = min(-start % BLOCK, rows)
    end = begin + (rows - begin) // BLOCK * BLOCK
    for first, last, height in ((0, begin, begin), (begin, end, BLOCK), (end, rows, rows - end)):
        if first < last:
            blocks = matrices[:, first:last].unflatten(1, (-1, height))
            of_blocks = scales[:, (start + first) // BLOCK :][:, : blocks.shape[1]]
            blocks[:, : of_blocks.shape[1]].mul_(of_blocks)
    return found


@dequantize.register_fake
def _(
    codes: Tensor, scales: Tensor, shape: Sequence[int], first_row: int, dtype: torch.dtype, backward: bool
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=codes.device)


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> PackedWeight:
    """Allocates a weight: one matrix, or several stacked."""
    codes = torch.empty(shape.numel(), dtype=torch.uint8, device=device)
    return PackedWeight(Fp8Bytes(codes, torch.empty(_blocks(shape), device=device)), shape, dtype, shape)


def _blocks(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a weight."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // BLOCK), -(-columns // BLOCK))


class Fp8Slice(PackedSlice):
    """Slices of a weight in FP8."""

    WORDS = Fp8Bytes.WORDS

    def __init__(self, name: str, codes: Any, scales: Any, dtype: str) -> None:
        """`codes` and `scales` are slices of tensors in the files. Raises ValueError if they do not fit each other."""
        self._codes, self._scales, self._dtype = codes, scales, dtype
        self._shape = torch.Size(codes.get_shape())
        kinds, shapes = (codes.get_dtype(), scales.get_dtype()), (self._shape, tuple(scales.get_shape()))
        fits = len(self._shape) > 1 and shapes[1] == _blocks(self._shape)
        if not fits or kinds[0] != CODES or kinds[1] not in DTYPES.values():
            found = " and ".join(f"{kind} of {[*shape]}" for kind, shape in zip(kinds, shapes, strict=True))
            raise ValueError(
                f"{name} and its scales are {found}, not FP8 in blocks of {BLOCK} x {BLOCK}; give a version in 16 bits"
            )

    def get_shape(self) -> list[int]:
        return [*self._shape]

    def get_dtype(self) -> str:
        return DTYPES[self._dtype]

    def empty(self, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        return empty(self._shape, dtype, device)

    def packed(self) -> PackedWeight:
        raw = Fp8Bytes(self._codes[...].view(torch.uint8).flatten(), self._scales[...].float())
        return PackedWeight(raw, self._shape, getattr(torch, self._dtype), self._shape)


def format_of(settings: Any) -> str | None:
    """Returns "fp8" for a `quantization_config` that is supported, else what differs; None if it is not FP8."""
    if not isinstance(settings, Mapping) or settings.get("quant_method") != METHOD:
        return None
    if (block := settings.get("weight_block_size", [BLOCK, BLOCK])) not in ([BLOCK, BLOCK], (BLOCK, BLOCK)):
        return f"{METHOD} with weight_block_size {block}"
    wrong = [key for key, known in READABLE.items() if settings.get(key) not in known]
    return f"{METHOD} with {wrong[0]} {settings[wrong[0]]}" if wrong else METHOD


def modules_left_out(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the modules that a `quantization_config` leaves out, as names or patterns of transformers."""
    return tuple(name for key in LEFT_OUT for name in settings.get(key) or ())


def dtype_in(directory: Path) -> str | None:
    """Returns the dtype of dequantized weights, if a directory has weights in FP8 that are read."""
    if not (path := directory / "config.json").is_file() or not isinstance(config := read_json(path), Mapping):
        return None
    if format_of(config.get("quantization_config")) != METHOD:
        return None
    text = config["text_config"] if isinstance(config.get("text_config"), Mapping) else {}
    named = (each.get(key) for each in (config, text) for key in ("dtype", "torch_dtype"))
    return next((name for name in named if name in DTYPES), "bfloat16")


def weights_in(names: Iterable[str]) -> list[str]:
    """Returns the names of the weights in FP8 among the names of a model's tensors."""
    known = {*names}
    return [name for name in known if name + SCALES in known]


def join_scales(files: Mapping[str, Path], directory: Path) -> dict[str, Path]:
    """Returns the files of a model's tensors without the scales of weights in FP8, if these are read."""
    weights = weights_in(files)
    scales = {name + SCALES for name in weights} if weights and dtype_in(directory) else set()
    return {name: file for name, file in files.items() if name not in scales}
