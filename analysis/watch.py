"""Live view of a run in the terminal while it trains: `python3 -m analysis watch OUTPUT_DIR [--once]`."""

import argparse
import math
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lightseq.config.lengths import format_tokens
from lightseq.utils.files import CONFIG_BYTES, record_lines

from .drawing import (
    GIB,
    format_number,
    print_rich,
)
from .records import Record, json_object
from .runs import check_record, column, latest, median, read_json_object, section

LOOK_SECONDS = 1.0  # between updates
RECENT = 50  # steps used for the current speed
QUIET_FACTOR, QUIET_SECONDS = 5.0, 20.0  # quiet: no record for five usual intervals and 20 s
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 30
UNITS_OF_TIME = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="analysis watch",
        usage="python3 -m analysis watch OUTPUT_DIR [--once]",
        description="Shows progress and metrics of a run while it trains, until its last step or Ctrl-C. On a "
        "terminal, waits for a run to start in an existing directory.",
    )
    parser.add_argument("run", metavar="OUTPUT_DIR", type=Path, help="the --output_dir of a run")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    arguments = parser.parse_args(argv)
    console = Console(highlight=False)
    try:
        progress = read_progress(arguments.run, time.time())
        check_watchable(progress, waits=console.is_terminal and not arguments.once)
        if arguments.once:
            print_rich(frame(progress))
            return 0
        return 0 if follow(progress, console).is_done else 1
    except KeyboardInterrupt:  # the usual way to stop; the last frame stays
        return 0


# ---- state of the run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """A run at one moment."""

    directory: Path
    info: Record
    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    checkpoints: tuple[int, ...]  # their steps
    saving: int | None  # step of a checkpoint that is being written
    silent_seconds: float | None  # since the last write; None before the first
    dead_process: str | None  # the process of the run, if it no longer exists

    @property
    def total(self) -> int | None:
        total = self.info.get("total_steps")
        return total if isinstance(total, int) else None

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def is_done(self) -> bool:
        return self.total is not None and self.step >= self.total

    @property
    def is_dead(self) -> bool:
        """True if the process is gone and no other has replaced it for some seconds."""
        return self.dead_process is not None and (self.silent_seconds or 0.0) > QUIET_SECONDS

    @property
    def step_seconds(self) -> float:
        """Median of recent step times; NaN if unknown."""
        return median(column(self.steps, "step_seconds")[-RECENT:]) if self.steps else math.nan

    @property
    def logging_seconds(self) -> float:
        """Usual time between two records."""
        every = section(self.info, "config").get("logging_steps")
        return self.step_seconds * (every if isinstance(every, int) and every > 0 else 1)

    @property
    def is_quiet(self) -> bool:
        """True if no record came for much longer than usual."""
        if self.is_done or self.silent_seconds is None or not math.isfinite(self.logging_seconds):
            return False
        return self.silent_seconds > max(QUIET_SECONDS, QUIET_FACTOR * self.logging_seconds)

    def known(self, key: str) -> np.ndarray:
        values = column(self.steps, key)
        return values[np.isfinite(values)]


def read_progress(directory: Path, now: float) -> Progress:
    """Reads the state of a run. `now` is in seconds since the epoch. Raises ValueError for unreadable metrics."""
    metrics, info = directory / "metrics.jsonl", directory / "run.json"
    records = read_growing(metrics)
    steps, _ = latest([record for record in records if "eval_loss" not in record])
    evaluations, _ = latest([record for record in records if "eval_loss" in record])
    written = [path.stat().st_mtime for path in (metrics, info) if path.is_file()]
    return Progress(
        directory=directory,
        info=read_unfinished(info),
        steps=steps,
        evaluations=evaluations,
        checkpoints=checkpoints(directory, ""),
        saving=max(checkpoints(directory, r"\.partial"), default=None),
        silent_seconds=now - max(written) if written else None,
        dead_process=dead_process(directory / "lock"),  # named in lightseq's output_directory.py
    )


def read_growing(path: Path) -> list[Record]:
    """Returns the records on complete lines. Raises ValueError if there are lines but no record."""
    if not path.is_file():
        return []
    parsed = [parse(line) for line in record_lines(path)[:-1] if line.strip()]
    records = [record for record in parsed if not isinstance(record, str)]
    if parsed and not records:
        raise ValueError(f"{path} has a line that is not a record ({parsed[0]}); remove the line")
    return records


