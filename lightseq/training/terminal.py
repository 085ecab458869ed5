"""Terminal output of a run: settings, a progress bar with loss and tokens/s, and a summary."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lightseq.utils.formatting import four_significant_digits
from lightseq.utils.progress import LINE_SECONDS


class Terminal:
    """Output of rank 0, the only rank that prints: a progress bar on a terminal, a line every few seconds in a log."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self._total, self._first = total_steps, first_step
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: tuple[Progress, TaskID] | None = None
        self._last_line = 0.0

    def header(self, facts: Mapping[str, str], notes: Sequence[str]) -> None:
        width = max(map(len, facts))
        for name, value in facts.items():
            self._console.print(f"  {name.ljust(width)}  {value}", markup=False)
        for note in notes:
            self._console.print(f"  {note}", markup=False)
        if self._console.is_terminal and self._total:  # now, because the first step can take minutes
            self._start_bar()

    def show(self, record: Mapping[str, Any]) -> None:
        if "eval_loss" in record:
            perplexity = record["eval_perplexity"]
            shown = "too large for a float" if perplexity is None else four_significant_digits(perplexity)
            numbers = f"loss {record['eval_loss']:.4f}, perplexity {shown}, accuracy {record['eval_accuracy']:.1%}"
            self._console.print(f"step {record['step']}: evaluation {numbers}", markup=False)
            return
        loss = "no target" if record["loss"] is None else f"loss {record['loss']:.4f}"
        share = f"{record['padding_percent']:.0f}"
        padding = "" if share == "0" else f", {share}% padding"
        status = f"{loss}  {record['tokens_per_second']:,.0f} tokens/s{padding}"
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=record["step"], status=status)
            return
        now, step = time.monotonic(), record["step"]
        if step in (self._first + 1, self._total) or now - self._last_line > LINE_SECONDS:
            self._last_line = now
            seconds = record["step_seconds"]
            self._console.print(f"step {step:>{len(str(self._total))}}/{self._total}  {status}  {seconds:.2f} s a step")

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
    ) -> None:
        if stopped_by is not None:
            hint = (
                "resume with --resume_from_checkpoint True" if checkpoint else "nothing was saved (--save_strategy no)"
            )
            self._console.print(f"stopped by {stopped_by}; {hint}", markup=False)
        if losses:
            first, last = losses[0], losses[-1]
            change = "fell" if last < first else "rose"
            moved = f"{change} by {abs(last - first):.4f}, from {first:.4f} to {last:.4f}"
            same = f"{first:.4f}" == f"{last:.4f}"
            stayed = f"stayed at {last:.4f}" if len(losses) > 1 else f"{last:.4f} (one logged step)"
            self._console.print(f"loss {stayed if same else moved}", markup=False)
        self._console.print(f"checkpoint  {checkpoint or 'none saved'}", markup=False)
        if best is not None:
            self._console.print(f"best        {best} (lowest evaluation loss)", markup=False)
        self._console.print(f"metrics     {metrics}", markup=False)

    def _start_bar(self) -> None:
        progress = Progress(
            TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=self._console,
        )  # fmt: skip
        self._bar = progress, progress.add_task("train", total=self._total, completed=self._first, status="first step")
        progress.start()
