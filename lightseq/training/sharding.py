"""Cuts a rank's part out of a whole batch and brings it to the device, without the host waiting for that."""

import torch
from torch import Tensor

from lightseq.attention.context import SequenceContext
from lightseq.data.batches import Batch
from lightseq.data.shard_batch import local_batch, local_positions, packed_positions
from lightseq.training.evaluation import Shard


class Sharding:
    """Of one rank; positions are the same for every batch without documents, and made once."""

    def __init__(self, context: SequenceContext, device: torch.device) -> None:
        self._context, self._device = context, device
        self._positions: dict[int, Tensor] = {}  # by length

    def __call__(self, batch: Batch) -> Shard:
        ids, labels, documents = local_batch(self._context, batch.input_ids, batch.labels, batch.boundaries)
        if documents is not None:
            positions = self._there(packed_positions(self._context, documents))
        else:
            positions = self._global_positions(batch.input_ids.shape[1]).expand(len(ids), -1)
        return Shard(self._there(ids), positions, self._there(labels), documents)

    def _global_positions(self, length: int) -> Tensor:
        if length not in self._positions:
            self._positions[length] = local_positions(self._context, length, self._device)
        return self._positions[length]

    def _there(self, x: Tensor) -> Tensor:
        return x.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else x
