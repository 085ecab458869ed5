"""Evaluation task: needle-in-a-haystack retrieval.

A needle is found if the right answer is likelier than every wrong one. Each answer takes a sequence-parallel forward
pass over the whole text. Greedy decoding finds it if every token of the right answer is the likeliest one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightseq.config.train_config import TrainConfig
from lightseq.data.examples import Example, Examples, WindowExamples, window
from lightseq.data.load_tokenizer import has_tokenizer, load_tokenizer
from lightseq.data.tokenizer import Tokenizer
from lightseq.distributed.world import World
from lightseq.models.decoder import placeholder_ids, text_config
from lightseq.objectives.objective import evaluating
from lightseq.parts.loss import losses_and_hits
from lightseq.tools.evaluate.needle import IdNeedles, Ids, Search, TextNeedles, make_search
from lightseq.tools.evaluate.options import CHOICES, DEPTHS, TRIALS, Options, lengths_of
from lightseq.tools.evaluate.tasks import Result, Task, inputs_for
from lightseq.training.find_model import FoundModel
from lightseq.training.run_data import evaluation_stream, find_examples
from lightseq.training.setup_checks import require_chats
from lightseq.training.trainer import Trainer
from lightseq.utils.formatting import aligned, plural
from lightseq.utils.progress import progress_bar
from lightseq.utils.tensors import IGNORE_INDEX

HAYSTACKS = 4  # the haystack is this many times the longest text, so that texts differ


Row = dict[str, Any]  # score at one length and depth, for evaluation.jsonl


@dataclass(frozen=True)
class LazyExamples:
    """Examples that are made on access."""

    count: int
    make: Callable[[int], Example]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        return self.make(index)


def needle_task(options: Options, config: TrainConfig, model: FoundModel, world: World) -> Task:
    trials = TRIALS if options.trials is None else options.trials
    choices = CHOICES if options.choices is None else options.choices
    if trials < 1 or choices < 2:
        raise ValueError(f"--trials {trials} --choices {choices}: give at least 1 trial and 2 choices")
    depths, lengths = _depths(options), lengths_of(options, config)
    examples = find_examples(config.data_path, model, config, world) if config.data_path else None
    require_chats(config, [] if examples is None else [examples])
    tokenizer, vocab_size = _tokenizer(config, model, examples), text_config(model.config).vocab_size
    hay = None
    if examples is not None:
        hay = haystack(examples, HAYSTACKS * max(lengths), tokenizer.special_ids if tokenizer else ())
    source = TextNeedles(tokenizer) if tokenizer else IdNeedles(vocab_size, tuple(placeholder_ids(model.config)))
    search = make_search(source, hay, trials, choices, config.seed, lengths, vocab_size)
    chance, texts = 1 / choices, trials * len(depths) * len(lengths)

    def run(trainer: Trainer) -> Result:
        rows = [row for length in lengths for row in _judge(trainer, search, length, depths)]
        accuracy, greedy = (float(np.mean([row[key] for row in rows])) for key in ("accuracy", "greedy_accuracy"))
        counts = {"texts": texts, "trials": trials, "choices": choices}
        summary = {"score": "likelihood", "accuracy": accuracy, "greedy_accuracy": greedy, "chance": chance, **counts}
        span = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
        searched = f"{plural(texts, 'text')} of {span} tokens, {trials} per length and depth"
        others = f"chance finds {chance:.1%} ({choices} answers), greedy decoding {greedy:.1%}"
        return Result(summary, rows, [*_table(rows), f"found {accuracy:.1%} of {searched}; {others}"])

    repeats = ", repeated" if hay is not None and len(hay) < max(lengths) else ""
    header = {
        "haystack": f"{config.data_path or 'synthetic'}, {len(search.hay):,} tokens{repeats}",
        "needle": f"text, tokenizer {tokenizer.name}" if tokenizer else "token ids, no tokenizer",
        "score": f"likelihood, {trials} texts per length and depth",
    }
    no_texts = LazyExamples(0, lambda index: _example(source.begin, source.begin))
    stream = evaluation_stream(no_texts, max(lengths), config, model.dims.data_ranks)
    return Task(inputs_for(model, stream, world), header, run)


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
    """Loads the tokenizer of --tokenizer, of the haystack's tokens or of the model, in this order; None without one."""
    of_data = examples.source.meta.get("tokenizer") if isinstance(examples, WindowExamples) else None
    of_model = str(model.weights) if model.weights and has_tokenizer(str(model.weights)) else None
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


def _table(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of a table of accuracy by depth and length."""
    lengths, depths = (list(dict.fromkeys(row[key] for row in rows)) for key in ("length", "depth"))
    scores = {(row["depth"], row["length"]): f"{row['accuracy']:.2f}" for row in rows}
    cells = [[f"{depth:.0%}", *(scores[depth, length] for length in lengths)] for depth in depths]
    return aligned([["depth", *(f"{length:,}" for length in lengths)], *cells])


def _judge(trainer: Trainer, search: Search, length: int, depths: Sequence[float]) -> list[Row]:
    """Returns a row for every depth."""
    trials, choices = len(search.needles), len(search.needles[0].answers)

    def make(index: int) -> Example:
        text, choice = divmod(index, choices)
        depth, trial = divmod(text, trials)
        return _example(search.text(trial, depths[depth], length), search.needles[trial].answers[choice])

    texts = LazyExamples(len(depths) * trials * choices, make)
    losses, hits = _sums(trainer, texts, length).reshape(2, len(depths), trials, choices)
    log_p, is_greedy = -losses, hits[..., 0] == [len(needle.answers[0]) for needle in search.needles]
    margins = log_p[..., 0] - log_p[..., 1:].max(-1)
    return [
        {
            "length": length,
            "depth": depth,
            "accuracy": float((margin > 0).mean()),
            "greedy_accuracy": float(greedy.mean()),
            "trials": trials,
            "log_probability": float(right.mean()),
            "margin": float(margin.mean()),
        }
        for depth, right, margin, greedy in zip(depths, log_p[..., 0], margins, is_greedy, strict=True)
    ]


def _example(text: Ids, answer: Ids) -> Example:
    """Returns an example of a text and its answer, whose tokens are the only targets."""
    ids = np.concatenate([text, answer])
    labels = np.where(np.arange(len(ids)) < len(text), IGNORE_INDEX, ids)
    return window(ids, labels, 0, len(ids))


def _sums(trainer: Trainer, texts: LazyExamples, length: int) -> NDArray[np.float64]:
    """Returns the loss and the number of likeliest tokens of each text's targets, the same on every rank."""
    dims = trainer.inputs.dims
    stream = evaluation_stream(texts, length, trainer.config, dims.data_ranks)
    out = torch.zeros(2, stream.steps * stream.sequences_per_step, dtype=torch.float64, device=trainer.world.device)
    with evaluating(trainer.models.trained):
        for step in progress_bar(range(stream.steps), None, trainer.world.is_main, f"needle, {length:,} tokens"):
            values = trainer.models.trained(*trainer.shard(stream.batch(step, 0, dims.data_rank)), losses_and_hits)
            first = (step * stream.data_ranks + dims.data_rank) * stream.batch_size
            out[:, first : first + stream.batch_size] = values.double().sum(-1)
    dist.all_reduce(out)
    return out[:, : len(texts)].cpu().numpy()
