"""Next token: the mean of -log p over all tokens with a target, and its evaluation by the length of the context."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lightseq.data.batches import Batch
from lightseq.objectives.objective import FrozenModel, Models, Shard, Share, evaluating, sum_over_all_ranks
from lightseq.parts.loss import CHUNK_TOKENS, losses_and_hits
from lightseq.utils.formatting import four_significant_digits
from lightseq.utils.tensors import IGNORE_INDEX

POWERS: Final = "powers"


@dataclass(frozen=True)
class NextToken:
    """Objective of pretraining and of answers in chats: the labels say which tokens are targets.

    Rows that share a prefix learn its targets once each.
    """

    metrics: tuple[str, ...] = ()
    frozen_models: tuple[FrozenModel, ...] = ()
    passes_without_gradients: int = 0
    reads_head_in_backward: bool = False  # the loss computes its gradients in the forward pass

    def __str__(self) -> str:
        return ""

    def logit_bytes(self, tokens: int, vocabulary: int, itemsize: int) -> int:
        return min(tokens, CHUNK_TOKENS) * vocabulary * itemsize

    def count(self, batch: Batch) -> int:
        return batch.valid_tokens

    def share(self, models: Models, shard: Shard) -> Share:
        loss = models.trained(*shard)
        return Share(loss, loss.new_zeros(0))

    def evaluate(self, models: Models, shards: Iterable[Shard]) -> "Perplexity":
        return measure(models, shards)


def _weights(shard: Shard) -> Tensor | None:
    """Returns how many rows learn each token's target, (1, local), if documents became trees."""
    rows = None if shard.documents is None else shard.documents.rows
    return None if rows is None else rows.weights


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

    def __str__(self) -> str:
        size = "too large for a float" if self.value is None else four_significant_digits(self.value)
        return f"loss {self.loss:.4f}, perplexity {size}, accuracy {self.accuracy:.1%}"

    def record(self) -> dict[str, float | None]:
        return {"eval_loss": self.loss, "eval_perplexity": self.value, "eval_accuracy": self.accuracy}


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


def measure(models: Models, shards: Iterable[Shard], starts: Sequence[int] = (), length: int = 0) -> Perplexity:
    """Evaluates the trained model on every shard. All ranks need the same number of shards and get the same result.

    `starts` are the first positions of bins, the last of which ends with the sequence of `length` tokens.
    """
    device = next(models.trained.parameters()).device
    borders = torch.tensor(starts or (0,), device=device)
    sums = torch.zeros(len(borders), dtype=torch.float64, device=device)
    counts = torch.zeros(len(borders), dtype=torch.int64, device=device)
    hit_count = torch.zeros((), dtype=torch.int64, device=device)
    with evaluating(models.trained):
        for shard in shards:
            losses, hits = models.trained(*shard, losses_and_hits)
            bins = torch.bucketize(shard.positions.flatten(), borders, right=True) - 1
            weights = _weights(shard)
            counted = (shard.labels != IGNORE_INDEX if weights is None else weights).long()
            sums.index_add_(0, bins, (losses.double() * counted).flatten())
            counts.index_add_(0, bins, counted.flatten())
            hit_count += (hits.long() * counted).sum()
    sum_over_all_ranks(sums, counts, hit_count)
    valid = int(counts.sum())
    found = tuple(
        Bin(first, end - 1, total / count if count else None, count)
        for first, end, total, count in zip(starts, [*starts[1:], length], sums.tolist(), counts.tolist(), strict=False)
    )
    return Perplexity(float(sums.sum()) / max(1, valid), int(hit_count) / max(1, valid), valid, found)
