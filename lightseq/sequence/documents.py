"""Documents of a packed sequence: their boundaries, layout, positions and numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightseq.schedule.documents import document_positions
from lightseq.schedule.layout import Layout, shard

MIN_BOUNDARIES = 256  # smallest boundary tensor; it doubles as needed, so compiled graphs see few shapes


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of one packed sequence, the same on all ranks of a group; made by `SequenceGroup.pack`.

    Not a tensor, because model wrappers move tensors to the device, and reading them there makes the host wait.
    """

    boundaries: Tensor  # int64 on the CPU; the end repeats up to a few sizes, so that shapes rarely change
    layout: Layout
    count: int  # of documents, padding left out

    @property
    def padded_boundaries(self) -> tuple[int, ...]:
        """Returns the start of every document, padding included, and the end: `boundaries` without repeats."""
        return without_repeats(self.boundaries)

    def shard(self, x: Tensor, rank: int, fill: float = 0) -> Tensor:
        """Returns one rank's part of a whole tensor (batch, length, ...), padded with `fill`."""
        return shard(x, self.layout, rank, fill=fill, padded_length=int(self.boundaries[-1]))

    def positions(self, rank: int) -> Tensor:
        """Returns the position of each local token in its document, int64 (1, local), on the CPU."""
        every = torch.from_numpy(document_positions(self.padded_boundaries))
        return self.shard(every.unsqueeze(0), rank)

    def document_numbers(self, rank: int) -> Tensor:
        """Returns the number of each local token's document, int64 (local,). Padding belongs to the last document."""
        ends = torch.tensor(self.padded_boundaries[1:])
        positions = self.layout.positions(rank, int(self.boundaries[-1]))
        return torch.bucketize(positions, ends, right=True).clamp_max(self.count - 1)


def boundary_tensor(boundaries: Sequence[int]) -> Tensor:
    """Returns boundaries as a tensor of one of few sizes, in which the end repeats."""
    size = MIN_BOUNDARIES
    while size < len(boundaries):
        size *= 2
    return torch.tensor([*boundaries, *[boundaries[-1]] * (size - len(boundaries))], dtype=torch.int64)


def without_repeats(boundaries: Tensor) -> tuple[int, ...]:
    """Returns the boundaries of a `boundary_tensor` as integers, its end once."""
    return tuple(dict.fromkeys(boundaries.tolist()))
