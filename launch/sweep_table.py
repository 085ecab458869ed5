"""Terminal output of a sweep: the table of cells with their times, the progress bar, and the outcome."""

import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from launch.sweep_cells import Cell, label, varying
from launch.sweep_file import Sweep
from launch.sweep_records import FAILED, Record
from lightseq.config.lengths import format_tokens
from lightseq.utils.formatting import plural

STYLES = {"done": "green", "failed": "red", "timeout": "red", "stopped": "yellow", "submitted": "cyan"}


def shown_seconds(seconds: float) -> str:
    """Formats seconds: 12 s, 3 min, 2.5 h or 480 days."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"


def shown_value(setting: str, value: str | None) -> str:
    """Formats a value for the table; lengths that are whole thousands of tokens as 4K."""
    if value is None:
        return "-"
    if setting == "model_max_length" and value.isdecimal():
        return format_tokens(int(value))
    return value or '""'


def table(cells: Sequence[Cell], records: Mapping[str, Record], times: Mapping[str, float | None]) -> Table:
    """Returns a table with one row per cell, named as `--only` takes it."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    out.add_column("#", justify="right", style="dim", no_wrap=True)
    out.add_column("cell", overflow="fold")
    out.add_column("status", no_wrap=True)
    out.add_column("time", justify="right", no_wrap=True)
    for number, cell in enumerate(cells, 1):
        record = records[cell.name]
        status = Text(record.status, style=STYLES.get(record.status, ""))
        out.add_row(str(number), Text(cell.name), status, shown_time(record, times[cell.name]))
    return out


def shown_time(record: Record, estimated: float | None) -> str:
    if record.seconds is not None and record.status == "done":
        return shown_seconds(record.seconds)
    if record.status == "done":
        return "-"
    return "?" if estimated is None else f"~{shown_seconds(estimated)}"


def total(cells: Sequence[Cell], records: Mapping[str, Record], times: Mapping[str, float | None], source: str) -> str:
    """Returns the time left to run, and the source of the estimates."""
    left = [cell for cell in cells if records[cell.name].status != "done"]
    if not left:
        spent = sum(records[cell.name].seconds or 0.0 for cell in cells)
        return f"{plural(len(cells), 'cell')}, all done, in {shown_seconds(spent)}"
    known = [seconds for cell in left if (seconds := times[cell.name]) is not None]
    unknown = len(left) - len(known)
    words = [f"{plural(len(cells), 'cell')}, {len(left)} not done"]
    if known:
        words.append(f"about {shown_seconds(sum(known))}{f' and {unknown} of unknown time' if unknown else ''}")
    else:
        words.append("time unknown")
    return ", ".join(words) + (f"; {source}" if known else "")


def fixed_line(cells: Sequence[Cell]) -> str:
    """Returns the settings that all cells share, which the table leaves out."""
    differing = {*varying(cells), "data_path"}
    same = {key: value for key, value in cells[0].settings.items() if key not in differing}
    return ", ".join(f"{label(key)}={shown_value(key, value)}" for key, value in same.items())


def failures(cells: Sequence[Cell], records: Mapping[str, Record]) -> list[str]:
    return [f"{cell.name}: {r.error}" for cell in cells if (r := records[cell.name]).status in FAILED]


class Terminal:
    """Progress bar on a terminal; in a log one line per cell."""

    def __init__(self, cells: int) -> None:
        """Takes the number of cells to run."""
        self.console = Console(file=sys.stdout, highlight=False)
        self.cells, self.number = cells, 0
        self._bar: Progress | None = None
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("sweep"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
                console=self.console,
                expand=True,
            )
            self._task = self._bar.add_task("", total=cells)
            self._bar.start()

    def show(self, running: Sequence[tuple[Cell, int]]) -> None:
        """Updates the progress bar with the running cells and their steps."""
        if self._bar is not None:
            doing = (f"step {done}/{cell.config.max_steps or '?'} of {cell.name}" for cell, done in running)
            self._bar.update(self._task, description=" | ".join(doing))

    def say(self, record: Record) -> None:
        """Prints a cell's outcome above the progress bar."""
        self.number += 1
        count = f"[{self.number:>{len(str(self.cells))}}/{self.cells}]"
        took = f" in {shown_seconds(record.seconds)}" if record.seconds is not None else ""
        job = f" as job {record.job_id}" if record.status == "submitted" else ""
        why = f": {record.error}" if record.error else ""
        line = Text(f"{count} {record.name}  ")
        line.append(record.status, style=STYLES.get(record.status, ""))
        line.append(f"{took}{job}{why}")
        self.console.print(line, soft_wrap=not self.console.is_terminal)  # a log keeps a line in one piece
        if self._bar is not None:
            self._bar.advance(self._task)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(sweep: Sweep) -> str:
    return f"sweep: {sweep.description}, into {sweep.output_dir}"
