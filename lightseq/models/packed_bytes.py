"""Bytes of a packed weight: the interface of each format."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBytes(ABC):
    """Bytes of a weight, or of some of its rows, which are the slices along its first axis."""

    codes: Tensor  # uint8, rows one after the other
    scales: Tensor

    SHARDED: ClassVar[tuple[str, ...]]  # tensors that FSDP2 shards, flat, all uint8; every rank holds the others whole
    WORDS: ClassVar[str]  # the format in error messages

    @abstractmethod
    def sizes(self, elements: int) -> tuple[int, ...]:
        """Returns the bytes of `elements` elements in each sharded tensor."""

    @abstractmethod
    def dense(self, shape: list[int], first_row: int, dtype: torch.dtype, backward: bool) -> Tensor:
        """Returns the dense form of rows of this shape, which begin with a row of their weight.

        Calls in the backward pass say so. The compiler would else see one value, and save it from the forward pass.
        """

    @classmethod
    @abstractmethod
    def quantize(cls, dense: Tensor) -> Self:
        """Returns a dense weight in this format. Raises ValueError if that cannot be."""

    @classmethod
    def joined(cls, parts: Sequence["PackedBytes"], shapes: Sequence[torch.Size], dim: int | None) -> Self | None:
        """Concatenates weights along a dim, or stacks them if it is None; returns None if blocks would not stay whole.

        `shapes` are the shapes of the weights.
        """
        return None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def sharded(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.SHARDED)

    def with_sharded(self, tensors: Sequence[Tensor]) -> Self:
        """Returns the same bytes with others in the sharded tensors."""
        return replace(self, **dict(zip(self.SHARDED, tensors, strict=True)))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Applies a function to each tensor."""
        return type(self)(*map(change, self.tensors))

    def elements(self, start: int, end: int) -> Self:
        """Returns the bytes of some elements, which begin and end with a block."""
        parts = zip(self.sharded, self.sizes(start), self.sizes(end), strict=True)
        return self.with_sharded([part[first:last] for part, first, last in parts])

    def padded(self, elements: int) -> Self:
        """Copies the bytes, with zeros for additional elements."""
        parts = zip(self.sharded, self.sizes(elements), strict=True)
        return self.with_sharded([torch.cat([part, part.new_zeros(count)]) for part, count in parts])

    def zeros(self, elements: int) -> Self:
        """Returns bytes whose sharded tensors are zeros."""
        parts = zip(self.sharded, self.sizes(elements), strict=True)
        return self.with_sharded([part.new_zeros(count) for part, count in parts])
