"""Early stopping counts evaluations as transformers' EarlyStoppingCallback does, also after a resume."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from lightseq.training.early_stopping import STOPPING, EarlyStopping, early_stopping

LOSSES = [
    [3.0, 2.0, 2.5, 1.9, 1.95, 1.9, 1.89, 1.0],
    [1.0, 0.99, 0.98, 0.97, 0.96, 0.5],
    [2.0, 2.0, 2.0, 1.0],
    [5.0, 4.0, 3.0, 2.0],
]


def stop_of_transformers(losses: list[float], patience: int, threshold: float) -> int | None:
    """Returns the evaluation after which transformers' callback stops, in the order in which its trainer calls it."""
    callback, control, state = EarlyStoppingCallback(patience, threshold), TrainerControl(), TrainerState()
    arguments: Any = SimpleNamespace(
        metric_for_best_model="eval_loss", greater_is_better=False, load_best_model_at_end=True
    )
    for number, loss in enumerate(losses):
        callback.on_evaluate(arguments, state, control, metrics={"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:
            state.best_metric = loss
        if control.should_training_stop:
            return number
    return None


def stop_here(losses: list[float], patience: int, threshold: float, resumes: bool) -> int | None:
    config: Any = SimpleNamespace(early_stopping_patience=patience, early_stopping_threshold=threshold)
    stopping = early_stopping(config, {})
    for number, loss in enumerate(losses):
        assert stopping is not None
        stopping.observe(loss)
        if stopping.stops:
            return number
        if resumes:
            stopping = early_stopping(config, {STOPPING: stopping.state()})
    return None


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.05])
@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("losses", LOSSES)
def test_a_run_stops_where_transformers_would(
    losses: list[float], patience: int, threshold: float, resumes: bool
) -> None:
    assert stop_here(losses, patience, threshold, resumes) == stop_of_transformers(losses, patience, threshold)


def test_a_loss_that_is_not_a_number_is_no_improvement() -> None:
    stopping = EarlyStopping(patience=2, threshold=0.0)
    for loss in (math.nan, 2.0, math.nan):
        stopping.observe(loss)
    assert stopping.best == 2.0 and stopping.since == 1 and not stopping.stops
    stopping.observe(2.0)
    assert stopping.stops and "has not improved in 2 evaluations; the lowest is 2.0000" in str(stopping)
    asked = replace(stopping, threshold=0.05)
    assert "has not improved by more than 0.05 in 2 eval" in str(asked) and "_threshold 0.05)" in str(asked)
