"""Base of the readers of packed weights in files."""

from abc import ABC, abstractmethod
from types import EllipsisType
from typing import ClassVar

import torch
from torch import Tensor

from lightseq.models.packed import PackedWeight


class PackedSlice(ABC):
    """Packed weight in files, which has the methods of a safetensors slice."""

    WORDS: ClassVar[str]  # the format in error messages

    @abstractmethod
    def get_shape(self) -> list[int]: ...

    @abstractmethod
    def get_dtype(self) -> str:
        """Returns the dtype of the dense weight, as safetensors name it."""

    @abstractmethod
    def empty(self, dtype: torch.dtype, device: torch.device) -> PackedWeight:
        """Allocates a weight of this form, which computes in a dtype."""

    @abstractmethod
    def packed(self) -> PackedWeight:
        """Returns the whole weight in its own bytes."""

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        """Reads a slice of the weight. Whole rows stay packed."""
        whole = self.packed()
        return whole if place is ... else whole[place]
