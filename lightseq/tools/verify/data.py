"""Training sequences of verification, and the check that every token is on exactly one rank and in its position."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lightseq.data.batches import BatchStream
from lightseq.tools.verify.report import Row, all_gather_object, result_row
from lightseq.training.trainer import Trainer
from lightseq.utils.tensors import IGNORE_INDEX

PROMPT, HOLES = 0.4, 0.1  # shares of a synthetic row with ignored labels: at the beginning, and anywhere

Token = tuple[int, int, int]  # position, id, target


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


def data_row(trainer: Trainer, sequences: Sequence[Sequence[Document]]) -> Row:
    """Checks that every token of every sequence is on one rank, in its position and with its target."""
    stream, dims, rows = trainer.inputs.stream, trainer.inputs.dims, trainer.config.per_device_train_batch_size
    batches = [stream.batch(0, a, dims.data_rank) for a in range(trainer.config.gradient_accumulation_steps)]
    everyone = all_gather_object([[x.cpu() for x in trainer.shard(batch)[:3]] for batch in batches])
    wrong = []
    for number, documents in enumerate(sequences):
        batch, row = divmod(number, rows)
        accumulation, data_rank = divmod(batch, dims.data_ranks)
        ranks = everyone[data_rank * dims.sequence : (data_rank + 1) * dims.sequence]
        held = [token for rank in ranks for token in _tokens(*(x[row] for x in rank[accumulation]))]
        whole = documents if stream.packed else [documents[0].padded(stream.length)]
        wanted = [token for ids, targets in whole for token in _tokens(ids, torch.arange(len(ids)), targets)]
        wrong += [f"sequence {number}: {line}" for line in misplaced(held, wanted)]
    targets = [sum(int((labels != IGNORE_INDEX).sum()) for _, _, labels in shards) for shards in everyone]
    right = (
        f"{len(sequences)} x {stream.length:,} tokens in the right positions, {min(targets):,} to {max(targets):,} "
        "targets per rank"
    )
    figures = {"length": stream.length, "sequences": len(sequences), "targets_by_rank": targets}
    return result_row("data", wrong, right, figures)


def _tokens(ids: Tensor, positions: Tensor, targets: Tensor) -> list[Token]:
    return list(zip(positions.tolist(), ids.tolist(), targets.tolist(), strict=True))


def misplaced(held: Sequence[Token], wanted: Sequence[Token]) -> list[str]:
    """Describes tokens of a sequence that no rank or two ranks hold, or that have a wrong position or target.

    Ranks may hold more padding (id 0 without a target).
    """
    missing, extra = Counter(wanted) - Counter(held), Counter(held) - Counter(wanted)
    lines = [f"{missing.total()} of {len(wanted)} tokens are on no rank"] if missing else []
    if found := sorted(token for token in extra if token[1:] != (0, IGNORE_INDEX)):
        position, token, target = found[0]
        first = f"first: {token} with target {target} at position {position}"
        lines.append(f"{len(found)} tokens have a wrong position or target, or are on two ranks ({first})")
    return lines
