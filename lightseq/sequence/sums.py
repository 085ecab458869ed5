"""Sums over the tokens of whole sequences or packed documents, and over the ranks that share a sequence."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.sequence.documents import Documents
from lightseq.utils.tensors import IGNORE_INDEX, upload


def sum_of_targets(values: Tensor, labels: Tensor, documents: Documents | None, rank: int) -> Tensor:
    """Sums values over this rank's targets: (..., batch, local) to (..., batch), or (..., documents) if packed.

    The result is (..., rows) in trees made of rows, and a token adds to each row that learns its target. Sums are
    float32, or float64 for float64 values. Tokens without a label add nothing.
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    wide = torch.where(labels == IGNORE_INDEX, 0.0, wide)
    if documents is None:
        return wide.sum(-1)
    if documents.rows is not None:
        tokens, rows = (upload(x, wide.device) for x in documents.targets_of_rows(rank))
        found = wide.flatten(-2).index_select(-1, tokens)
        return wide.new_zeros(*wide.shape[:-2], documents.row_count).index_add(-1, rows, found)
    numbers = upload(documents.document_numbers(rank), wide.device)
    return wide.new_zeros(*wide.shape[:-2], documents.count).index_add(-1, numbers, wide.flatten(-2))


def sum_over_ranks(group: dist.ProcessGroup, x: Tensor, gradient_factor: float = 1.0) -> Tensor:
    """Returns the sum of a tensor over the ranks that share a sequence.

    If all of them compute the same loss from it and call `backward`, parameter gradients, summed over ranks, count the
    loss once. `gradient_factor` multiplies the gradient: with the number of ranks, each rank's loss divided by that
    number is its share, and the shares add up to the loss.
    """
    total: Tensor = _SumOverRanks.apply(x, group, gradient_factor)
    return total


class _SumOverRanks(torch.autograd.Function):
    """Sum over a group whose ranks all compute the same loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, gradient_factor: float) -> Tensor:  # type: ignore[override]
        ctx.gradient_factor = gradient_factor
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient * ctx.gradient_factor, None, None
