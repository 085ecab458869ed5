"""Training sequences of verification."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lightseq.data.batches import BatchStream
from lightseq.utils.tensors import IGNORE_INDEX

PROMPT, HOLES = 0.4, 0.1  # shares of a synthetic row with ignored labels: at the beginning, and anywhere


class Document(NamedTuple):
    """Ids of a document, and the target of each: the next token, or IGNORE_INDEX."""

    ids: Tensor
    targets: Tensor

    @property
    def valid_tokens(self) -> int:
        return int((self.targets != IGNORE_INDEX).sum())

    def padded(self, length: int) -> "Document":
        missing = max(0, length - len(self.ids))
        return Document(F.pad(self.ids, (0, missing)), F.pad(self.targets, (0, missing), value=IGNORE_INDEX))


def synthetic_rows(count: int, length: int, vocabulary: NDArray[np.int64]) -> dict[str, list[list[int]]]:
    """Draws rows longer and shorter than `length`, with ignored labels, so that target counts differ by rank."""
    rng, sizes = np.random.default_rng(count), (length + 3, length // 2 + 1, length, length // 5 + 2)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for i in range(count):
        ids = rng.choice(vocabulary, sizes[i % len(sizes)])
        labels = np.where(rng.random(len(ids)) < HOLES, IGNORE_INDEX, ids)
        labels[: int(PROMPT * len(ids))] = IGNORE_INDEX
        border = min(length, len(ids) - 1)
        labels[border] = ids[border]
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(labels.tolist())
    return rows


def first_step(stream: BatchStream) -> list[list[Document]]:
    """Returns the documents of each sequence of a stream's first step: one each, unless packed."""
    found = []
    for sample in range(stream.sequences_per_step):
        example = stream.example(sample)
        assert example is not None, "a stream with max_steps does not end"
        ids, targets = torch.from_numpy(example.input_ids), torch.from_numpy(example.labels)
        borders = pairwise(example.boundaries or (0, len(ids)))
        found.append([Document(ids[begin:end], targets[begin:end]) for begin, end in borders])
    return found
