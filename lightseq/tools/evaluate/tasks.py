"""Interface of evaluation tasks, and the task of loss by position in the sequence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import BatchStream
from lightseq.data.open_examples import require_target
from lightseq.distributed.world import World
from lightseq.objectives.next_token import POWERS, Bin, Perplexity, bin_starts, measure, perplexity
from lightseq.tools.evaluate.options import Options
from lightseq.training.find_model import FoundModel, fetch_weights
from lightseq.training.inputs import Inputs
from lightseq.training.run_data import evaluation_stream, find_examples
from lightseq.training.setup_checks import require_chats
from lightseq.training.trainer import Trainer
from lightseq.utils.formatting import aligned, four_significant_digits, plural


@dataclass(frozen=True)
class Result:
    """Result of a task: a summary, a row per bin or cell, and the lines to print."""

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[str]


@dataclass(frozen=True)
class Task:
    """Evaluation with checked inputs. `run` evaluates a trainer's model."""

    inputs: Inputs
    header: Mapping[str, str]
    run: Callable[[Trainer], Result]


def inputs_for(model: FoundModel, stream: BatchStream, world: World) -> Inputs:
    """Returns the inputs of a trainer that takes no steps."""
    return Inputs(
        model_config=model.config,
        weights=fetch_weights(model, world),
        stream=stream,
        eval_stream=stream,
        total_steps=0,
        dims=model.dims,
        deepspeed=None,
        notes=stream.examples.notes + model.warnings,
    )


def loss_task(options: Options, config: TrainConfig, model: FoundModel, world: World) -> Task:
    starts = bin_starts(options.bins or POWERS, config.model_max_length)
    examples = find_examples(config.data_path, model, config, world, evaluates=True)
    require_target(examples, config.data_path)
    require_chats(config, [examples])
    stream = evaluation_stream(examples, config.model_max_length, config, model.dims.data_ranks)

    def run(trainer: Trainer) -> Result:
        found = measure(trainer.models, trainer.evaluation_shards(shows_progress=True), starts, stream.length)
        summary = {"loss": found.loss, "perplexity": found.value, "valid_tokens": found.valid_tokens}
        rows = [{**asdict(b), "perplexity": perplexity(b.loss)} for b in found.bins]
        return Result({**summary, "sequences": len(examples)}, rows, _table(found))

    data = f"{config.data_path}, {plural(len(examples), 'example')}"
    return Task(inputs_for(model, stream, world), {"data": data, "sequence": f"{stream.length:,} tokens"}, run)


def _table(found: Perplexity) -> list[str]:
    rows = [["positions", "tokens", "loss", "perplexity"]]
    rows += [[_positions(b), f"{b.valid_tokens:,}", *_numbers(b.loss)] for b in found.bins if b.valid_tokens]
    return aligned([*rows, ["all", f"{found.valid_tokens:,}", *_numbers(found.loss)]])


def _positions(b: Bin) -> str:
    return f"{b.first:,}" if b.first == b.last else f"{b.first:,} to {b.last:,}"


def _numbers(loss: float | None) -> list[str]:
    value = perplexity(loss)
    return ["-" if loss is None else f"{loss:.4f}", "-" if value is None else four_significant_digits(value)]
