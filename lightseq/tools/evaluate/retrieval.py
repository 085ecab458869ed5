"""Whether a model finds what a long text hides: the answer's likelihood among others, or what it decodes.

Each answer, and each token that is decoded, takes a forward pass of the whole text across the ranks that share it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightseq.data.batches import BatchStream
from lightseq.data.examples import IGNORE_INDEX, Example, Examples, window
from lightseq.modules.loss import likeliest_tokens, token_losses
from lightseq.parallelize import ReadOptions
from lightseq.tools.evaluate.needle import Ids, Search
from lightseq.training.evaluation import evaluating
from lightseq.training.loop import Trainer
from lightseq.utils.progress import progress_bar


@dataclass(frozen=True)
class Cell:
    """How well needles at one depth of texts of one length were found."""

    length: int
    depth: float
    accuracy: float
    trials: int
    log_probability: float | None = None  # of the right answer, mean
    margin: float | None = None  # of it over the likeliest wrong one, mean
    answers: tuple[str, ...] | None = None  # as decoded
    wanted: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Texts:
    """Examples that are made when they are read."""

    count: int
    make: Callable[[int], Example]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        return self.make(index)


Stream = Callable[[Examples, int], BatchStream]  # of texts of a length


def by_likelihood(trainer: Trainer, search: Search, length: int, depths: Sequence[float], stream: Stream) -> list[Cell]:
    """Found where the right answer is likelier than each wrong one."""
    trials, choices = len(search.needles), len(search.needles[0].answers)

    def make(index: int) -> Example:
        place, choice = divmod(index, choices)
        depth, trial = divmod(place, trials)
        return asking(search.text(trial, depths[depth], length), search.needles[trial].answers[choice])

    texts = stream(Texts(len(depths) * trials * choices, make), length)
    losses = sums(trainer, texts, token_losses, f"needle, {length:,} tokens")
    log_p = -losses.reshape(len(depths), trials, choices)
    margins = log_p[..., 0] - log_p[..., 1:].max(-1)
    return [
        Cell(length, depth, float((margin > 0).mean()), trials, float(right.mean()), float(margin.mean()))
        for depth, right, margin in zip(depths, log_p[..., 0], margins, strict=True)
    ]


def by_decoding(
    trainer: Trainer, search: Search, length: int, depths: Sequence[float], stream: Stream, show: Callable[..., str]
) -> list[Cell]:
    """Found where the likeliest tokens, one after the other, are those of the right answer."""
    trials, right = len(search.needles), [needle.answers[0] for needle in search.needles]
    decoded = np.zeros((len(depths) * trials, max(map(len, right))), dtype=np.int64)
    for known in range(decoded.shape[1]):

        def make(index: int, known: int = known) -> Example:
            depth, trial = divmod(index, trials)
            text = search.text(trial, depths[depth], length)
            size = len(right[trial])  # shorter answers are whole by now, and nothing more is asked
            given = decoded[index, : min(known, size)]
            return asking(np.concatenate([text, given]), np.zeros(int(known < size), np.int64))

        step = f"needle, {length:,} tokens, answer's token {known + 1}"
        decoded[:, known] = sums(trainer, stream(Texts(len(decoded), make), length), likeliest_tokens, step)
    cells = []
    for depth, rows in zip(depths, decoded.reshape(len(depths), trials, -1), strict=True):
        answers = [row[: len(ids)] for row, ids in zip(rows, right, strict=True)]
        found = [np.array_equal(a, b) for a, b in zip(answers, right, strict=True)]
        said, wanted = (tuple(show(ids.tolist()) for ids in these) for these in (answers, right))
        cells.append(Cell(length, depth, float(np.mean(found)), trials, answers=said, wanted=wanted))
    return cells


def asking(text: Ids, wanted: Ids) -> Example:
    """A text and the tokens that are asked for after it, which alone are targets."""
    ids = np.concatenate([text, wanted])
    labels = np.where(np.arange(len(ids)) < len(text), IGNORE_INDEX, ids)
    return window(ids, labels, 0, len(ids))


def sums(trainer: Trainer, stream: BatchStream, read: ReadOptions, description: str) -> NDArray[np.float64]:
    """What the model says of the targets of each text, added up: alike on every rank, whoever holds the targets."""
    out = torch.zeros(stream.steps * stream.sequences_per_step, dtype=torch.float64, device=trainer.world.device)
    with evaluating(trainer.loss_model):
        for step in progress_bar(range(stream.steps), None, trainer.world.is_main, description):
            batch = stream.batch(step, 0, trainer.inputs.data_rank)
            said = trainer.loss_model(*trainer.shard(batch), read)
            first = (step * stream.data_ranks + trainer.inputs.data_rank) * stream.batch_size
            out[first : first + stream.batch_size] = said.double().sum(-1)
    dist.all_reduce(out)
    return out[: len(stream.examples)].cpu().numpy()