@cache  # each update reads the whole file, but parses only new lines
def parse(line: str) -> Record | str:
    """Returns the record on a line, or an error message."""
    try:
        return check_record(json_object(line))
    except ValueError as error:
        return str(error)


def read_unfinished(path: Path) -> Record:
    """Returns the object in a JSON file; empty while it is being written."""
    try:
        return read_json_object(path)
    except ValueError:
        return {}


def checkpoints(directory: Path, ending: str) -> tuple[int, ...]:
    matches = [re.fullmatch(rf"checkpoint-(\d+){ending}", path.name) for path in directory.glob("checkpoint-*")]
    return tuple(sorted(int(match[1]) for match in matches if match))


def dead_process(lock: Path) -> str | None:
    """Returns `process 12 on HOST` from a run's lock if HOST is this host and the process is gone."""
    try:
        words = re.match(r"process (\d+) on (\S+)$", "\n".join(record_lines(lock, CONFIG_BYTES)), re.MULTILINE)
    except OSError:
        return None
    is_here = words is not None and words[2] == socket.gethostname() and Path("/proc/self").exists()
    return words[0] if words is not None and is_here and not Path(f"/proc/{words[1]}").exists() else None


def check_watchable(progress: Progress, waits: bool) -> None:
    """Raises ValueError if there is no run, unless `waits` and the directory exists."""
    if not progress.directory.is_dir():
        raise ValueError(f"{progress.directory} is not a directory; give the --output_dir of a run")
    if progress.silent_seconds is None and not waits:
        raise ValueError(
            f"{progress.directory} has no run; give the --output_dir of a run, or wait on a terminal without --once"
        )


def follow(progress: Progress, console: Console) -> Progress:
    """Shows a run until its last step. If the output is not a terminal, stops when the run's process is gone."""
    with Live(frame(progress), console=console, auto_refresh=False) as live:
        while not (progress.is_done or (progress.is_dead and not console.is_terminal)):
            time.sleep(LOOK_SECONDS)
            progress = read_progress(progress.directory, time.time())
            live.update(frame(progress), refresh=True)
    if not console.is_terminal:
        console.print()  # rich leaves the last line open
    return progress


# ---- a frame --------------------------------------------------------------------------------------------------------


def frame(progress: Progress) -> RenderableType:
    """Returns the whole view, at most 80 columns wide."""
    parts: list[RenderableType] = [Text(str(progress.directory), style="bold", overflow="fold")]
    if facts := known_facts(progress):
        parts.append(pairs(facts))
    if progress.steps:
        parts += [Text(), bar(progress), Text(), numbers(progress)]
    return Group(*parts, Text(), state(progress))


def known_facts(progress: Progress) -> list[tuple[str, str]]:
    info, config = progress.info, section(progress.info, "config")
    length, ranks = config.get("model_max_length"), info.get("world_size")
    split = f" ({info.get('data_ranks')} data × {info.get('sequence_ranks')} sequence)"
    facts = {
        "model": config.get("model_name_or_path"),
        "ranks": f"{ranks}{split if info.get('data_ranks') else ''}" if ranks else None,
        "sequence": f"{format_tokens(length)} tokens" if isinstance(length, int) else None,
        "device": section(info, "hardware").get("device"),
        **{name: info.get(name) for name in ("schedule", "kernel", "transport", "remat")},
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def pairs(facts: Sequence[tuple[str, str]]) -> Table:
    """Returns a table with two names and values per row."""
    out = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 1, None, 1):
        out.add_column(ratio=ratio, overflow="fold", no_wrap=ratio is None, style="dim" if ratio is None else "")
    for i in range(0, len(facts), 2):
        out.add_row(*(Text(word) for pair in facts[i : i + 2] for word in pair))
    return out


def bar(progress: Progress) -> Table:
    step, total = progress.step, progress.total
    out = Table.grid(padding=(0, 2), expand=True)
    if total is None:
        out.add_row(f"step {step:,}", Text("total steps unknown: no run.json", style="dim"))
        return out
    left = "done" if progress.is_done else f"{duration((total - step) * progress.step_seconds)} left"
    for ratio in (None, 1, None, None):
        out.add_column(ratio=ratio, no_wrap=True)
    done = ProgressBar(total=max(total, 1), completed=step)
    out.add_row(f"step {step:,}/{total:,}", done, f"{100 * step / max(total, 1):.0f} %", left)
    return out


