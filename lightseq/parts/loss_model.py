"""Causal language model that returns its loss, computed in place of the head."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightseq.utils import quiet_transformers  # noqa: F401  first, because the modules below import transformers

# isort: split
from transformers import PreTrainedModel

from lightseq.distributed.stopwatch import Stopwatch
from lightseq.models.decoder import headless
from lightseq.parts.head import ReplacedHead
from lightseq.parts.loss import cross_entropy_sum
from lightseq.parts.router_loss import asks_for_router_logits
from lightseq.sequence.documents import Documents
from lightseq.utils.logit_transform import LogitTransform

# Computes values per token in place of the loss, from hidden states, the head's weight, labels, the transform of the
# logits, and the head's bias. `parts.loss.losses_and_hits` is one.
HeadReader = Callable[[Tensor, Tensor, Tensor, LogitTransform, Tensor | None], Tensor]


class LossModel(nn.Module):
    """Causal language model that returns its loss; its forward is the whole forward pass of a step."""

    def __init__(self, model: PreTrainedModel, transform: LogitTransform, stopwatch: Stopwatch) -> None:
        super().__init__()
        self.model = model
        self.transform = transform  # makes logits of the head's result
        self.stopwatch = stopwatch  # times the loss, because its work is equal on every rank

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        documents: Documents | None = None,
        read: HeadReader | None = None,
    ) -> Tensor:
        """Returns the sum of -log p(label) over this rank's valid labels, times their weights in rows of trees.

        ids, positions and labels are (batch, local sequence), labels shifted. `documents`
        describes a packed sequence. With `read`, as in evaluations, its result is returned instead.
        """
        options: dict[str, Any] = {}  # only some models take them
        if documents is not None:
            options["documents"] = documents
        if asks_for_router_logits(self.model.config, {}):  # `Routers` computes their loss without storing logits
            options["output_router_logits"] = False
        output = headless(self.model)(input_ids=input_ids, position_ids=position_ids, use_cache=False, **options)
        head: Any = self.model.get_output_embeddings()
        rows = None if documents is None else documents.rows
        loss = partial(self._loss, labels, None if rows is None else rows.weights)
        replaced = ReplacedHead(head, partial(self._read, labels, read) if read else loss)
        try:
            return head(output.last_hidden_state)  # type: ignore[no-any-return]
        finally:
            replaced.restore()

    def _read(self, labels: Tensor, read: HeadReader, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with self.stopwatch.lap() if torch.is_grad_enabled() else nullcontext():
            return read(hidden, weight, labels, self.transform, bias)

    def _loss(
        self, labels: Tensor, factors: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        with self.stopwatch.lap():
            return cross_entropy_sum(hidden, weight, labels, transform=self.transform, bias=bias, factors=factors)
