"""Training by plain torch on the rows that `lightseq train` reads, in its order."""

from typing import Any

import torch
from torch import Tensor

from lightseq.data.batches import permutation

Rows = list[list[int]]


def loss_at(model: Any, data: Rows, step: int) -> Tensor:
    """Returns the loss of the row of a step in the first epoch."""
    ids = torch.tensor([data[permutation(len(data), 42, 0)[step]]])
    return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]


def plain_losses(model: Any, data: Rows, steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    """Trains, and returns the losses of every step and of one more."""
    losses = []
    for step in range(steps):
        loss = loss_at(model, data, step)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, loss_at(model, data, steps % len(data)).item()]
