"""A rank's shard of a whole batch: ids, shifted labels and documents."""

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup
from lightseq.utils.labels import IGNORE_INDEX

Labels = TypeVar("Labels", bound=Tensor | None)


def local_batch(
    group: SequenceGroup, input_ids: Tensor, labels: Labels, boundaries: Sequence[int] | None
) -> tuple[Tensor, Labels, Documents | None]:
    """Returns this rank's shard of a batch's ids and shifted labels, and the documents if `boundaries` are given."""
    documents = None if boundaries is None else group.pack(boundaries, input_ids.shape[1])
    local: Any = labels if labels is None else group.shard(labels, IGNORE_INDEX, documents)
    return group.shard(input_ids, documents=documents), local, documents
