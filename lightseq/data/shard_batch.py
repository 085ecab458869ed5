"""A rank's shard of a whole batch: ids, shifted labels, positions and documents."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightseq.attention.context import Documents, SequenceContext, pack
from lightseq.schedule.documents import document_positions
from lightseq.schedule.layout import shard
from lightseq.utils.labels import IGNORE_INDEX

Labels = TypeVar("Labels", bound=Tensor | None)


def local_batch(
    context: SequenceContext, input_ids: Tensor, labels: Labels, boundaries: Sequence[int] | None
) -> tuple[Tensor, Labels, Documents | None]:
    """Returns this rank's shard of a batch's ids and shifted labels, and the documents if `boundaries` are given."""
    documents = None if boundaries is None else pack(context, boundaries, input_ids.shape[1])
    cut: Callable[..., Any] = documents.shard if documents else partial(shard, layout=context.layout)
    local = labels if labels is None else cut(labels, rank=context.rank, fill=IGNORE_INDEX)
    return cut(input_ids, rank=context.rank), local, documents


def packed_positions(context: SequenceContext, documents: Documents) -> Tensor:
    """Returns the position of each of this rank's tokens in its document, int64 (1, local), on the CPU."""
    every = torch.from_numpy(document_positions(documents.padded_boundaries))
    return documents.shard(every.unsqueeze(0), context.rank)


def local_positions(context: SequenceContext, length: int, device: torch.device) -> Tensor:
    """Returns the global positions of this rank's tokens, int64 (1, local). Padding gets the last position."""
    padded = context.layout.padded_length(length)
    return context.layout.positions_on(device, context.rank, padded).clamp_max(length - 1).unsqueeze(0)
