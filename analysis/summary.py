"""Knows what a run comes to in a few numbers: its loss, its medians past the warm-up, and the table of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from .runs import Run

GIB = 2.0**30
SMOOTHED_SHARE = 0.05


def warmup_records(count: int) -> int:
    """How many of the first logged steps compile and allocate rather than show the pace: a tenth, 1 to 10."""
    return min(10, max(1, count // 10), count - 1)


def settled(values: np.ndarray) -> np.ndarray:
    """The known values past the warm-up; all known ones where the warm-up holds them all."""
    past = values[warmup_records(len(values)) :]
    known = past[np.isfinite(past)]
    return known if known.size else values[np.isfinite(values)]


def median(values: np.ndarray) -> float:
    known = settled(values)
    return float(np.median(known)) if known.size else float("nan")


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of the known values around each, a twentieth of them all; centred, so that it does not lag; else NaN."""
    half = max(1, round(len(values) * SMOOTHED_SHARE / 2))
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    known = [window[np.isfinite(window)] for window in windows]
    return np.array([window.mean() if window.size else np.nan for window in known])


@dataclass(frozen=True)
class Summary:
    """One row of the table; NaN stands for what the run did not know."""

    label: str
    last_step: int
    first_loss: float
    last_loss: float
    smoothed_loss: float
    tokens_per_second: float
    step_seconds: float
    peak_memory_bytes: float
    memory_is_gpu: bool
    mfu: float
    model_tflops_per_gpu: float


def summarize(run: Run) -> Summary:
    loss = run.column("loss")
    on_gpu = run.knows("peak_memory_allocated_bytes")
    memory = run.column("peak_memory_allocated_bytes" if on_gpu else "host_rss_bytes")
    return Summary(
        label=run.label,
        last_step=int(run.column("step")[-1]),
        first_loss=float(loss[0]),
        last_loss=float(loss[-1]),
        smoothed_loss=float(smoothed(loss)[-1]),
        tokens_per_second=median(run.pace("tokens_per_second")),
        step_seconds=median(run.pace("step_seconds")),
        peak_memory_bytes=float(np.nanmax(memory)) if np.isfinite(memory).any() else float("nan"),
        memory_is_gpu=on_gpu,
        mfu=median(run.pace("mfu")),
        model_tflops_per_gpu=median(run.pace("model_tflops_per_gpu")),
    )


def shown(form: str, value: float) -> str:
    return form.format(value) if np.isfinite(value) else "-"


def cells(row: Summary) -> dict[str, str]:
    """What the table says of a run, by what it is called there."""
    memory = shown("{:.2f} GiB", row.peak_memory_bytes / GIB)
    return {
        "steps": str(row.last_step),
        "loss, first → last": f"{row.first_loss:.3f} → {row.last_loss:.3f}",
        "loss, smoothed, at the end": shown("{:.3f}", row.smoothed_loss),
        "tokens per second, median": shown("{:,.0f}", row.tokens_per_second),
        "step time, median": shown("{:.3g} s", row.step_seconds),
        "peak memory": f"{memory} {'GPU' if row.memory_is_gpu else 'host'}",
        "MFU, median": shown("{:.1f} %", 100 * row.mfu),
        "model TFLOP/s, median": shown("{:.3g}", row.model_tflops_per_gpu),
    }


def tables(summaries: Sequence[Summary]) -> list[Table]:
    """Tables of up to three runs, one column a run: as many as a narrow terminal holds."""
    return [table(summaries[first : first + 3]) for first in range(0, len(summaries), 3)]


def table(summaries: Sequence[Summary]) -> Table:
    out = Table(
        box=box.SIMPLE_HEAD, caption="medians leave out the warm-up: the first tenth, at most 10, of the logged steps"
    )
    out.add_column("", no_wrap=True)
    for row in summaries:
        out.add_column(Text(row.label), justify="right", overflow="fold")
    columns = [cells(row) for row in summaries]
    for name in columns[0]:
        out.add_row(name, *(column[name] for column in columns))
    return out
