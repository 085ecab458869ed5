"""Distillation: the divergence of next-token distributions from a frozen teacher's, over all tokens with a target."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from lightseq.data.batches import Batch
from lightseq.objectives.objective import FrozenModel, Models, Shard, Share, evaluating, sum_over_all_ranks
from lightseq.parts.divergence import CHUNK_TOKENS, Divergence, HeadInput, token_divergence
from lightseq.utils.logit_transform import LogitTransform
from lightseq.utils.tensors import IGNORE_INDEX

TEACHER: Final = "teacher"
CROSS_ENTROPY: Final = "cross_entropy"
CHUNK_TENSORS: Final = 6  # float32 tensors of a chunk's logits that exist at once


@dataclass(frozen=True)
class Distillation:
    """Mean over all targets of a divergence between the distributions of the trained model and of the teacher."""

    teacher: str
    divergence: Divergence
    metrics: tuple[str, ...] = (CROSS_ENTROPY, "teacher_cross_entropy")  # with the targets
    passes_without_gradients: int = 0
    reads_head_in_backward: bool = False  # all targets weigh the same, so the forward pass computes the gradients

    def __str__(self) -> str:
        kind, temperature = self.divergence.kind, self.divergence.temperature
        beta = f", beta {self.divergence.beta:g}" if kind == "jsd" else ""
        return f"distill, {kind}{beta}, temperature {temperature:g}, teacher: {self.teacher}"

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        return (FrozenModel(TEACHER, self.teacher),)

    def logit_bytes(self, tokens: int, vocabulary: int, itemsize: int) -> int:
        return CHUNK_TENSORS * min(tokens, CHUNK_TOKENS) * vocabulary * torch.float32.itemsize

    def count(self, batch: Batch) -> int:
        return batch.valid_tokens

    def share(self, models: Models, shard: Shard) -> Share:
        sums = self._sums(models, shard)
        return Share(sums[0], sums[1:].detach())

    def evaluate(self, models: Models, shards: Iterable[Shard]) -> "DistillationMeans":
        device = next(models.trained.parameters()).device
        totals = torch.zeros(1 + len(self.metrics), dtype=torch.float64, device=device)
        count = torch.zeros((), dtype=torch.int64, device=device)
        with evaluating(models.trained):
            for shard in shards:
                totals += self._sums(models, shard).double()
                count += (shard.labels != IGNORE_INDEX).sum()
        sum_over_all_ranks(totals, count)
        loss, *means = (totals / count.clamp_min(1)).tolist()
        return DistillationMeans(loss, dict(zip(self.metrics, means, strict=True)))

    def _sums(self, models: Models, shard: Shard) -> Tensor:
        """Returns this rank's sums of the divergence, with gradients, and of the metrics."""
        # The teacher first, before the trained model stores activations.
        teacher = _run_teacher(models, shard)
        read = partial(_divergence_and_losses, self.divergence, teacher)
        found: Tensor = models.trained(*shard, read=read)
        return found


@dataclass(frozen=True)
class DistillationMeans:
    """Means over all targets of the evaluation data."""

    loss: float
    metrics: dict[str, float]

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, cross entropy {self.metrics[CROSS_ENTROPY]:.4f}"

    def record(self) -> dict[str, float | None]:
        return {"eval_loss": self.loss, **{f"eval_{name}": value for name, value in self.metrics.items()}}


@torch.no_grad()
def _run_teacher(models: Models, shard: Shard) -> HeadInput:
    """Runs the teacher up to its head. Returns the head's input, and copies of its gathered weights."""
    found = list[HeadInput]()

    def take(hidden: Tensor, weight: Tensor, _: Tensor, transform: LogitTransform, bias: Tensor | None) -> Tensor:
        found.append(HeadInput(hidden, weight.clone(), None if bias is None else bias.clone(), transform))
        return hidden.new_zeros(())

    models.frozen[TEACHER](*shard, read=take)
    return found[-1]


def _divergence_and_losses(
    divergence: Divergence, teacher: HeadInput, hidden: Tensor, weight: Tensor, labels: Tensor,
    transform: LogitTransform, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    student = HeadInput(hidden, weight, bias, transform)
    found = token_divergence(student, teacher, labels, divergence, equal_factors=True)
    values = found.divergence, -found.student_log_probs, -found.teacher_log_probs
    return torch.stack([x.sum() for x in values])
