"""What a run says of its steps, in its metrics and on the terminal; it ends one that learns from none any more."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightseq.data.batches import PADDING_WARNING_SHARE
from lightseq.distributed.environment import SHUTDOWN_TIMEOUT
from lightseq.distributed.mesh import World
from lightseq.training.errors import end_for_skipped_steps, explained_writing
from lightseq.training.metrics import MetricsFile, StepRecord
from lightseq.training.optimization import UNNAMED
from lightseq.training.step_stats import Closed
from lightseq.training.terminal import Terminal
from lightseq.utils.formatting import plural

MOST_SKIPPED = 20  # steps in a row without a finite gradient
TELLING_STEPS = 10  # whose padding is taken for that of the run


class Journal:
    """Every rank reads the same figures, for they end together; the one with `metrics` writes and shows them.

    `trained` are the names of the parameters in the order in which a window numbers them; `scaled` whether the loss is,
    by a factor that is halved after each step that it made overflow. `patience_seconds` is how long a launcher waits
    for the ranks to save and end, once it has passed on a signal. `names_packing` where a run that ends with
    `last_step` could have its documents packed.
    """

    def __init__(
        self,
        metrics: MetricsFile | None,
        terminal: Terminal,
        world: World,
        output_dir: Path,
        trained: Sequence[str],
        scaled: bool,
        last_step: int,
        names_packing: bool,
        patience_seconds: float | None = None,
    ) -> None:
        self._metrics, self._terminal, self._world, self._output_dir = metrics, terminal, world, output_dir
        self._trained, self._scaled, self._patience_seconds = trained, scaled, patience_seconds
        self._last_step, self._names_packing = last_step, names_packing
        self.losses: list[float] = []
        self._skipped = 0  # steps in a row, up to the last record
        self._steps = self._positions = 0  # recorded
        self._padding = 0.0  # of the positions

    def record(self, closed: Closed | None) -> None:
        """Waits for the device to have finished a window, if there is one, and says what came of it."""
        if closed is None:
            return
        record = closed.record()
        if record.loss is not None:
            self.losses.append(record.loss)
        self.log(asdict(record))
        self._compare_with_patience(record.step_seconds)
        if record.steps_without_target:
            which = f"{record.steps_without_target:,} of {plural(closed.steps, 'step')} up to step {record.step:,}"
            self._note(f"{which} had no target; in such a step only momentum and weight decay move the weights")
        self._note_padding(record, closed.steps)
        sick = closed.sick_parameters()
        for step in range(record.step - closed.steps + 1, record.step + 1):
            self._skipped = self._skipped + 1 if step in sick else 0
            too_high_a_scale = self._scaled and self._skipped < MOST_SKIPPED
            if step not in sick or too_high_a_scale:
                continue
            whose = "a gradient" if sick[step] == UNNAMED else f"the gradient of {self._trained[sick[step]]}"
            what = f"{whose} is not finite"
            self._note(f"step {step}: {what}; the step was skipped")
            if self._skipped >= MOST_SKIPPED:
                end_for_skipped_steps(step, self._skipped, what, self._output_dir, self._world, self._terminal)

    def _note_padding(self, record: StepRecord, steps: int) -> None:
        """Says once, when enough steps tell it or the run ends, that much of it is padding."""
        self._steps += steps
        self._positions += steps * record.tokens
        self._padding += steps * record.tokens * record.padding_percent / 100
        tells = self._steps >= TELLING_STEPS or record.step == self._last_step
        if self._names_packing and tells and self._padding >= PADDING_WARNING_SHARE * self._positions:
            self._names_packing = False
            share = f"{100 * self._padding / self._positions:.0f}% of the positions so far are padding"
            self._note(f"{share}; --packing best_fit, with a batch size of 1, fills sequences with whole documents")

    def log(self, record: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            with explained_writing(self._metrics.path, self._world, self._terminal):
                self._metrics.write(record)
            self._terminal.show(record)

    def _compare_with_patience(self, step_seconds: float) -> None:
        """Warns once of steps that take longer than a launcher waits for their end."""
        patience = self._patience_seconds
        if patience is None or step_seconds <= patience:
            return
        self._patience_seconds = None
        self._note(
            f"warning: a step takes {step_seconds:.0f} s, and torch's launcher kills the ranks {patience:.0f} s after "
            f"SIGTERM; before starting it, export a higher {SHUTDOWN_TIMEOUT}"
        )

    def _note(self, line: str) -> None:
        if self._world.is_main:
            self._terminal.note(line)
