"""Dtypes of the tensors in a checkpoint, taken from the files that training began with."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightseq.models.decoder import float32_parameters
from lightseq.models.published_layout import PublishedLayout

FLOATS: Final = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def float_dtypes(files: Iterable[str], stored: Callable[[str], Any]) -> dict[str, torch.dtype]:
    """Returns the dtype of each tensor in the files that holds plain floating-point numbers."""
    found = ((name, FLOATS.get(stored(name).get_dtype())) for name in files)
    return {name: dtype for name, dtype in found if dtype is not None}


class StoredTensors:
    """Cast of a model's whole tensors to the dtypes of a checkpoint."""

    def __init__(
        self,
        model: PreTrainedModel,
        buffers: Collection[str],
        dtype: torch.dtype,
        layout: PublishedLayout | None,
        in_files: Mapping[str, torch.dtype],
        stored: Callable[[str], Any],
    ) -> None:
        """`buffers` are the names of the model's stored buffers, and `dtype` the one in which it computed.

        `in_files` are the dtypes of tensors in the files that training began with, which `stored` returns.
        """
        frozen = (name for name, parameter in model.named_parameters() if not parameter.requires_grad)
        self._buffers, self._untrained, self._layout, self._stored = buffers, {*buffers, *frozen}, layout, stored
        self._dtype, declared = dtype, float32_parameters(model, also_for_float16=True)
        self._dtypes = dict.fromkeys(declared, torch.float32) | (layout.dtypes(in_files) if layout else {})

    def __call__(self, name: str, whole: Tensor) -> Tensor:
        """Copies a tensor to the CPU in the dtype in which it is stored."""
        if name in self._untrained and (source := self._unchanged(name, whole)) is not None:
            return source
        dtype = self._dtypes.get(name, self._dtype)
        if name in self._buffers:  # training has changed it, in its own dtype
            dtype = torch.promote_types(whole.dtype, self._dtypes.get(name, whole.dtype))
        return whole.to(device="cpu", dtype=dtype, copy=True).contiguous()

    def _unchanged(self, name: str, whole: Tensor) -> Tensor | None:
        """Returns the tensor of the files, if the model's is equal to it or was rounded from it."""
        if self._layout is None or name not in self._layout.renamed:
            return None
        source: Tensor = self._stored(self._layout.renamed[name])[...]
        return source if torch.equal(source.to(whole.dtype), whole.cpu()) else None
