"""Padded lengths of batches: --model_max_length and its halves, at most eight, equal on all ranks."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from lightseq.data.batches import Batch

MAX_BUCKETS: Final = 8
PADDING_WARNING_SHARE: Final = 1 / 3  # of all positions, from which on something should be done about it


def bucket_lengths(longest: int, multiple: int) -> tuple[int, ...]:
    """Returns `longest` and its halves, each rounded up to a multiple, in rising order; at most MAX_BUCKETS."""
    halves = (-(-longest // (multiple << i)) * multiple for i in range(MAX_BUCKETS))
    return tuple(sorted({min(longest, half) for half in halves}))


def trim_padding(batches: Sequence[Batch], lengths: Sequence[int], data_ranks: int) -> list[Batch]:
    """Cuts padding off micro-batches: each gets the first of `lengths` that holds its rows on every data rank.

    With several data ranks, all ranks call it together. They agree on the host, without waiting for a GPU.
    """
    if len(lengths) == 1:
        return list(batches)
    rows = torch.tensor([max(batch.sizes) for batch in batches])
    if data_ranks > 1:
        dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    return [batch.cut(lengths[bisect_left(lengths, row)]) for batch, row in zip(batches, rows.tolist(), strict=True)]
