"""Evaluation task: needle-in-a-haystack retrieval, scored by likelihood or by greedy decoding.

Each candidate answer, and each decoded token, takes a sequence-parallel forward pass over the whole text.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import BatchStream
from lightseq.data.examples import Example, Examples, WindowExamples, window
from lightseq.data.tokenizer import Tokenizer, load_tokenizer
from lightseq.distributed.world import World
from lightseq.models.weights import has_tokenizer
from lightseq.modules.loss import likeliest_tokens, token_losses
from lightseq.modules.loss_model import HeadReader
from lightseq.tools.evaluate.needle import IdNeedles, Ids, Search, TextNeedles, make_search
from lightseq.tools.evaluate.options import CHOICES, DEPTHS, SCORES, TRIALS, Options, lengths_of
from lightseq.tools.evaluate.task import Result, Task, inputs_for
from lightseq.training.evaluation import evaluating
from lightseq.training.inputs import FoundModel, evaluation_stream, find_examples
from lightseq.training.setup_checks import require_chats
from lightseq.training.trainer import Trainer
from lightseq.utils.formatting import aligned, plural
from lightseq.utils.labels import IGNORE_INDEX
from lightseq.utils.progress import progress_bar

HAYSTACKS = 4  # the haystack is this many times the longest text, so that texts differ


@dataclass(frozen=True)
class Cell:
    """Score at one length and depth."""

    length: int
    depth: float
    accuracy: float
    trials: int
    log_probability: float | None = None  # mean over trials, of the right answer
    margin: float | None = None  # mean difference to the likeliest wrong answer
    answers: tuple[str, ...] | None = None  # decoded
    wanted: tuple[str, ...] | None = None


@dataclass(frozen=True)
class LazyExamples:
    """Examples that are created on access."""

    count: int
    make: Callable[[int], Example]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        return self.make(index)


Stream = Callable[[Examples, int], BatchStream]  # texts, length -> batches


# ---- the task -------------------------------------------------------------------------------------------------------


def needle_task(options: Options, config: TrainConfig, model: FoundModel, world: World) -> Task:
    score, trials, choices = _checked(options)
    depths, lengths = _depths(options), lengths_of(options, config)
    examples = find_examples(config.data_path, model, config, world) if config.data_path else None
    require_chats(config, [] if examples is None else [examples])
    tokenizer = _tokenizer(config, model, examples)
    needles = TextNeedles(tokenizer) if tokenizer else IdNeedles(model.config.vocab_size)
    hay = None
    if examples is not None:
        hay = haystack(examples, HAYSTACKS * max(lengths), tokenizer.special_ids if tokenizer else ())
    search = make_search(needles, hay, trials, choices or 1, config.seed, lengths, model.config.vocab_size)

    def stream(texts: Examples, length: int) -> BatchStream:
        return evaluation_stream(texts, length, config, model.dims.data_ranks)

    judge = by_likelihood if score == "likelihood" else partial(by_decoding, show=needles.show)

    def run(trainer: Trainer) -> Result:
        cells = [cell for length in lengths for cell in judge(trainer, search, length, depths, stream)]
        accuracy = sum(cell.accuracy for cell in cells) / len(cells)
        counts = {"texts": texts, "trials": trials, "choices": choices}
        summary: dict[str, Any] = {"score": score, "accuracy": accuracy, "chance": chance, **counts}
        rows = [{key: value for key, value in asdict(cell).items() if value is not None} for cell in cells]
        return Result(summary, rows, [*_table(cells), f"found {accuracy:.1%} of {searched}"])

    # Greedy decoding chooses among all tokens, so its chance is near zero.
    chance = 1 / choices if choices else None
    texts = trials * len(depths) * len(lengths)
    searched = f"{plural(texts, 'text')} of {_span(lengths)} tokens, {trials} per length and depth"
    if choices:
        searched += f"; chance finds {chance:.1%} ({choices} answers)"
    source = "synthetic" if examples is None else config.data_path
    repeats = ", repeated" if hay is not None and len(hay) < max(lengths) else ""
    header = {
        "haystack": f"{source}, {len(search.hay):,} tokens{repeats}",
        "needle": f"text, tokenizer {tokenizer.name}" if tokenizer else "token ids, no tokenizer",
        "score": f"{score}, {trials} texts per length and depth",
    }
    no_texts = stream(LazyExamples(0, lambda index: _example(search.begin, search.begin)), max(lengths))
    return Task(inputs_for(model, no_texts, world), header, run)


def _checked(options: Options) -> tuple[str, int, int | None]:
    """Returns score, trials and choices (None for greedy decoding). Raises ValueError for invalid flags."""
    score, trials = options.score or "likelihood", TRIALS if options.trials is None else options.trials
    choices = CHOICES if options.choices is None else options.choices
    if score not in SCORES:
        raise ValueError(f"--score {score!r} is unknown; choose from {', '.join(SCORES)}")
    if score == "greedy" and options.choices is not None:
        raise ValueError("--choices belongs to --score likelihood, but the score is greedy; leave it out")
    if trials < 1 or choices < 2:
        raise ValueError(f"--trials {trials} --choices {choices}: give at least 1 trial and 2 choices")
    return score, trials, choices if score == "likelihood" else None


def _depths(options: Options) -> list[float]:
    text = options.depths or DEPTHS
    try:
        depths = sorted({float(word) for word in text.split(",")})
    except ValueError:
        depths = [-1.0]
    if not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"--depths {text}: give numbers from 0 to 1, such as {DEPTHS}")
    return depths


def _tokenizer(config: TrainConfig, model: FoundModel, examples: Examples | None) -> Tokenizer | None:
    """Loads --tokenizer, or else the tokenizer of the haystack's tokens, or else the model's, if it has one."""
    of_data = examples.source.meta.get("tokenizer") if isinstance(examples, WindowExamples) else None
    of_model = str(model.weights) if has_tokenizer(model.weights) else None
    name = config.tokenizer or of_data or of_model
    return load_tokenizer(name) if name else None


def haystack(examples: Examples, count: int, special_ids: Sequence[int]) -> Ids:
    """Returns the first `count` tokens of the data, or all if there are fewer, without `special_ids`."""
    parts, found = [], 0
    for i in range(len(examples)):
        ids = examples[i].input_ids
        parts.append(ids[~np.isin(ids, special_ids)])
        found += len(parts[-1])
        if found >= count:
            break
    return np.concatenate(parts)[:count]


def _span(lengths: Sequence[int]) -> str:
    return f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"


def _table(cells: Sequence[Cell]) -> list[str]:
    """Returns the lines of a table of accuracy by depth and length."""
    lengths, depths = ({getattr(cell, key): None for cell in cells} for key in ("length", "depth"))
    scores = {(cell.depth, cell.length): f"{cell.accuracy:.2f}" for cell in cells}
    rows = [["depth", *(f"{length:,}" for length in lengths)]]
    rows += [[f"{depth:.0%}", *(scores[depth, length] for length in lengths)] for depth in depths]
    return aligned(rows)


# ---- scores ---------------------------------------------------------------------------------------------------------


def by_likelihood(trainer: Trainer, search: Search, length: int, depths: Sequence[float], stream: Stream) -> list[Cell]:
    """Scores needles by likelihood: found if the right answer is likelier than every wrong one."""
    trials, choices = len(search.needles), len(search.needles[0].answers)

    def make(index: int) -> Example:
        text, choice = divmod(index, choices)
        depth, trial = divmod(text, trials)
        return _example(search.text(trial, depths[depth], length), search.needles[trial].answers[choice])

    texts = stream(LazyExamples(len(depths) * trials * choices, make), length)
    losses = _sums(trainer, texts, token_losses, f"needle, {length:,} tokens")
    log_p = -losses.reshape(len(depths), trials, choices)
    margins = log_p[..., 0] - log_p[..., 1:].max(-1)
    return [
        Cell(length, depth, float((margin > 0).mean()), trials, float(right.mean()), float(margin.mean()))
        for depth, right, margin in zip(depths, log_p[..., 0], margins, strict=True)
    ]


def by_decoding(
    trainer: Trainer, search: Search, length: int, depths: Sequence[float], stream: Stream, show: Callable[..., str]
) -> list[Cell]:
    """Scores needles by greedy decoding: found if the decoded tokens equal the right answer."""
    trials, right = len(search.needles), [needle.answers[0] for needle in search.needles]
    decoded = np.zeros((len(depths) * trials, max(map(len, right))), dtype=np.int64)
    for known in range(decoded.shape[1]):

        def make(index: int, known: int = known) -> Example:
            depth, trial = divmod(index, trials)
            text = search.text(trial, depths[depth], length)
            size = len(right[trial])  # a shorter answer may be complete already
            given = decoded[index, : min(known, size)]
            return _example(np.concatenate([text, given]), np.zeros(int(known < size), np.int64))

        step = f"needle, {length:,} tokens, answer's token {known + 1}"
        decoded[:, known] = _sums(trainer, stream(LazyExamples(len(decoded), make), length), likeliest_tokens, step)
    cells = []
    for depth, rows in zip(depths, decoded.reshape(len(depths), trials, -1), strict=True):
        answers = [row[: len(ids)] for row, ids in zip(rows, right, strict=True)]
        found = [np.array_equal(a, b) for a, b in zip(answers, right, strict=True)]
        shown, wanted = (tuple(show(ids.tolist()) for ids in these) for these in (answers, right))
        cells.append(Cell(length, depth, float(np.mean(found)), trials, answers=shown, wanted=wanted))
    return cells


def _example(text: Ids, wanted: Ids) -> Example:
    """Returns an example of a text and the tokens to predict, which are the only targets."""
    ids = np.concatenate([text, wanted])
    labels = np.where(np.arange(len(ids)) < len(text), IGNORE_INDEX, ids)
    return window(ids, labels, 0, len(ids))


def _sums(trainer: Trainer, stream: BatchStream, read: HeadReader, description: str) -> NDArray[np.float64]:
    """Sums the results of `read` over the targets of each text. The result is the same on every rank."""
    out = torch.zeros(stream.steps * stream.sequences_per_step, dtype=torch.float64, device=trainer.world.device)
    with evaluating(trainer.loss_model):
        for step in progress_bar(range(stream.steps), None, trainer.world.is_main, description):
            batch = stream.batch(step, 0, trainer.inputs.dims.data_rank)
            values = trainer.loss_model(*trainer.shard(batch), read)
            first = (step * stream.data_ranks + trainer.inputs.dims.data_rank) * stream.batch_size
            out[first : first + stream.batch_size] = values.double().sum(-1)
    dist.all_reduce(out)
    return out[: len(stream.examples)].cpu().numpy()
