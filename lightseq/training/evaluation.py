"""Loss and perplexity over data, as a whole and by how much context the predicted tokens had."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightseq.attention.context import Documents
from lightseq.data.examples import IGNORE_INDEX
from lightseq.modules.loss import token_losses

POWERS: Final = "powers"


class Shard(NamedTuple):
    """A rank's part of a batch, as the model takes it; tensors are (batch, local sequence)."""

    ids: Tensor
    positions: Tensor  # in the whole sequence, or in a token's own document
    labels: Tensor  # shifted
    documents: Documents | None  # several in one sequence


@dataclass(frozen=True)
class Bin:
    """The targets of positions `first` to `last`: that of position p is predicted from the p + 1 tokens up to there."""

    first: int
    last: int
    loss: float | None  # None without a target
    valid_tokens: int


@dataclass(frozen=True)
class Perplexity:
    """The mean of -log p over every valid token, and over those of each bin."""

    loss: float
    valid_tokens: int
    bins: tuple[Bin, ...]

    @property
    def value(self) -> float | None:
        return perplexity(self.loss)


def perplexity(loss: float | None) -> float | None:
    """Returns exp(loss); None where there is none, or none that a float can hold."""
    return None if loss is None or loss > math.log(1e308) else math.exp(loss)


def bin_starts(bins: str, length: int) -> tuple[int, ...]:
    """Returns the first position of each bin: `powers` (contexts of 1, 2, 3-4, 5-8, … tokens), or equal widths."""
    if bins == POWERS:
        return (0, *(2**power for power in range((length - 1).bit_length())))
    if not bins.isdecimal() or not 1 <= int(bins) <= length:
        raise ValueError(f"--bins {bins}: give {POWERS}, or a number of equal bins from 1 to {length}, the tokens")
    return tuple(i * length // int(bins) for i in range(int(bins)))


def measure(
    loss_model: nn.Module, shards: Iterable[Shard], starts: Sequence[int], length: int, device: torch.device
) -> Perplexity:
    """Runs the model over every shard, as many on each rank; what comes back is alike on all of them."""
    borders = torch.tensor(starts, device=device)
    sums = torch.zeros(len(starts), dtype=torch.float64, device=device)
    counts = torch.zeros(len(starts), dtype=torch.int64, device=device)
    with evaluating(loss_model):
        for ids, positions, labels, documents in shards:
            losses = loss_model(ids, positions, labels, documents, token_losses)
            places = torch.bucketize(positions.flatten(), borders, right=True) - 1
            sums.index_add_(0, places, losses.flatten().double())
            counts.index_add_(0, places, (labels != IGNORE_INDEX).flatten().long())
    dist.all_reduce(sums)
    dist.all_reduce(counts)
    valid = int(counts.sum())
    ends = [*starts[1:], length]
    found = tuple(
        Bin(first, end - 1, total / count if count else None, count)
        for first, end, total, count in zip(starts, ends, sums.tolist(), counts.tolist(), strict=True)
    )
    return Perplexity(float(sums.sum()) / max(1, valid), valid, found)


@contextmanager
def evaluating(loss_model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation within the block, and back into training after it."""
    loss_model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        loss_model.train()
        for module in loss_model.modules():
            if isinstance(module, FSDPModule):  # gathered parameters wait for a backward pass, which never comes
                module.reshard()
