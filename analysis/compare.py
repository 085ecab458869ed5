"""Says how far two runs of the same seed and data are apart: `python3 -m analysis compare A B [--output DIR]`."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .figures import COLORS, GREY, STYLE, dots, fit_from_zero
from .flags import BYSTANDERS, SAME_COURSE, Difference, differing_flags, differing_machines
from .jsonl import say
from .pictures import COMPARED, add_format, save
from .runs import Run, described, labels, read_run
from .summary import GIB, settled, shown

Pair = tuple[Run, Run]
LETTERS = 110  # of the legend, across the figure


@dataclass(frozen=True)
class Gap:
    """The losses of both runs at the steps that both logged, and where they are furthest apart."""

    steps: np.ndarray
    difference: np.ndarray  # of the loss: the second run's less the first's

    @property
    def worst(self) -> int:
        """Where in the arrays; differences that are not known do not count."""
        return int(np.nanargmax(np.abs(self.difference)))


@dataclass(frozen=True)
class Mean:
    """A row of the table: one number of each run."""

    name: str
    form: str
    values: tuple[float, float]

    @property
    def cells(self) -> tuple[str, str, str]:
        """Both numbers and the second in terms of the first; what is not known is a dash."""
        first, second = self.values
        ratio = second / first if first else np.nan
        return shown(self.form, first), shown(self.form, second), shown("{:.3f}", ratio)


# What is averaged past the warm-up: its name, its column, the factor into the unit shown, and how it is shown.
MEANS: tuple[tuple[str, str, float, str], ...] = (
    ("tokens per second", "tokens_per_second", 1.0, "{:,.1f}"),
    ("training tokens", "training_tokens_percent", 1.0, "{:.2f} %"),
    ("MFU", "mfu", 100.0, "{:.2f} %"),
    ("model TFLOP/s", "model_tflops_per_gpu", 1.0, "{:.4g}"),
)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis compare",
        usage="python3 -m analysis compare A B [--output DIR] [--format png|svg|both]",
        description="Compares two runs that should have the same losses, as with and without FSDP: the largest "
        "difference of the loss, both runs' means past the warm-up, what else differs, and compare.png.",
    )
    out.add_argument("first", metavar="A", type=Path, help="the --output_dir of a training run")
    out.add_argument("second", metavar="B", type=Path, help="another, which is measured against it")
    out.add_argument(
        "--output", metavar="DIR", type=Path, default=COMPARED, help="for the picture (default: %(default)s)"
    )
    add_format(out)
    return out


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        directories = [arguments.first, arguments.second]
        first, second = (read_run(path, label) for path, label in zip(directories, labels(directories), strict=True))
        gap = gap_of((first, second))
        pictures = draw((first, second), gap, arguments.output, arguments.format)
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2
    say([*first.notes, *second.notes])
    console = Console(highlight=False)
    for letter, run in (("A", first), ("B", second)):
        console.print(f"{letter}  {run.label}: {described(run) or 'no run.json'}", markup=False)
    for line in (*differences((first, second)), sentence(gap)):
        console.print(line, markup=False)
    console.print(table((first, second)))
    for warning in warnings((first, second)):
        print(f"analysis: warning: {warning}", file=sys.stderr)
    for picture in pictures:
        print(picture)
    return 0


# ---- the numbers ----------------------------------------------------------------------------------------------------


def gap_of(runs: Pair) -> Gap:
    """Raises ValueError where there is no step at which both losses are known."""
    losses = [dict(zip(run.column("step"), run.column("loss"), strict=True)) for run in runs]
    steps = np.array(sorted(losses[0].keys() & losses[1].keys()))
    difference = np.array([losses[1][step] - losses[0][step] for step in steps], dtype=np.float64)
    if not np.isfinite(difference).any():
        ends = " and ".join(f"{int(run.column('step')[0])} to {int(run.column('step')[-1])}" for run in runs)
        raise ValueError(
            f"no step has a known loss in both runs (they logged steps {ends}); there is nothing to compare"
        )
    return Gap(steps, difference)


def sentence(gap: Gap) -> str:
    known = gap.difference[np.isfinite(gap.difference)]
    if not known.any():
        return f"The losses are equal to the last bit at all {len(known)} steps."
    worst, step = gap.difference[gap.worst], int(gap.steps[gap.worst])
    largest = f"Largest difference of the loss: {worst:+.3g} (B less A) at step {step}"
    return f"{largest}; mean {np.abs(known).mean():.2g} over {len(known)} steps."


def means(runs: Pair) -> list[Mean]:
    """Means past the warm-up; of memory, whose peaks only rise, the highest."""
    out = [Mean(name, form, (mean(runs[0], key, scale), mean(runs[1], key, scale))) for name, key, scale, form in MEANS]
    for name, key in (("peak memory, GPU", "peak_memory_allocated_bytes"), ("peak memory, host", "host_rss_bytes")):
        out.append(Mean(name, "{:.2f} GiB", (highest(runs[0], key) / GIB, highest(runs[1], key) / GIB)))
    return [row for row in out if np.isfinite(row.values).any()]


def mean(run: Run, key: str, scale: float) -> float:
    known = settled(run.pace(key))
    return scale * float(known.mean()) if known.size else np.nan


def highest(run: Run, key: str) -> float:
    return float(np.nanmax(run.column(key))) if run.knows(key) else np.nan


def table(runs: Pair) -> Table:
    caption = "means leave out the warm-up: the first tenth, at most 10, of the logged steps"
    out = Table(box=box.SIMPLE_HEAD, caption=caption)
    out.add_column("", no_wrap=True)
    for letter, run in zip("AB", runs, strict=True):
        out.add_column(Text(f"{letter}  {run.label}"), justify="right", overflow="fold")
    out.add_column("B ÷ A", justify="right", no_wrap=True)
    for row in means(runs):
        out.add_row(row.name, *row.cells)
    return out


# ---- what else differs ----------------------------------------------------------------------------------------------


def differences(runs: Pair) -> list[str]:
    """What the two runs were asked for differently, one a line."""
    flags = differing_flags(runs[0].about, runs[1].about)
    commits = Difference("commit", *(run.about.get("commit") for run in runs))
    known = [commits] if commits.first and commits.second and commits.first != commits.second else []
    return [f"differs  {difference}" for difference in (*flags, *known)]


def warnings(runs: Pair) -> list[str]:
    """Why the comparison may not mean what it seems to."""
    out = []
    first, second = runs
    if not (first.about and second.about):
        out.append("a run.json is missing, so that nobody knows what else differs")
    flags = differing_flags(first.about, second.about)
    course = [difference for difference in flags if difference.name in SAME_COURSE]
    if course:
        out.append(f"the losses may take different courses ({'; '.join(map(str, course))})")
    causes = [difference.name for difference in flags if difference.name not in BYSTANDERS]
    if len(causes) > 1:
        out.append(f"more than one flag differs ({', '.join(causes)}): no one of them is the cause")
    if machines := differing_machines(first.about, second.about):
        out.append(f"the machines differ ({'; '.join(map(str, machines))})")
    return [*out, *unmatched(runs)]


def unmatched(runs: Pair) -> list[str]:
    """Steps, and targets of a step, that the runs do not share; losses that are not numbers."""
    steps = [{int(step) for step in run.column("step")} for run in runs]
    out = []
    for letter, other, own, theirs in (("A", "B", steps[0], steps[1]), ("B", "A", steps[1], steps[0])):
        if alone := sorted(own - theirs):
            span = f"{alone[0]} to {alone[-1]}" if len(alone) > 1 else f"{alone[0]}"
            out.append(
                f"{letter} logged {len(alone)} steps that {other} did not (of {span}); losses compare without them"
            )
    tokens = [settled(run.column("valid_tokens")) for run in runs]
    if all(values.size for values in tokens) and tokens[0][-1] != tokens[1][-1]:
        out.append(f"a step has {tokens[0][-1]:,.0f} targets in A and {tokens[1][-1]:,.0f} in B: their losses differ")
    for letter, run in zip("AB", runs, strict=True):
        if broken := int((~np.isfinite(run.column("loss"))).sum()):
            out.append(f"{letter}'s loss is no number at {broken} steps")
    return out


# ---- the figure -----------------------------------------------------------------------------------------------------


def draw(runs: Pair, gap: Gap, output: Path, form: str) -> list[Path]:
    output.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(dict(STYLE)):
        return save(figure(runs, gap), output, "compare", form)


def figure(runs: Pair, gap: Gap) -> Figure:
    """Losses, what lies between them, and tokens per second, over the same steps."""
    out = Figure(figsize=(9, 9), layout="constrained")
    losses, apart, speed = out.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    draw_both(losses, runs, "loss")
    losses.set_title("Training loss", loc="left")
    losses.set_ylabel("nats per token")
    draw_gap(apart, gap)
    draw_both(speed, runs, "tokens_per_second", wide=1.6)
    speed.set_title("Throughput", loc="left")
    speed.set(ylabel="tokens per second", xlabel="training step")
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(run.knows("tokens_per_second") for run in runs):
        fit_from_zero(speed, [run.column("tokens_per_second") for run in runs])
    handles, names = losses.get_legend_handles_labels()
    side_by_side = sum(map(len, names)) <= LETTERS - 20  # the lines before them
    out.legend(handles, [wrapped(name) for name in names], loc="outside upper left", ncols=2 if side_by_side else 1)
    return out


def wrapped(name: str) -> str:
    """Directories of sweeps have long names, without a space."""
    return "\n     ".join(textwrap.wrap(name, LETTERS - 10, break_on_hyphens=False, drop_whitespace=False))


def draw_both(axes: Axes, runs: Pair, key: str, wide: float = 4.0) -> None:
    """The first run's line may be the wider one, so that it shows beneath the second's where they are equal."""
    for letter, run, color, width in zip("AB", runs, COLORS, (wide, 1.6), strict=False):
        values, alpha = run.column(key), 0.55 if width > 1.6 else 1.0
        look = {"color": color, "linewidth": width, "alpha": alpha, "marker": dots(values), "markersize": 4}
        axes.plot(run.column("step"), values, label=f"{letter}  {run.label}", **look)


def draw_gap(axes: Axes, gap: Gap) -> None:
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot(gap.steps, gap.difference, color=COLORS[2], linewidth=1.4, marker=dots(gap.difference), markersize=4)
    step, worst = gap.steps[gap.worst], gap.difference[gap.worst]
    axes.plot(step, worst, "o", markersize=9, markerfacecolor="none", markeredgecolor=GREY, markeredgewidth=1.4)
    axes.set_title("Difference of the loss", loc="left")
    axes.set_title(f"largest {worst:+.3g} at step {int(step)}", loc="right", fontsize=9.5, fontweight="normal")
    axes.set_ylabel("B less A, nats per token")
