"""What can be evaluated: the loss by position, and needles in haystacks. What each reads, does, and says in the end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from lightseq.config.lengths import tokens
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import BatchStream, require_target
from lightseq.data.examples import Examples, WindowExamples
from lightseq.data.tokenizer import Tokenizer, load_tokenizer
from lightseq.distributed.mesh import World
from lightseq.models.weights import has_tokenizer
from lightseq.tools.evaluate.needle import IdNeedles, Ids, TextNeedles, make_search
from lightseq.tools.evaluate.retrieval import Cell, Texts, asking, by_decoding, by_likelihood
from lightseq.training.evaluation import POWERS, Bin, Perplexity, bin_starts, perplexity
from lightseq.training.loop import Trainer
from lightseq.training.setup import FoundModel, Inputs, evaluation_stream, fetch, find_examples
from lightseq.utils.formatting import four_significant_digits, plural

DEPTHS, TRIALS, CHOICES = "0,0.25,0.5,0.75,1", 4, 8
HAYSTACKS = 4  # times the longest text is read, so that texts differ
NOWHERE: Final = "nowhere"  # where a needle is hidden in a haystack that is made up
SCORES: Final = ("likelihood", "greedy")
OF_TASK: Final[Mapping[str, tuple[str, ...]]] = {
    "loss": ("bins",),
    "needle": ("score", "depths", "lengths", "trials", "choices"),
}


@dataclass(frozen=True)
class Asked:
    """What the flags of this command ask for; None where one was not given."""

    task: str
    bins: str | None
    score: str | None
    depths: str | None
    lengths: str | None
    trials: int | None
    choices: int | None


@dataclass(frozen=True)
class Outcome:
    """What was found: a summary, an object a bin or cell, and what a person reads."""

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[str]


@dataclass(frozen=True)
class Task:
    """An evaluation whose inputs were found and checked; `run` does it on a model."""

    inputs: Inputs
    about: Mapping[str, str]  # for the header
    run: Callable[[Trainer], Outcome]


def inputs_of(model: FoundModel, stream: BatchStream, world: World) -> Inputs:
    """Those of a run without a step."""
    data_rank = world.rank // model.sequence_size
    notes = stream.examples.notes + model.warnings
    return Inputs(
        model.config, fetch(model, world), stream, stream, 0, model.sequence_size, data_rank, None, None, notes
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns flush right, the first one flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(cells)).rstrip()
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]


# ---- loss by position -----------------------------------------------------------------------------------------------


def loss_task(asked: Asked, config: TrainConfig, model: FoundModel, world: World) -> Task:
    starts = bin_starts(asked.bins or POWERS, config.model_max_length)
    examples = find_examples(config.data_path, model, config, world)
    require_target(examples, config.data_path)
    stream = evaluation_stream(examples, config.model_max_length, config, world.size // model.sequence_size)

    def run(trainer: Trainer) -> Outcome:
        found = trainer.evaluate(starts, shows_progress=True)
        summary = {"loss": found.loss, "perplexity": found.value, "valid_tokens": found.valid_tokens}
        rows = [{**asdict(b), "perplexity": perplexity(b.loss)} for b in found.bins]
        return Outcome({**summary, "sequences": len(examples)}, rows, loss_lines(found))

    about = {"data": f"{config.data_path}, {plural(len(examples), 'example')}", "sequence": f"{stream.length:,} tokens"}
    return Task(inputs_of(model, stream, world), about, run)


def loss_lines(found: Perplexity) -> list[str]:
    """A table by position, and the whole."""
    rows = [["positions", "tokens", "loss", "perplexity"]]
    for b in found.bins:
        rows.append([span(b), f"{b.valid_tokens:,}", *numbers(b.loss)])
    rows.append(["all", f"{found.valid_tokens:,}", *numbers(found.loss)])
    return aligned(rows)


def span(b: Bin) -> str:
    return f"{b.first:,}" if b.first == b.last else f"{b.first:,} to {b.last:,}"


def numbers(loss: float | None) -> list[str]:
    value = perplexity(loss)
    return ["-" if loss is None else f"{loss:.4f}", "-" if value is None else four_significant_digits(value)]


# ---- needles ---------------------------------------------------------------------------------------------------------


def lengths_of(asked: Asked, config: TrainConfig) -> list[int]:
    if asked.lengths is None:
        return sorted({max(1, config.model_max_length // part) for part in (4, 2, 1)})
    return sorted({tokens(word, "--lengths") for word in asked.lengths.split(",")})


def depths_of(asked: Asked) -> list[float]:
    """Raises ValueError for anything but shares of a text."""
    text = asked.depths or DEPTHS
    try:
        depths = sorted({float(word) for word in text.split(",")})
    except ValueError:
        depths = [-1.0]
    if not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"--depths {text}: give shares of a text from 0 to 1, as {DEPTHS}")
    return depths


def needle_task(asked: Asked, config: TrainConfig, model: FoundModel, world: World) -> Task:
    score = asked.score or "likelihood"
    trials, choices = (
        (TRIALS if asked.trials is None else asked.trials),
        (CHOICES if asked.choices is None else asked.choices),
    )
    if score not in SCORES:
        raise ValueError(f"--score {score!r} is unknown; choose from {', '.join(SCORES)}")
    if score == "greedy" and asked.choices is not None:
        raise ValueError("--choices belongs to --score likelihood, and the score is greedy; leave it out")
    if trials < 1 or choices < 2:
        raise ValueError(f"--trials {trials} --choices {choices}: give at least 1 trial, and 2 choices")
    depths, lengths, hay = depths_of(asked), lengths_of(asked, config), None
    examples = None if config.data_path == NOWHERE else find_examples(config.data_path, model, config, world)
    tokenizer = tokenizer_of(config, model, examples)
    needles = TextNeedles(tokenizer) if tokenizer else IdNeedles(model.config.vocab_size)
    if examples is not None:
        hay = haystack(examples, HAYSTACKS * max(lengths), tokenizer.special_ids if tokenizer else ())
    choices = choices if score == "likelihood" else 1
    search = make_search(needles, hay, trials, choices, config.seed, lengths, model.config.vocab_size)

    def stream(texts: Examples, length: int) -> BatchStream:
        return evaluation_stream(texts, length, config, world.size // model.sequence_size)

    def run(trainer: Trainer) -> Outcome:
        cells: list[Cell] = []
        for length in lengths:
            if score == "likelihood":
                cells += by_likelihood(trainer, search, length, depths, stream)
            else:
                cells += by_decoding(trainer, search, length, depths, stream, needles.show)
        summary: dict[str, Any] = {"score": score, "accuracy": sum(cell.accuracy for cell in cells) / len(cells)}
        summary |= {"trials": trials, "choices": choices if score == "likelihood" else None}
        rows = [{key: value for key, value in asdict(cell).items() if value is not None} for cell in cells]
        return Outcome(summary, rows, needle_lines(cells))

    source = "made up" if examples is None else config.data_path
    repeats = hay is not None and len(hay) < max(lengths)
    about = {
        "haystack": f"{source}, {len(search.hay):,} tokens" + (", again and again" if repeats else ""),
        "needle": f"text through tokenizer {tokenizer.name}" if tokenizer else "ids, for want of a tokenizer",
        "score": f"{score}, {trials} texts for each length and depth",
    }
    nothing = stream(Texts(0, lambda index: asking(search.begin, search.begin)), max(lengths))
    return Task(inputs_of(model, nothing, world), about, run)


def tokenizer_of(config: TrainConfig, model: FoundModel, examples: Examples | None) -> Tokenizer | None:
    """The one that was asked for, else that of the haystack's tokens, else the model's, if it has one."""
    of_data = examples.source.meta.get("tokenizer") if isinstance(examples, WindowExamples) else None
    of_model = str(model.weights) if has_tokenizer(model.weights) else None
    name = config.tokenizer or of_data or of_model
    return load_tokenizer(name) if name else None


def haystack(examples: Examples, count: int, special_ids: Sequence[int]) -> Ids:
    """The first `count` tokens of the data, or all there are, less those that end or begin a document."""
    parts, found = [], 0
    for i in range(len(examples)):
        ids = examples[i].input_ids
        parts.append(ids[~np.isin(ids, special_ids)])
        found += len(parts[-1])
        if found >= count:
            break
    return np.concatenate(parts)[:count]


def needle_lines(cells: Sequence[Cell]) -> list[str]:
    """A table of depth by length, and the mean."""
    lengths, depths = ({getattr(cell, key): None for cell in cells} for key in ("length", "depth"))
    scores = {(cell.depth, cell.length): f"{cell.accuracy:.2f}" for cell in cells}
    rows = [["depth", *(f"{length:,}" for length in lengths)]]
    rows += [[f"{depth:.0%}", *(scores[depth, length] for length in lengths)] for depth in depths]
    return [*aligned(rows), f"found {sum(cell.accuracy for cell in cells) / len(cells):.1%}"]


TASKS: Final[Mapping[str, Callable[[Asked, TrainConfig, FoundModel, World], Task]]] = {
    "loss": loss_task,
    "needle": needle_task,
}
