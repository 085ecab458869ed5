"""Batches of a training run. A batch depends only on its index."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightseq.data.examples import IGNORE_INDEX, Example, Examples
from lightseq.parts.adapter_files import flag_for_weights
from lightseq.schedule.nodes import Nodes
from lightseq.sequence.documents import RowPlaces

MAX_BUCKETS: Final = 8
PADDING_WARNING_SHARE: Final = 1 / 3  # share of all positions
FINGERPRINT_EXAMPLES = 16  # number of examples that are hashed to recognize the data
# Values that must not change on resume, and their names in errors.
MUST_MATCH = {"length": "with --model_max_length {}", "seed": "with --seed {}", "examples": "on {:,} examples"}


@dataclass(frozen=True)
class Batch:
    """A batch of rows, padded on the right with id 0 and label IGNORE_INDEX."""

    input_ids: torch.Tensor  # [batch_size, length] int64
    labels: torch.Tensor  # [batch_size, length] int64
    valid_tokens: int  # labels that are not IGNORE_INDEX
    sizes: tuple[int, ...]  # tokens of each row, without padding
    boundaries: tuple[int, ...] | None = None  # start of each packed document, and the last end (batch of one)
    parents: tuple[int, ...] | None = None  # parents of nodes, if documents became trees (`schedule.nodes`)
    rows: RowPlaces | None = None  # places of rows in trees

    @property
    def nodes(self) -> Nodes | None:
        """Returns the packed documents, or the nodes of trees; None for rows that are not packed."""
        return None if self.boundaries is None else Nodes(self.boundaries, self.parents)

    @property
    def length(self) -> int:
        """Returns the number of tokens in each row, padding included."""
        return self.input_ids.shape[1]

    @property
    def document_sizes(self) -> tuple[int, ...]:
        """Returns the tokens of each packed document, or of each row without packing."""
        if self.rows is not None:
            return self.rows.sizes
        return self.sizes if self.boundaries is None else tuple(b - a for a, b in pairwise(self.boundaries))

    def cut(self, length: int) -> Batch:
        """Returns the batch with padding cut so that each row has `length` tokens."""
        assert max(self.sizes) <= length <= self.length, f"rows of {self.sizes} tokens do not fit into {length}"
        return replace(self, input_ids=self.input_ids[:, :length], labels=self.labels[:, :length])


def padding_batch(rows: int, length: int, packed: bool) -> Batch:
    """Returns a batch of padding only."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(ids, torch.full_like(ids, IGNORE_INDEX), 0, (0,) * rows, boundaries=(0, 1) if packed else None)


