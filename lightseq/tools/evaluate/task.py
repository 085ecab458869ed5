"""Interface of evaluation tasks: inputs and results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightseq.data.batches import BatchStream
from lightseq.distributed.world import World
from lightseq.training.inputs import FoundModel, Inputs, fetch_weights
from lightseq.training.trainer import Trainer


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
