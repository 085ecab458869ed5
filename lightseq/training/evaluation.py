"""Evaluation loss, perplexity and accuracy, overall and by the length of the context."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightseq.parts.loss import losses_and_hits
from lightseq.sequence.documents import Documents
from lightseq.utils.tensors import IGNORE_INDEX

POWERS: Final = "powers"


class Shard(NamedTuple):
    """A rank's part of a batch. Tensors have the shape (batch, local sequence)."""

    ids: Tensor
    positions: Tensor  # within the whole sequence, or within the document if packed
    labels: Tensor  # shifted
    documents: Documents | None  # None unless packed


@dataclass(frozen=True)
class Bin:
    """Mean loss of the positions `first` to `last`. The target at position p is predicted from p + 1 tokens."""

    first: int
    last: int
    loss: float | None  # None without a target
    valid_tokens: int


@dataclass(frozen=True)
class Perplexity:
    """Mean negative log-likelihood over all valid tokens and per bin."""

    loss: float
    accuracy: float  # share of valid tokens that the model predicts as the most probable
    valid_tokens: int
    bins: tuple[Bin, ...]

    @property
    def value(self) -> float | None:
        return perplexity(self.loss)


def perplexity(loss: float | None) -> float | None:
    """Returns exp(loss), or None if the loss is None or the result overflows a float."""
    return None if loss is None or loss > math.log(1e308) else math.exp(loss)


def bin_starts(bins: str, length: int) -> tuple[int, ...]:
    """Returns the first position of each bin. `bins`: "powers" (contexts of 1, 2, 3-4, 5-8, … tokens) or a count.

    Raises ValueError for anything else.
    """
    if bins == POWERS:
        return (0, *(2**power for power in range((length - 1).bit_length())))
    if not bins.isdecimal() or not 1 <= int(bins) <= length:
        raise ValueError(f"--bins {bins}: give {POWERS}, or a number of equal bins from 1 to {length}")
    return tuple(i * length // int(bins) for i in range(int(bins)))


def measure(
    loss_model: nn.Module, shards: Iterable[Shard], starts: Sequence[int], length: int, device: torch.device
) -> Perplexity:
    """Evaluates the model on every shard. All ranks need the same number of shards and get the same result."""
    borders = torch.tensor(starts, device=device)
    sums = torch.zeros(len(starts), dtype=torch.float64, device=device)
    counts = torch.zeros(len(starts), dtype=torch.int64, device=device)
    hit_count = torch.zeros((), dtype=torch.int64, device=device)
    with evaluating(loss_model):
        for ids, positions, labels, documents in shards:
            losses, hits = loss_model(ids, positions, labels, documents, losses_and_hits)
            bins = torch.bucketize(positions.flatten(), borders, right=True) - 1
            sums.index_add_(0, bins, losses.flatten().double())
            counts.index_add_(0, bins, (labels != IGNORE_INDEX).flatten().long())
            hit_count += hits.long().sum()
    for counted in (sums, counts, hit_count):
        dist.all_reduce(counted)
    valid = int(counts.sum())
    ends = [*starts[1:], length]
    found = tuple(
        Bin(first, end - 1, total / count if count else None, count)
        for first, end, total, count in zip(starts, ends, sums.tolist(), counts.tolist(), strict=True)
    )
    return Perplexity(float(sums.sum()) / max(1, valid), int(hit_count) / max(1, valid), valid, found)


@contextmanager
def evaluating(loss_model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode inside the block and back into training mode afterwards."""
    loss_model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        loss_model.train()
        for module in loss_model.modules():
            if isinstance(module, FSDPModule):  # frees gathered parameters, which FSDP2 holds for a backward pass
                module.reshard()