def numbers(progress: Progress) -> Table:
    """Returns the latest metrics, with sparklines of loss and throughput."""
    last = progress.steps[-1]

    def value(key: str, form: str, scale: float = 1.0) -> str:
        number = last.get(key)
        return "-" if number is None else format_number(form, scale * number)

    loss, speed = progress.known("loss"), progress.known("tokens_per_second")
    out = Table.grid(padding=(0, 2))
    for style in ("dim", "bold", "", "dim"):
        out.add_column(no_wrap=True, style=style, justify="right" if style == "bold" else "left")
    out.add_row("loss", value("loss", "{:.4f}"), sparkline(loss), extremes(loss, "{:.3f}"))
    out.add_row("tokens/s", value("tokens_per_second", "{:,.0f}"), sparkline(speed), extremes(speed, "{:,.0f}"))
    out.add_row("gradient norm", value("grad_norm", "{:.3g}"))
    out.add_row("learning rate", value("learning_rate", "{:.3g}"))
    out.add_row("step time", f"{format_number('{:.3g}', progress.step_seconds)} s")
    if last.get("mfu") is not None:
        out.add_row("MFU", value("mfu", "{:.1f} %", 100))
    else:
        out.add_row("model TFLOP/s", value("model_tflops_per_gpu", "{:.3g}"))
    on_gpu = last.get("peak_memory_allocated_bytes") is not None
    memory = "peak_memory_allocated_bytes" if on_gpu else "host_rss_bytes"
    out.add_row("memory", value(memory, "{:.2f} GiB", 1 / GIB), "peak per GPU" if on_gpu else "per process")
    return out


def extremes(values: np.ndarray, form: str) -> str:
    return f"{format_number(form, values.min())} to {format_number(form, values.max())}" if values.size else ""


def sparkline(values: np.ndarray, width: int = SPARKLINE_WIDTH) -> str:
    """Returns the values as a line of blocks. Each block is the mean of an equal share of the values."""
    if not values.size:
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(width, values.size))])
    low, high = means.min(), means.max()
    places = (means - low) / (high - low) if high > low else np.full(len(means), 0.5)
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int(place * len(BLOCKS)))] for place in places)


def state(progress: Progress) -> Group:
    """Returns the last evaluation and checkpoint, and the health of the run."""
    lines = []
    if progress.evaluations:
        last = progress.evaluations[-1]
        loss = format_number("{:.4f}", last["eval_loss"] or np.nan)
        lines.append(Text(f"evaluation  loss {loss} at step {last['step']}"))
    if progress.checkpoints:
        lines.append(Text(f"checkpoint  {progress.directory}/checkpoint-{progress.checkpoints[-1]}", overflow="fold"))
    if progress.saving is not None:
        lines.append(Text(f"checkpoint-{progress.saving} is being written"))
    return Group(*lines, health(progress))


def health(progress: Progress) -> Text:
    silent = duration(progress.silent_seconds or 0.0)
    if progress.is_done:
        return Text("Training is complete.", "green")
    if progress.silent_seconds is None:
        return Text(f"Waiting: {progress.directory} has no run yet.", "yellow")
    if progress.dead_process:
        line = f"The run has ended ({progress.dead_process}); continue with --resume_from_checkpoint auto."
        return Text(line, "bold red")
    if not progress.steps:
        return Text(f"Waiting {silent} for the first step, which may compile and allocate.", "yellow")
    if progress.is_quiet:
        usual = duration(progress.logging_seconds)
        line = f"Nothing logged for {silent} (usual: {usual}). The run is evaluating, saving or stuck."
        return Text(line, "bold red")
    return Text(f"Last logged {silent} ago.", "dim")


def duration(seconds: float) -> str:
    """Returns a time in at most two units, such as 3 h 20 min."""
    if not np.isfinite(seconds):
        return "unknown time"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    rest = round(seconds)
    first = next(i for i, (_, size) in enumerate(UNITS_OF_TIME) if rest >= size)
    words: list[str] = []
    for name, size in UNITS_OF_TIME[first : first + 2]:
        count, rest = divmod(rest, size)
        words += [f"{count} {name}"] if count or not words else []
    return " ".join(words)
