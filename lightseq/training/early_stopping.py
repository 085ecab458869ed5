"""Early stopping by the evaluation loss, with the rules of transformers' EarlyStoppingCallback."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightseq.config.train_config import TrainConfig
from lightseq.utils.formatting import plural

STOPPING: Final = "early_stopping"  # key of trainer_state.json
BEST, SINCE = "best_eval_loss", "evaluations_without_improvement"  # keys in records and checkpoints


@dataclass
class EarlyStopping:
    """Lowest evaluation loss so far, and how many evaluations in a row have not improved on it."""

    patience: int
    threshold: float
    best: float | None = None
    since: int = 0

    @property
    def stops(self) -> bool:
        """True once as many evaluations in a row as the patience allows have not improved."""
        return self.since >= self.patience

    def observe(self, loss: float) -> None:
        """Counts an evaluation. Any lower loss becomes the best; only one lower by the threshold is an improvement."""
        improves = self.best is None or self.best - loss > self.threshold
        self.since = 0 if improves and math.isfinite(loss) else self.since + 1
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best = loss

    def state(self) -> dict[str, Any]:
        """Returns the counts, for a checkpoint and for the records of evaluations."""
        return {BEST: self.best, SINCE: self.since}

    def __str__(self) -> str:
        best = "" if self.best is None else f"; the lowest is {self.best:.4f}"
        by = f" by more than {self.threshold:g}" if self.threshold else ""
        flags = f"--early_stopping_patience {self.patience}, --early_stopping_threshold {self.threshold:g}"
        return f"the evaluation loss has not improved{by} in {plural(self.since, 'evaluation')}{best} ({flags})"


def early_stopping(config: TrainConfig, trainer_state: Mapping[str, Any]) -> EarlyStopping | None:
    """Returns the early stopping of a run, with the counts of the checkpoint it resumes; None if it has none."""
    if config.early_stopping_patience is None:
        return None
    found = EarlyStopping(config.early_stopping_patience, config.early_stopping_threshold)
    saved = trainer_state.get(STOPPING)
    if isinstance(saved, dict) and isinstance(saved.get(SINCE), int):
        best = saved.get(BEST)
        found.best, found.since = float(best) if isinstance(best, int | float) else None, saved[SINCE]
    return found
