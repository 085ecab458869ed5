"""Accumulators of results on their home rank: partial gradients are added, partial outputs merged."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from lightseq.attention.buffers import Buffer, BufferLayout
from lightseq.attention.pass_spec import ChunkSlot
from lightseq.attention.program import Parts, Reduction
from lightseq.kernels.attention.lse_merge import merge_into
from lightseq.kernels.fused.launches import Launches, addresses


class Accumulator(ABC):
    """Reduction of an item's parts to its final tensors on their home rank: (B, S, N, D), and the lse (B, N, S) if any.

    Memory is allocated when the first part arrives, because until then a pass holds most of its operands. Parts are
    reduced in float32 or wider, and cast at the end, unless `in_final_dtype`.
    """

    def __init__(self, layout: BufferLayout, device: torch.device, in_final_dtype: bool) -> None:
        self._layout, self._device, self._in_final_dtype = layout, device, in_final_dtype
        self.finals: Buffer = ()
        self._totals: Buffer = ()
        self._begun: set[ChunkSlot] = set()

    def begin(self) -> None:
        """Resets the accumulator."""
        self._begun.clear()

    def open(self) -> None:
        """Allocates the totals. Call it before the first part is written, on the stream that reads them later."""
        if not self._totals:
            dtype = self._layout.dtype
            self._totals = self._layout.whole(
                self._device, dtype if self._in_final_dtype else accumulation_dtype(dtype)
            )
            self.finals = self._totals if self._in_final_dtype else ()

    @abstractmethod
    def reduce(self, reduction: Reduction, launches: Launches) -> None:
        """Adds or merges the parts."""

    def finish(self) -> None:
        """Casts the totals to the final dtype."""
        if not self._in_final_dtype:
            count = self._layout.tensor_count  # the lse comes after the tensors
            self.finals = (*(x.to(self._layout.dtype) for x in self._totals[:count]), *self._totals[count:])


class Sum(Accumulator):
    """Accumulator that adds parts of gradients."""

    def reduce(self, reduction: Reduction, launches: Launches) -> None:
        parts = reduction.parts
        for overwrite in (True, False):
            chosen = {slot: buffers for slot, buffers in parts.items() if (slot not in self._begun) == overwrite}
            for dim in self._layout.distinct_dims if chosen else ():
                key = (Sum, dim, addresses(self._totals), reduction.key, tuple(chosen))
                launches.add(key, partial(self._terms, chosen, dim), overwrite)
        self._begun |= parts.keys()

    def _terms(self, parts: Parts, dim: int) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Returns the totals with this head dimension and, for each, the parts to add: a launch takes equal shapes."""
        alike = [i for i, other in enumerate(self._layout.dims) if other == dim]
        totals = [self._layout.local(self._totals, slot.chunk, 1, slot.head_group) for slot in parts]
        terms = [[buffer[i] for buffer in buffers] for buffers in parts.values() for i in alike]
        return [total[i] for total in totals for i in alike], terms


class Merge(Accumulator):
    """Accumulator that merges outputs over different keys by their lse."""

    def reduce(self, reduction: Reduction, launches: Launches) -> None:
        parts = reduction.parts
        first = {slot: buffers[:1] for slot, buffers in parts.items() if slot not in self._begun}
        if first:
            self._copy_first(first, reduction, launches)
        for slot, buffers in parts.items():
            for part, part_lse in buffers[slot in first :]:
                out, lse = self._layout.local(self._totals, slot.chunk, 1, slot.head_group)
                merge_into(out, lse, part, part_lse)
        self._begun |= parts.keys()

    def _copy_first(self, parts: Parts, reduction: Reduction, launches: Launches) -> None:
        """Copies the first part of each slot, which has nothing to merge with yet."""

        def pairs() -> list[tuple[Tensor, Tensor]]:
            totals = [
                (self._layout.local(self._totals, slot.chunk, 1, slot.head_group), buffers[0])
                for slot, buffers in parts.items()
            ]
            return [pair for total, part in totals for pair in zip(total, part, strict=True)]

        if self._in_final_dtype:
            launches.copy((Merge, addresses(self._totals), reduction.key, tuple(parts)), pairs)
        else:  # other parts are added in float32
            for total, part in pairs():
                total.copy_(part)


ACCUMULATORS: Mapping[str, type[Accumulator]] = {"out": Merge, "dq": Sum, "dkv": Sum}  # by result item


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which partial results accumulate."""
    return torch.promote_types(dtype, torch.float32)
