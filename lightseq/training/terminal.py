"""Terminal output of a run: settings, a progress bar or lines about steps, and a summary."""

import math
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from lightseq.utils.progress import LINE_SECONDS

BESIDE_STATUS = 15  # columns besides the two numbers of steps
MEAN_OF = 10  # logged steps, at most, that the summary averages at each end
WIDE = 120  # columns of a terminal that has room for a bar beside the numbers


class Terminal:
    """Output of rank 0, the only rank that prints: a progress bar on a terminal, a line every few seconds in a log."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self._total, self._first = total_steps, first_step
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: tuple[Progress, TaskID] | None = None
        self._last_line = 0.0
        self._first_record: tuple[int, float] | None = None  # step, and when it was shown

    def header(self, facts: Mapping[str, str], notes: Sequence[str]) -> None:
        width = max(map(len, facts))
        for name, value in facts.items():
            self._console.print(f"  {name.ljust(width)}  {value}", markup=False)
        for note in notes:
            self._console.print(f"  {note}", markup=False)
        if self._console.is_terminal and self._total:  # now, because the first step can take minutes
            self._start_bar()

    def show_evaluation(self, step: int, numbers: str) -> None:
        """Prints an evaluation's means."""
        self._console.print(f"step {step}: evaluation {numbers}", markup=False)

    def show(self, record: Mapping[str, Any]) -> None:
        """Shows the record of a step."""
        loss = "no target" if record["loss"] is None else f"loss {record['loss']:.4f}"
        share = f"{record['padding_percent']:.0f}"
        padding = "" if share == "0" else f", {share}% padding"
        update = f"lr {record['learning_rate']:.3g}  grad norm {record['grad_norm']:.3g}"
        status = f"{loss}  {update}  {record['tokens_per_second']:,.0f} tokens/s{padding}"
        if self._bar is not None:
            progress, task = self._bar
            room = self._console.width - 2 * len(str(self._total)) - BESIDE_STATUS
            progress.update(task, completed=record["step"], status=status[:room])
            return
        now, step = time.monotonic(), record["step"]
        left = self._time_left(step, now)
        if step in (self._first + 1, self._total) or now - self._last_line > LINE_SECONDS:
            self._last_line = now
            count = f"{step:>{len(str(self._total))}}/{self._total}"
            self._console.print(f"step {count}  {status}  {record['step_seconds']:.2f} s a step{left}", markup=False)

    def _time_left(self, step: int, now: float) -> str:
        """Returns the time left at the pace since the first record, so that compilation before it does not count."""
        if self._first_record is None:
            self._first_record = step, now
        first_step, begin = self._first_record
        if not first_step < step < self._total:
            return ""
        seconds = (now - begin) / (step - first_step) * (self._total - step)
        return f"  {timedelta(seconds=round(seconds))} left"

    def sample(self, step: int, text: str) -> None:
        """Prints what the model wrote, indented below the number of steps."""
        self._console.print(f"step {step}: sample\n{textwrap.indent(text, '    ', lambda _: True)}", markup=False)

    def note(self, line: str) -> None:
        """Prints a line above the bar."""
        self._console.print(line, markup=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def summary(
        self,
        checkpoint: Path | None,
        metrics: Path,
        losses: Sequence[float],
        best: Path | None,
        stopped_by: str | None = None,
        eval_losses: Sequence[float] = (),
    ) -> None:
        if stopped_by is not None:
            hint = (
                "resume with --resume_from_checkpoint True" if checkpoint else "nothing was saved (--save_strategy no)"
            )
            self._console.print(f"stopped by {stopped_by}; {hint}", markup=False)
        if losses:
            self._console.print(f"{'training ' if eval_losses else ''}loss {_change(losses)}", markup=False)
        if eval_losses:
            self._console.print(f"evaluation loss {_eval_change(eval_losses)}", markup=False)
        self._console.print(f"checkpoint  {checkpoint or 'none saved'}", markup=False)
        if best is not None:
            self._console.print(f"best        {best} (lowest evaluation loss)", markup=False)
        self._console.print(f"metrics     {metrics}", markup=False)

    def _start_bar(self) -> None:
        status = TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True))
        columns: list[ProgressColumn] = [MofNCompleteColumn(), status, TimeRemainingColumn(), TextColumn("left")]
        if self._console.width >= WIDE:
            columns = [TextColumn("train"), BarColumn(), *columns[:2], TimeElapsedColumn(), *columns[2:]]
        progress = Progress(*columns, console=self._console)
        self._bar = progress, progress.add_task("train", total=self._total, completed=self._first, status="first step")
        progress.start()


def _change(losses: Sequence[float]) -> str:
    """Describes the loss by the means of its first and last logged steps, because single steps vary."""
    if len(losses) == 1:
        return f"{losses[0]:.4f} (one logged step)"
    count = max(1, min(MEAN_OF, len(losses) // 4))
    begin, end = losses[:count], losses[-count:]
    which = f"means of the first and last {count}" if count > 1 else "the first and the last"
    noise = 2 * math.sqrt((variance(begin) + variance(end)) / count) if count > 1 else 0.0
    return f"{_moved(fmean(begin), fmean(end), noise)} ({which} of {len(losses):,} logged steps)"


def _eval_change(losses: Sequence[float]) -> str:
    if len(losses) == 1:
        return f"{losses[0]:.4f} (one evaluation)"
    return f"{_moved(losses[0], losses[-1])} (the first and the last of {len(losses):,} evaluations)"


def _moved(first: float, last: float, noise: float = 0.0) -> str:
    """Describes a change of the loss. A smaller one than `noise`, of steps on other tokens, has no direction."""
    if f"{first:.4f}" == f"{last:.4f}":
        return f"stayed at {last:.4f}"
    if abs(last - first) <= noise:
        return f"stayed within its noise, {first:.4f} and {last:.4f}"
    return f"{'fell' if last < first else 'rose'} by {abs(last - first):.4f}, from {first:.4f} to {last:.4f}"
