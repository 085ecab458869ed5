"""Trees of packed documents that begin alike. A prefix is computed once, and counted once per document in the loss."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from lightseq.config.objectives import OBJECTIVES
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import Batch
from lightseq.sequence.documents import RowPlaces
from lightseq.sequence.shared_prefixes import LEAST_SAVED, share_prefixes
from lightseq.utils.tensors import IGNORE_INDEX

LENGTHS = 8  # number of batch lengths; trees leave different parts of a sequence empty


def least_saved_share(config: TrainConfig) -> float | None:
    """Returns the share of a batch's tokens that trees must save; None if documents stay whole."""
    if config.share_prefixes:
        return 0.0  # rows were packed for trees
    by_default = config.share_prefixes is None and OBJECTIVES[config.objective].shares_prefixes
    return LEAST_SAVED if by_default else None


def with_shared_prefixes(batch: Batch, least_saved: float) -> Batch:
    """Turns a packed batch's documents into trees of the same total length; skips batches with few shared tokens.

    Trees must leave out `least_saved` of the tokens, a share from 0 to 1.
    """
    if batch.boundaries is None:
        return batch
    ids, labels = (x[0, : batch.boundaries[-1]].numpy() for x in (batch.input_ids, batch.labels))
    shared = share_prefixes([ids[a:b] for a, b in pairwise(batch.boundaries)])
    if not shared.saves(least_saved) or (labels_of_trees := shared.labels(labels)) is None:
        return batch
    count = len(shared.ids)
    input_ids, shift_labels = torch.zeros_like(batch.input_ids), torch.full_like(batch.labels, IGNORE_INDEX)
    input_ids[0, :count], shift_labels[0, :count] = (torch.from_numpy(x) for x in (shared.ids, labels_of_trees))
    rows = RowPlaces(
        places=torch.from_numpy(np.concatenate(shared.places)),
        has_target=torch.from_numpy(labels != IGNORE_INDEX),
        sizes=tuple(map(len, shared.places)),
    )
    nodes = shared.nodes
    return replace(
        batch,
        input_ids=input_ids,
        labels=shift_labels,
        sizes=(count,),
        boundaries=nodes.boundaries,
        parents=nodes.parents,
        rows=rows,
    )


def even_lengths(longest: int, multiple: int) -> tuple[int, ...]:
    """Returns an eighth of `longest`, two eighths ... and `longest`, rounded up to `multiple`, in rising order."""
    eighths = (-(-longest * i // (LENGTHS * multiple)) * multiple for i in range(1, LENGTHS + 1))
    return tuple(sorted({min(longest, length) for length in eighths}))
