"""Training sequences of verification, and the check that every token is on exactly one rank and in its position."""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightseq.data.batches import BatchStream
from lightseq.tools.verify.report import Row, all_gather_object, result_row
from lightseq.training.trainer import Trainer
from lightseq.utils.labels import IGNORE_INDEX

PROMPT, HOLES = 0.4, 0.1  # shares of a synthetic sequence with ignored labels: at the beginning, and anywhere

Token = tuple[int, int, int]  # position, id, target


@dataclass(frozen=True)
class Sample:
    """Document with ids and labels as in Hugging Face: aligned, not shifted.

    If training cuts the document, the sample has one more token: the target of the last one.
    """

    ids: Tensor
    labels: Tensor

    @property
    def targets(self) -> Tensor:
        """Returns the label of every token but the last: the token after it, or IGNORE_INDEX."""
        return self.labels[1:]

    @property
    def valid_tokens(self) -> int:
        return int((self.targets != IGNORE_INDEX).sum())

    def tokens(self, length: int | None = None) -> list[Token]:
        """Returns the expected tokens of all ranks with their targets, padded to `length`."""
        length = length or len(self.targets)
        ids = F.pad(self.ids[:length], (0, max(0, length - len(self.ids))))
        targets = F.pad(self.targets[:length], (0, max(0, length - len(self.targets))), value=IGNORE_INDEX)
        return list(zip(range(length), ids.tolist(), targets.tolist(), strict=True))


def synthetic_samples(count: int, length: int, vocabulary: int) -> list[Sample]:
    """Draws sequences longer and shorter than `length`, with ignored labels, so that target counts differ by rank."""
    rng, sizes = np.random.default_rng(count), (length + 3, length // 2 + 1, length, length // 5 + 2)
    samples = []
    for i in range(count):
        ids = rng.integers(0, vocabulary, sizes[i % len(sizes)])
        labels = np.where(rng.random(len(ids)) < HOLES, IGNORE_INDEX, ids)
        labels[: int(PROMPT * len(ids))] = IGNORE_INDEX
        border = min(length, len(ids) - 1)
        labels[border] = ids[border]
        samples.append(Sample(torch.from_numpy(ids), torch.from_numpy(labels)))
    return samples


def write(path: Path, samples: Sequence[Sample]) -> None:
    """Writes samples as a .pkl file for training."""
    path.write_bytes(
        pickle.dumps({"input_ids": [s.ids.tolist() for s in samples], "labels": [s.labels.tolist() for s in samples]})
    )


def cut(samples: Sequence[Sample], length: int) -> list[Sample]:
    """Cuts samples to `length` tokens and the target of the last one, as training does."""
    return [Sample(s.ids[: length + 1], s.labels[: length + 1]) for s in samples]


def documents_of(stream: BatchStream) -> list[list[Sample]]:
    """Returns the documents of each sequence of a stream's first step: one each, unless packed."""
    found = []
    for place in range(stream.sequences_per_step):
        example = stream.example(place)
        assert example is not None, "a stream with max_steps does not end"
        ids, shifted = torch.from_numpy(example.input_ids), torch.from_numpy(example.labels)
        borders = pairwise(example.boundaries or (0, len(ids)))
        found.append([_document(ids[begin:end], shifted[begin:end]) for begin, end in borders])
    return found


def _document(ids: Tensor, shifted: Tensor) -> Sample:
    last = shifted[-1:].clamp_min(0)
    return Sample(torch.cat([ids, last]), torch.cat([torch.full((1,), IGNORE_INDEX), shifted]))


def data_row(trainer: Trainer, sequences: Sequence[Sequence[Sample]]) -> Row:
    """Checks that every token of every sequence is on one rank, with the right position and target.

    The figure `positions_right` tells whether attention can run without a deadlock.
    """
    config, inputs, world = trainer.config, trainer.inputs, trainer.world
    batches = [inputs.stream.batch(0, a, inputs.dims.data_rank) for a in range(config.gradient_accumulation_steps)]
    mine = [[x.cpu() for x in trainer.shard(batch)[:3]] for batch in batches]
    everyone = all_gather_object((mine, [batch.valid_tokens for batch in batches]))
    wrong, positions_right = list[str](), True
    size, count, packed = inputs.dims.sequence, config.per_device_train_batch_size, config.packing != "none"
    for first in range(0, world.size, size):
        for a in range(config.gradient_accumulation_steps):
            start = (a * (world.size // size) + first // size) * count
            batch = sequences[start : start + count]
            for row, documents in enumerate(batch):
                held = [tokens_of(*(x[row] for x in shards[a])) for shards, _ in everyone[first : first + size]]
                length = None if packed else config.model_max_length
                wanted = [token for document in documents for token in document.tokens(length)]
                positions_right &= not Counter(p for p, *_ in wanted) - Counter(p for p, *_ in chain(*held))
                wrong += [f"sequence {start + row}: {line}" for line in misplaced(held, wanted, first)]
            counted, valid = everyone[first][1][a], sum(s.valid_tokens for s in chain(*batch))
            wrong += [f"ranks from {first} on count {counted} targets instead of {valid}"] if counted != valid else []
    targets = [sum(int((labels != IGNORE_INDEX).sum()) for _, _, labels in shards) for shards, _ in everyone]
    length = config.model_max_length
    right = (
        f"{len(sequences)} x {length:,} tokens in the right positions, {min(targets):,} to {max(targets):,} targets "
        "per rank"
    )
    figures = {"length": length, "sequences": len(sequences), "targets_by_rank": targets}
    return result_row("data", wrong, right, figures | {"positions_right": positions_right})


def tokens_of(ids: Tensor, positions: Tensor, labels: Tensor) -> list[Token]:
    return list(zip(positions.tolist(), ids.tolist(), labels.tolist(), strict=True))


def misplaced(held: Sequence[Sequence[Token]], wanted: Sequence[Token], first_rank: int = 0) -> list[str]:
    """Describes tokens of a sequence that are on no rank, on two ranks, or have a wrong position or target.

    `held`: tokens of each rank, in any order. Extra padding (id 0 without a target) is allowed.
    """
    want, got = Counter(wanted), Counter(chain(*held))
    last = max((position for position, *_ in wanted), default=0)
    lines = []
    for rank, tokens in enumerate(held, first_rank):
        misplaced_tokens = sorted(
            token
            for token in set(tokens)
            if got[token] > want[token] and not (token[1:] == (0, IGNORE_INDEX) and 0 <= token[0] <= last)
        )
        if misplaced_tokens:
            position, token, label = misplaced_tokens[0]
            label_words = f"label {label}" if label != IGNORE_INDEX else "no label"
            begins = f"; rank {rank} begins at {tokens[0][0]}"
            example = f"first: {token} with {label_words} at position {position}"
            count = len(misplaced_tokens)
            lines.append(f"{count} of {len(tokens)} tokens of rank {rank} are misplaced ({example}{begins})")
    missing = sum((want - got).values())
    return lines + ([f"{missing} of {len(wanted)} tokens are on no rank"] if missing else [])
