"""Preferences by direct optimization (DPO, arXiv 2305.18290): a chosen answer above a rejected one, beside a reference.

The two documents of a pair stand next to each other in a packed row, or in a tree that shares their prompt. Only their
answers have labels.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightseq.data.batches import Batch
from lightseq.objectives.objective import (
    FrozenModel,
    Models,
    Shard,
    Share,
    evaluating,
    read_log_probs,
    sum_over_all_ranks,
)
from lightseq.parts.loss import CHUNK_TOKENS
from lightseq.parts.low_rank import adapters_off
from lightseq.sequence.sums import sum_of_targets, sum_over_ranks

REFERENCE: Final = "reference"
ACCURACIES, MARGINS = "rewards/accuracies", "rewards/margins"


@dataclass(frozen=True)
class Preferences:
    """Mean over pairs of -log σ(reward of the chosen answer less that of the rejected one).

    A reward is β times log p of the answer, less the reference's log p.
    """

    beta: float
    has_adapters: bool  # the trained model without its adapters is the reference
    metrics: tuple[str, ...] = (
        *("rewards/chosen", "rewards/rejected", ACCURACIES, MARGINS),
        *("logps/chosen", "logps/rejected"),
    )  # TRL's names
    passes_without_gradients: int = 1
    reads_head_in_backward: bool = True

    def __str__(self) -> str:
        reference = "the model without its adapters" if self.has_adapters else "a second model in the compute dtype"
        return f"dpo, beta {self.beta:g}, reference: {reference}"

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        return () if self.has_adapters else (FrozenModel(REFERENCE),)

    def logit_bytes(self, tokens: int, vocabulary: int, itemsize: int) -> int:
        return min(tokens, CHUNK_TOKENS) * vocabulary * itemsize

    def count(self, batch: Batch) -> int:
        return _pairs(len(batch.document_sizes))

    def share(self, models: Models, shard: Shard) -> Share:
        losses, values = self._pairs_of(models, shard)
        ranks = models.group.layout.world  # each has all pairs, and adds its part of them
        return Share(losses.sum() / ranks, values.sum(1) / ranks)

    def evaluate(self, models: Models, shards: Iterable[Shard]) -> "PreferenceMeans":
        ranks = models.group.layout.world
        device = next(models.trained.parameters()).device
        totals = torch.zeros(2 + len(self.metrics), dtype=torch.float64, device=device)
        with evaluating(models.trained):
            for shard in shards:
                losses, values = self._pairs_of(models, shard)
                sums = torch.stack([torch.ones_like(losses), losses, *values]).double().sum(1)
                totals += sums / ranks
        sum_over_all_ranks(totals)
        loss, *means = (totals[1:] / totals[0].clamp_min(1)).tolist()
        return PreferenceMeans(loss, dict(zip(self.metrics, means, strict=True)))

    def _pairs_of(self, models: Models, shard: Shard) -> tuple[Tensor, Tensor]:
        """Returns each pair's loss, and its value for each of the metrics, the same on all ranks of the sequence."""
        documents, group = shard.documents, models.group
        assert documents is not None, "the checks of flags ask for packed rows"
        # The reference first, before the trained model stores activations.
        reference = self._reference_log_probs(models, shard)
        both = torch.stack([models.trained(*shard, read=read_log_probs), reference])
        own = sum_of_targets(both, shard.labels, documents, group.rank)
        sums = sum_over_ranks(group.process_group, own, gradient_factor=group.layout.world)
        pairs = _pairs(documents.row_count)
        by_pair = sums[:, : 2 * pairs].unflatten(1, (pairs, 2))  # (model, pair, answer)
        rewards = self.beta * (by_pair[0] - by_pair[1])
        losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1])
        chosen, rejected = rewards.detach().unbind(1)
        hits = (chosen > rejected).to(chosen.dtype)
        return losses, torch.stack([chosen, rejected, hits, chosen - rejected, *by_pair[0].detach().unbind(1)])

    def _reference_log_probs(self, models: Models, shard: Shard) -> Tensor:
        with torch.no_grad():
            if REFERENCE in models.frozen:
                return models.frozen[REFERENCE](*shard, read=read_log_probs)  # type: ignore[no-any-return]
            with adapters_off(models.trained):
                return models.trained(*shard, read=read_log_probs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PreferenceMeans:
    """Means over all pairs of the evaluation data."""

    loss: float
    metrics: dict[str, float]

    def __str__(self) -> str:
        accuracy, margin = self.metrics[ACCURACIES], self.metrics[MARGINS]
        return f"loss {self.loss:.4f}, accuracy {accuracy:.1%}, margin {margin:.4f}"

    def record(self) -> dict[str, float | None]:
        return {"eval_loss": self.loss, **{f"eval_{name}": value for name, value in self.metrics.items()}}


def _pairs(documents: int) -> int:
    """Returns the pairs in a row of documents. A row past the end of the data is one document of padding."""
    return documents // 2
