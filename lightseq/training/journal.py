"""Journal of a run: writes the records of its steps, shows them, and ends it after too many bad steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightseq.objectives.objective import Evaluation
from lightseq.training.errors import end_for_nonfinite_losses, end_for_skipped_steps, exit_on_write_error
from lightseq.training.metrics import MetricsFile
from lightseq.training.optimization import UNKNOWN_PARAMETER
from lightseq.training.step_stats import PendingRecord
from lightseq.training.trainer import Trainer
from lightseq.utils.formatting import plural

MAX_SKIPPED_STEPS = 20  # consecutive steps with a non-finite gradient
MAX_NONFINITE_LOSSES = 10  # in a row


class Journal:
    """Reporting of steps to the metrics and the terminal. Ends a run after too many bad steps in a row.

    Every rank reads the same numbers, so that all end together. Only the rank with `metrics` writes and shows them.
    """

    def __init__(self, trainer: Trainer, metrics: MetricsFile | None) -> None:
        self._metrics, self._terminal, self._world = metrics, trainer.terminal, trainer.world
        self._output_dir = trainer.output_dir
        self._trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        self._saves = trainer.config.save_strategy != "no"
        self._scales_loss = trainer.config.fp16  # skipped steps are normal while the loss scale is still too high
        self.losses: list[float] = []
        self.eval_losses: list[float] = []
        self._skipped = self._nonfinite_losses = 0  # consecutive steps, up to the last record

    def record(self, pending: PendingRecord | None) -> None:
        """Reports a record, if there is one, after waiting for the device to finish its steps."""
        if pending is None:
            return
        record = pending.record()
        if record.loss is not None:
            self.losses.append(record.loss)
        values = {**asdict(record), **pending.objective_means()}
        self._write(values)
        if self._metrics is not None:
            self._terminal.show(values)
        if record.steps_without_target:
            which = f"{record.steps_without_target:,} of {plural(pending.steps, 'step')} up to step {record.step:,}"
            self._note(f"{which} had no target; only momentum and weight decay change the weights in such a step")
        nonfinite, lost = pending.nonfinite_parameters(), pending.nonfinite_losses()
        for step in range(record.step - pending.steps + 1, record.step + 1):
            self._nonfinite_losses = self._nonfinite_losses + 1 if step in lost else 0
            if self._nonfinite_losses >= MAX_NONFINITE_LOSSES:
                end_for_nonfinite_losses(step, self._nonfinite_losses, self._output_dir, self._world, self._terminal)
            self._skipped = self._skipped + 1 if step in nonfinite else 0
            scale_is_falling = self._scales_loss and self._skipped < MAX_SKIPPED_STEPS
            if step not in nonfinite or scale_is_falling:
                continue
            whose = (
                "a gradient"
                if nonfinite[step] == UNKNOWN_PARAMETER
                else f"the gradient of {self._trained[nonfinite[step]]}"
            )
            reason = f"{whose} is not finite"
            self._note(f"step {step}: {reason}; the step was skipped")
            if self._skipped >= MAX_SKIPPED_STEPS:
                end_for_skipped_steps(step, self._skipped, reason, self._output_dir, self._world, self._terminal)

    def record_evaluation(self, step: int, found: Evaluation, counts: Mapping[str, Any]) -> None:
        """Reports an evaluation, with the counts of early stopping if there are any."""
        self.eval_losses.append(found.loss)
        self._write({"step": step, **found.record(), **counts})
        if self._metrics is not None:
            self._terminal.show_evaluation(step, str(found))

    def _write(self, record: Mapping[str, Any]) -> None:
        """Writes a record to the metrics, on the rank with `metrics`. Ends the run if it cannot."""
        if self._metrics is not None:
            with exit_on_write_error(self._metrics.path, self._world, self._terminal, saves=self._saves):
                self._metrics.write(record)

    def _note(self, line: str) -> None:
        if self._world.is_main:
            self._terminal.note(line)