def bucket_lengths(longest: int, multiple: int) -> tuple[int, ...]:
    """Halves `longest` up to MAX_BUCKETS - 1 times. Returns the lengths, rounded up to `multiple`, in rising order."""
    halves = (-(-longest // (multiple << i)) * multiple for i in range(MAX_BUCKETS))
    return tuple(sorted({min(longest, half) for half in halves}))


def trim_padding(batches: Sequence[Batch], lengths: Sequence[int], data_ranks: int) -> list[Batch]:
    """Trims padding: each micro-batch gets the smallest of `lengths` that fits its rows on every data rank.

    With several data ranks, every rank must call it. The ranks agree on the host, without waiting for a GPU.
    """
    if len(lengths) == 1:
        return list(batches)
    rows = torch.tensor([max(batch.sizes) for batch in batches])
    if data_ranks > 1:
        dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    return [batch.cut(lengths[bisect_left(lengths, row)]) for batch, row in zip(batches, rows.tolist(), strict=True)]


@lru_cache(maxsize=2)  # a batch spans at most two epochs; permuting millions of examples takes seconds
def permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the random order of the examples in an epoch."""
    order = np.random.default_rng((seed, epoch)).permutation(count)
    order.setflags(write=False)
    return order


def _kind(content: str | None) -> str | None:
    """Returns the kind in a result of `hash_content`. Hashes of different kinds cannot be compared."""
    return content.partition(":")[0] if content is not None else None


@dataclass(frozen=True)
class BatchStream:
    """An endless stream of samples, epoch after epoch. Resuming needs only the position in it.

    At optimizer step s, accumulation index a and data rank d, a batch is the B samples from ((s * A + a) * D + d) * B
    on. A run that resumes after `first_step` steps with another number of sequences per step continues at
    `first_sample`. With `epochs`, samples past the end are empty, so the last step is complete on every rank.
    """

    examples: Examples
    length: int
    batch_size: int  # sequences per data rank in one forward pass
    data_ranks: int = 1
    accumulation: int = 1
    epochs: float | None = None  # None: endless
    seed: int = 0
    shuffle: bool = True
    packed: bool = False  # examples hold several documents; then batch_size is 1
    first_step: int = 0
    first_sample: int = 0
    content: str | None = None  # hash of all the data, on the rank that writes checkpoints

    @property
    def sequences_per_step(self) -> int:
        return self.accumulation * self.data_ranks * self.batch_size

    @property
    def end(self) -> int | None:
        """Returns the first sample past the last epoch."""
        return None if self.epochs is None else max(1, round(self.epochs * len(self.examples)))

    @property
    def steps(self) -> int:
        """Returns the optimizer steps of the whole run; `first_step` if every epoch is read already."""
        assert self.end is not None, "the stream is endless"
        return self.first_step + max(0, -((self.first_sample - self.end) // self.sequences_per_step))

    def state(self, step: int) -> dict[str, Any]:
        """Returns the state for a checkpoint: samples read, sequences per step, and what determines their order."""
        consumed = self.consumed_samples(step)  # may include padding in the last step
        return {
            "places": consumed if self.end is None else min(consumed, self.end),  # name in checkpoints
            "examples": len(self.examples),
            "seed": self.seed,
            "length": self.length,
            "sequences_per_step": self.sequences_per_step,
            "fingerprint": self.fingerprint,
            **({"content": self.content} if self.content is not None else {}),
        }

    @cached_property
    def fingerprint(self) -> int:
        """Returns a hash of evenly spaced examples, independent of where and how the data is stored."""
        digest, last = hashlib.sha256(), len(self.examples) - 1
        for index in np.linspace(0, last, min(FINGERPRINT_EXAMPLES, last + 1)).astype(int).tolist():
            example = self.examples[index]
            digest.update(example.input_ids.tobytes() + example.labels.tobytes())
        return int.from_bytes(digest.digest()[:6])

    def resume_at(self, step: int, state: Mapping[str, Any], checkpoint: Path) -> tuple[BatchStream, tuple[str, ...]]:
        """Returns the stream that continues after `step` steps, and notes. Raises ValueError if the data differs.

        `state` comes from the checkpoint; `checkpoint` names it in errors.
        """
        now, flag = self.state(step), f"--resume_from_checkpoint {checkpoint}"
        if other := [key for key in MUST_MATCH if state[key] != now[key]]:
            was, instead = (MUST_MATCH[other[0]].format(of[other[0]]) for of in (state, now))
            raise ValueError(
                f"{flag} was trained {was}, not {instead}; resume with the same data, --packing, --share_prefixes, "
                f"--seed and --model_max_length, or start from its weights with {flag_for_weights(checkpoint)}"
            )
        comparable = _kind(self.content) == _kind(state.get("content"))
        other_content = comparable and state.get("content") != self.content
        if other_content or state.get("fingerprint", now["fingerprint"]) != now["fingerprint"]:  # old ones have none
            raise ValueError(
                f"{flag} was trained on other data with as many examples; resume with the same data in the same order "
                f"and the same --packing, or start from its weights with {flag_for_weights(checkpoint)}"
            )
        reason = "the data was read in another way" if "content" in state else "the checkpoint has no hash of it"
        compared = f"compared {FINGERPRINT_EXAMPLES} examples with the checkpoint's, not all the data: {reason}"
        notes = () if comparable or self.content is None else (compared,)
        stream = replace(self, first_step=step, first_sample=state["places"])
        before = state.get("sequences_per_step", state["places"] / max(1, step))  # older checkpoints lack it
        if before == self.sequences_per_step:
            return stream, notes
        continues = f"{self.sequences_per_step} from example {state['places']:,} on, none skipped or repeated"
        return stream, (*notes, f"resumed with another number of sequences per step: {continues}")

    def consumed_samples(self, steps: int) -> int:
        """Returns the samples read after `steps` steps of the run, including samples before a resume."""
        return self.first_sample + (steps - self.first_step) * self.sequences_per_step

    def epochs_after(self, steps: int) -> float:
        """Returns the epochs read after `steps` steps, at most the run's."""
        samples = self.consumed_samples(steps)
        return (samples if self.end is None else min(samples, self.end)) / len(self.examples)

    def example(self, sample: int) -> Example | None:
        """Returns the example of a sample; None past the end."""
        if self.end is not None and sample >= self.end:
            return None
        epoch, index = divmod(sample, len(self.examples))
        return self.examples[int(permutation(len(self.examples), self.seed, epoch)[index]) if self.shuffle else index]

    def batch(self, step: int, accumulation_index: int = 0, data_rank: int = 0) -> Batch:
        """Returns the batch of a data rank at a step and accumulation index."""
        assert 0 <= accumulation_index < self.accumulation and 0 <= data_rank < self.data_ranks
        row_of_step = (accumulation_index * self.data_ranks + data_rank) * self.batch_size
        first = self.consumed_samples(step) + row_of_step
        examples = [self.example(first + row) for row in range(self.batch_size)]
        # Documents that fit as trees may be longer.
        width = max(self.length, *(len(example.input_ids) for example in examples if example is not None), 0)
        input_ids = np.zeros((self.batch_size, width), dtype=np.int64)
        labels = np.full((self.batch_size, width), IGNORE_INDEX, dtype=np.int64)
        boundaries: tuple[int, ...] | None = (0, 1) if self.packed else None  # all padding past the end
        sizes = [0] * self.batch_size
        for row, example in enumerate(examples):
            if example is not None:
                input_ids[row, : len(example.input_ids)] = example.input_ids
                labels[row, : len(example.labels)] = example.labels
                boundaries = example.boundaries
                sizes[row] = len(example.input_ids)
        valid = int((labels != IGNORE_INDEX).sum())
        return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), valid, tuple(sizes), boundaries)
