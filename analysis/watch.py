"""Shows a run in the terminal while it trains: `python3 -m analysis watch OUTPUT_DIR [--once]`."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .flags import section
from .points import shown as shown_length
from .progress import Follower, Progress, read_progress
from .summary import GIB, shown

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 30
MINUTE, HOUR, DAY = 60, 3600, 86400


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis watch",
        usage="python3 -m analysis watch OUTPUT_DIR [--once]",
        description="Follows a run while it trains: progress, the last numbers, and how they went. Ends with its last "
        "step or with Ctrl-C. On a terminal it waits for the run in a directory that is there and holds none yet.",
    )
    out.add_argument("run", metavar="OUTPUT_DIR", type=Path, help="the --output_dir of a run")
    out.add_argument("--once", action="store_true", help="print how it stands now, once")
    out.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between looks (default: 1)")
    return out


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    console, follower = Console(highlight=False), Follower(arguments.run / "metrics.jsonl")
    try:
        progress = read_progress(arguments.run, follower, time.time())
        check_watchable(progress, waits=console.is_terminal and not arguments.once)
        if arguments.once:
            console.print(frame(progress))
            return 0
        last = follow(arguments.run, follower, progress, console, max(0.05, arguments.every))
        return 0 if last.done else 1
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the usual way to stop watching; what was shown last stays
        pass
    return 0


def check_watchable(progress: Progress, waits: bool) -> None:
    """Raises ValueError where there is no run, unless somebody `waits` for one in a directory that is there."""
    if not progress.directory.is_dir():
        raise ValueError(f"{progress.directory} is no directory; name the --output_dir of a run")
    if not progress.has_begun and not waits:
        raise ValueError(
            f"{progress.directory} holds no run; name the --output_dir of one, or wait on a terminal without --once"
        )


def follow(run: Path, follower: Follower, progress: Progress, console: Console, every: float) -> Progress:
    """Shows a run until its last step, or, where nobody sees it on a terminal, until its process is gone for good."""
    with Live(frame(progress), console=console, auto_refresh=False) as live:
        while not (progress.done or (progress.gone_for_good and not console.is_terminal)):
            time.sleep(every)
            progress = read_progress(run, follower, time.time())
            live.update(frame(progress), refresh=True)
    return progress


# ---- a frame --------------------------------------------------------------------------------------------------------


def frame(progress: Progress) -> RenderableType:
    """Everything there is to see at one moment; as wide as the terminal, in 80 columns too."""
    parts: list[RenderableType] = [Text(str(progress.directory), style="bold", overflow="fold")]
    if facts := header(progress):
        parts.append(facts)
    if progress.steps:
        parts += [Text(), bar(progress), Text(), numbers(progress)]
    return Group(*parts, Text(), state(progress))


def header(progress: Progress) -> Table | None:
    """What was chosen, in pairs side by side."""
    about, config = progress.about, section(progress.about, "config")
    length, ranks = config.get("model_max_length"), about.get("world_size")
    split = f" ({about.get('data_ranks')} data × {about.get('sequence_ranks')} sequence)"
    facts = {
        "model": config.get("model_name_or_path"),
        "ranks": f"{ranks}{split if about.get('data_ranks') else ''}" if ranks else None,
        "sequence": f"{shown_length(length)} tokens" if isinstance(length, int) else None,
        "device": section(about, "hardware").get("device"),
        **{name: about.get(name) for name in ("schedule", "kernel", "transport", "remat")},
    }
    known = [(name, str(value)) for name, value in facts.items() if value]
    return pairs(known) if known else None


def pairs(known: Sequence[tuple[str, str]]) -> Table:
    out = Table.grid(padding=(0, 2))
    for ratio in (None, 1, None, 1):
        out.add_column(ratio=ratio, overflow="fold", no_wrap=ratio is None, style="dim" if ratio is None else "")
    for i in range(0, len(known), 2):
        out.add_row(*(Text(word) for pair in known[i : i + 2] for word in pair))
    out.expand = True
    return out


def bar(progress: Progress) -> Table:
    step, total = progress.step, progress.total
    if total is None:
        words = f"step {step:,}", Text("how many there will be is not known: no run.json", style="dim")
        return row(*words)
    left = "done" if progress.done else f"{duration(progress.seconds_left)} left"
    share = f"{100 * step / max(total, 1):.0f} %"
    return row(f"step {step:,}/{total:,}", ProgressBar(total=max(total, 1), completed=step), share, left)


def row(*cells: RenderableType) -> Table:
    out = Table.grid(padding=(0, 2), expand=True)
    for cell in cells:
        out.add_column(ratio=1 if isinstance(cell, ProgressBar) else None, no_wrap=not isinstance(cell, Text))
    out.add_row(*cells)
    return out


def numbers(progress: Progress) -> Table:
    """The last of each number; beside loss and throughput their course so far."""
    last = progress.steps[-1]

    def value(key: str, form: str, scale: float = 1.0) -> str:
        number = last.get(key)
        return "-" if number is None else shown(form, scale * number)

    loss, speed = progress.known("loss"), progress.known("tokens_per_second")
    out = Table.grid(padding=(0, 2))
    for style in ("dim", "bold", "", "dim"):
        out.add_column(no_wrap=True, style=style, justify="right" if style == "bold" else "left")
    out.add_row("loss", value("loss", "{:.4f}"), sparkline(loss), course(loss, "{:.3f}"))
    out.add_row("tokens/s", value("tokens_per_second", "{:,.0f}"), sparkline(speed), course(speed, "{:,.0f}"))
    out.add_row("gradient norm", value("grad_norm", "{:.3g}"))
    out.add_row("learning rate", value("learning_rate", "{:.3g}"))
    out.add_row("step time", f"{shown('{:.3g}', progress.step_seconds)} s")
    if last.get("mfu") is not None:
        out.add_row("MFU", value("mfu", "{:.1f} %", 100))
    else:
        out.add_row("model TFLOP/s", value("model_tflops_per_gpu", "{:.3g}"))
    on_gpu = last.get("peak_memory_allocated_bytes") is not None
    memory = "peak_memory_allocated_bytes" if on_gpu else "host_rss_bytes"
    out.add_row("memory", value(memory, "{:.2f} GiB", 1 / GIB), "peak of a GPU" if on_gpu else "of a process")
    return out


def course(values: np.ndarray, form: str) -> str:
    return f"{shown(form, values.min())} to {shown(form, values.max())}" if values.size else ""


def sparkline(values: np.ndarray, width: int = SPARKLINE_WIDTH) -> str:
    """The course of the numbers in one line; a block is the mean of its share of them."""
    if not values.size:
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(width, values.size))])
    low, high = means.min(), means.max()
    places = (means - low) / (high - low) if high > low else np.full(len(means), 0.5)
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int(place * len(BLOCKS)))] for place in places)


def state(progress: Progress) -> Group:
    """What a person would ask next: evaluations, checkpoints, and whether it is still alive."""
    lines = []
    if progress.evaluations:
        last = progress.evaluations[-1]
        lines.append(Text(f"evaluation  loss {shown('{:.4f}', last['eval_loss'] or np.nan)} at step {last['step']}"))
    if progress.checkpoints:
        lines.append(Text(f"checkpoint  {progress.directory}/checkpoint-{progress.checkpoints[-1]}", overflow="fold"))
    if progress.saving is not None:
        lines.append(Text(f"checkpoint-{progress.saving} is being written"))
    if progress.left_out:
        words = (
            "line of metrics.jsonl is no record" if progress.left_out == 1 else "lines of metrics.jsonl are no records"
        )
        lines.append(Text(f"{progress.left_out} {words} and left out", style="yellow"))
    word, style = alive(progress)
    return Group(*lines, Text(word, style=style))


def alive(progress: Progress) -> tuple[str, str]:
    """A sentence on how the run is, and its style."""
    silent = duration(progress.silent_seconds or 0.0)
    if progress.done:
        return "The last step is done.", "green"
    if not progress.has_begun:
        return f"Waiting: {progress.directory} holds no run yet.", "yellow"
    if progress.gone:
        return f"The run has ended ({progress.gone}); go on with --resume_from_checkpoint auto.", "bold red"
    if not progress.steps:
        return f"Waiting for the first step since {silent}; it may compile and allocate.", "yellow"
    if progress.quiet:
        usual = duration(progress.step_seconds * progress.logged_every)
        line = f"Nothing was logged for {silent}, where {usual} is usual: it evaluates, saves, or has stopped."
        return line, "bold red"
    return f"Last logged {silent} ago.", "dim"


def duration(seconds: float) -> str:
    """As people say it, two units at most: 3 h 20 min."""
    if not np.isfinite(seconds):
        return "unknown time"
    if seconds < MINUTE:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    units = (("d", DAY), ("h", HOUR), ("min", MINUTE), ("s", 1))
    whole = round(seconds)
    first = next(i for i, (_, size) in enumerate(units) if whole >= size)
    words: list[str] = []
    for name, size in units[first : first + 2]:
        count, whole = divmod(whole, size)
        words += [f"{count} {name}"] if count or not words else []
    return " ".join(words)
