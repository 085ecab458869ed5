"""Weights that bitsandbytes has stored in four bits (NF4): read as their bytes, and never written.

The tensor of a weight's name holds two elements a byte, in rows of one element. Tensors of longer names hold the
scales, tables of values, and facts in JSON.
"""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from lightseq.models import nf4
from lightseq.models.nf4 import BLOCK, NESTED_BLOCK, SCALE, Nf4Bytes, dynamic_map, scale_bytes
from lightseq.models.packed import PackedWeight
from lightseq.models.packed_slice import PackedSlice

METHOD: Final = "bitsandbytes"  # in quantization_config of config.json
READ_FORMAT: Final = "nf4"
FACTS: Final = ".quant_state.bitsandbytes__nf4"  # ends of tensors' names
SCALES, TABLE, NESTED, NESTED_TABLE = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
ENDS: Final = (FACTS, SCALES, TABLE, NESTED, NESTED_TABLE)
DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # as safetensors name them
AGAIN: Final = "download it again, or give a version in 16 bits"


def format_of(settings: Any) -> str | None:
    """Returns the format in a `quantization_config` of bitsandbytes, such as "nf4"; None for other methods."""
    if not isinstance(settings, Mapping) or settings.get("quant_method", METHOD) != METHOD:
        return None
    if settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        return str(settings.get("bnb_4bit_quant_type", "fp4"))
    return "8 bits" if settings.get("load_in_8bit", settings.get("_load_in_8bit")) else None


def join_parts(files: Mapping[str, Path]) -> dict[str, Path]:
    """Returns the files of a model's tensors without the tensors that belong to a weight in four bits."""
    weights = weights_in(files)
    parts = {name + end for name in weights for end in ENDS}
    return {name: file for name, file in files.items() if name not in parts}


def weights_in(names: Mapping[str, Any]) -> list[str]:
    """Returns the names of the weights in four bits."""
    return [name.removesuffix(FACTS) for name in names if name.endswith(FACTS)]


class FourBitSlice(PackedSlice):
    """Slices of a weight in four bits."""

    WORDS = Nf4Bytes.WORDS

    def __init__(self, name: str, part: Callable[[str], Any]) -> None:
        """`part` returns the slice of a tensor in the files. Raises ValueError for another form of four bits."""
        self._name, self._part = name, part
        facts = json.loads(bytes(part(name + FACTS)[...].tolist()))
        self._shape = torch.Size(facts["shape"])
        self._dtype = facts["dtype"].removeprefix("torch.")
        self._is_double = "nested_blocksize" in facts
        self._offset = float(facts.get("nested_offset", 0))
        if len(self._shape) == 2 and self._shape[1] % BLOCK:
            raise ValueError(
                f"{name} has {self._shape[1]} inputs, not a multiple of {BLOCK}; give a version in 16 bits"
            )
        wrong = facts["blocksize"] != BLOCK or facts.get("nested_blocksize", NESTED_BLOCK) != NESTED_BLOCK
        if wrong or facts["quant_type"] != READ_FORMAT or self._dtype not in DTYPES or len(self._shape) != 2:
            known = ("quant_type", "blocksize", "nested_blocksize", "dtype", "shape")
            found = ", ".join(f"{key} {facts[key]}" for key in known if key in facts)
            raise ValueError(f"{name} has {found}, not NF4 in blocks of {BLOCK}; give a version in 16 bits")

    def get_shape(self) -> list[int]:
        return [*self._shape]

    def get_dtype(self) -> str:
        return DTYPES[self._dtype]

    def empty(self, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        return nf4.empty(self._shape, dtype, device, self._is_double)

    def packed(self) -> PackedWeight:
        raw = Nf4Bytes(
            self._part(self._name)[...].flatten().view(torch.uint8),
            self._part(self._name + SCALES)[...].view(torch.uint8),
            self._part(self._name + NESTED)[...] if self._is_double else torch.empty(0, dtype=SCALE),
            torch.tensor(self._offset, dtype=SCALE),
        )
        self._check(raw)
        return PackedWeight(raw, self._shape, getattr(torch, self._dtype), self._shape)

    def _check(self, raw: Nf4Bytes) -> None:
        """Raises ValueError for tables or sizes that differ from NF4's."""
        from bitsandbytes.functional import get_4bit_type

        elements = prod(self._shape)
        sizes = (elements // 2, scale_bytes(elements, self._is_double))
        nested = -(-elements // (BLOCK * NESTED_BLOCK)) if self._is_double else 0
        if (len(raw.codes), len(raw.scales), len(raw.nested)) != (*sizes, nested):
            raise ValueError(f"{self._name} and its scales do not fit its shape {[*self._shape]}; {AGAIN}")
        tables = [(TABLE, get_4bit_type("nf4", device="cpu"))]
        tables += [(NESTED_TABLE, dynamic_map(torch.device("cpu")))] if self._is_double else []
        for end, table in tables:
            if not torch.equal(self._part(self._name + end)[...], table):
                raise ValueError(f"{self._name}{end} is not the table of NF4; {AGAIN}")
