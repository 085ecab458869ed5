"""Objective protocol: all that the trainer, the engines and the planner know of a run's loss."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightseq.data.batches import Batch
from lightseq.parts.loss import token_log_probs
from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup
from lightseq.utils.logit_transform import LogitTransform


class Shard(NamedTuple):
    """A rank's part of a batch. Tensors have the shape (batch, local sequence)."""

    ids: Tensor
    positions: Tensor  # within the whole sequence, or within the document if packed
    labels: Tensor  # shifted
    documents: Documents | None  # None unless packed


class FrozenModel(NamedTuple):
    """A model beside the trained one that never changes, in the compute dtype."""

    name: str
    source: str | None = None  # directory or Hub id; None: the architecture and the weights that the run started from


class Share(NamedTuple):
    """A rank's share of a batch, not yet divided: the sum over all ranks and batches of a step is its total."""

    loss: Tensor  # scalar, with gradients
    metrics: Tensor  # a value for each of the objective's `metrics`, without gradients


@dataclass(frozen=True)
class Models:
    """Models of a run on one rank: each is called with a shard and returns losses or values per token."""

    trained: nn.Module
    group: SequenceGroup  # the ranks that share a sequence
    frozen: Mapping[str, nn.Module] = field(default_factory=dict)  # by the names in `Objective.frozen_models`


class Evaluation(Protocol):
    """Result of an evaluation, the same on every rank."""

    @property
    def loss(self) -> float: ...

    def record(self) -> dict[str, float | None]:
        """Returns the values for metrics.jsonl, `eval_loss` among them."""
        ...

    def __str__(self) -> str:
        """Returns the means for the terminal, the loss first."""
        ...


class Objective(Protocol):
    """Loss of a run, as a value that follows from the flags; the models are passed to it."""

    def __str__(self) -> str:
        """Returns a line for the terminal; empty for next tokens."""
        ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """Returns the names of the means that a step reports beside the loss."""
        ...

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """Returns the models beside the trained one.

        The engine shards them in units of the same kinds and saves nothing of them. The planner counts their memory.
        """
        ...

    @property
    def passes_without_gradients(self) -> int:
        """Returns the forward passes of a batch beside the trained model's own, of models of its architecture."""
        ...

    @property
    def reads_head_in_backward(self) -> bool:
        """Returns whether the backward pass computes logits again, for which the head must be gathered again."""
        ...

    def logit_bytes(self, tokens: int, vocabulary: int, itemsize: int) -> int:
        """Returns the bytes of the logits of `tokens` local tokens, with the loss's tensors of their size."""
        ...

    def count(self, batch: Batch) -> int:
        """Returns this whole batch's contribution to the divisor of a step's loss.

        Labels are final here. The trainer sums over the step's batches and all data ranks.
        """
        ...

    def share(self, models: Models, shard: Shard) -> Share:
        """Runs the models on a rank's part of a batch. All ranks of the sequence must call it."""
        ...

    def evaluate(self, models: Models, shards: Iterable[Shard]) -> Evaluation:
        """Evaluates the models on every shard. All ranks need the same number of shards."""
        ...


def read_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, transform: LogitTransform, bias: Tensor | None
) -> Tensor:
    """Runs a model whose loss is replaced by log p(label) of every token."""
    return token_log_probs(hidden, weight, labels, transform=transform, bias=bias)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode inside the block and back into training mode afterwards."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        for module in model.modules():
            if isinstance(module, FSDPModule):  # frees gathered parameters, which FSDP2 holds for a backward pass
                module.reshard()


def sum_over_all_ranks(*sums: Tensor) -> None:
    """Replaces each tensor by its sum over all ranks of the run."""
    for x in sums:
        dist.all_reduce(x)
