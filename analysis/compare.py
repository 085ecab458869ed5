"""Comparison of two runs of the same seed and data: `python3 -m analysis compare A B`."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table
from rich.text import Text

from .curves import limit_to_usual
from .drawing import (
    COLORS,
    GIB,
    GREY,
    SMALL_TITLE,
    add_output_flag,
    format_number,
    marker,
    new_figure,
    output_dir,
    plain_ticks,
    print_rich,
    save,
    span_of,
)
from .records import print_notes
from .run_settings import Difference, differing_flags, differing_machines
from .runs import Run, describe, highest, labels, past_warmup, read_run

Pair = tuple[Run, Run]
LEGEND_LETTERS = 100  # per line of the legend
# Flags without effect on training. Differences are listed but do not count as causes.
HARMLESS = ("save_strategy", "save_steps", "save_total_limit", "eval_strategy", "eval_steps", "report_to")
# Flags that change the losses.
DETERMINE_LOSS = ("seed", "data_path", "model_name_or_path", "random_init", "model_max_length")
# Means past the warm-up: name, column, factor into the unit, and format.
MEANS: tuple[tuple[str, str, float, str], ...] = (
    ("tokens per second", "tokens_per_second", 1.0, "{:,.1f}"),
    ("tokens with a target", "training_tokens_percent", 1.0, "{:.2f} %"),
    ("MFU", "mfu", 100.0, "{:.2f} %"),
    ("model TFLOP/s per GPU", "model_tflops_per_gpu", 1.0, "{:.4g}"),
)
PEAKS = (("peak memory, GPU", "peak_memory_allocated_bytes"), ("peak memory, host", "host_rss_bytes"))


@dataclass(frozen=True)
class LossDifference:
    """B's loss minus A's at the steps that both logged."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def worst(self) -> tuple[int, float]:
        """Step and value of the largest difference."""
        place = int(np.nanargmax(np.abs(self.values)))
        return int(self.steps[place]), float(self.values[place])

    def __str__(self) -> str:
        known = self.values[np.isfinite(self.values)]
        if not known.any():
            return f"The losses are equal to the last bit at all {len(known)} steps."
        step, value = self.worst
        largest = f"Largest loss difference: {value:+.3g} (B − A) at step {step}"
        return f"{largest}; mean {np.abs(known).mean():.2g} over {len(known)} steps."


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="analysis compare",
        usage="python3 -m analysis compare A B [--output DIR]",
        description="Compares two runs that should have the same losses, such as with and without FSDP. Prints the "
        "largest loss difference, means after warm-up and differing flags, and draws compare.png.",
    )
    parser.add_argument("first", metavar="A", type=Path, help="the --output_dir of a training run")
    parser.add_argument("second", metavar="B", type=Path, help="the run to compare with A")
    add_output_flag(parser, None)
    arguments = parser.parse_args(argv)
    directories = [arguments.first, arguments.second]
    first, second = (read_run(path, label) for path, label in zip(directories, labels(directories), strict=True))
    runs = (first, second)
    difference = loss_difference(runs)
    output = output_dir(arguments.output, directories)
    picture = save(figure(runs, difference), output, "compare")
    print_notes([*first.notes, *second.notes])
    for letter, run in zip("AB", runs, strict=True):
        print(f"{letter}  {run.label}: {describe(run) or 'no run.json'}")
    for setting in differences(runs):
        print(f"differs  {setting}")
    print(difference)
    print_rich(table(runs))
    for warning in warnings(runs):
        print(f"analysis: warning: {warning}", file=sys.stderr)
    print(picture)
    return 0


# ---- the numbers ----------------------------------------------------------------------------------------------------


def loss_difference(runs: Pair) -> LossDifference:
    """Returns the differences at common steps. Raises ValueError if no step has a loss in both runs."""
    losses = [dict(zip(run.column("step"), run.column("loss"), strict=True)) for run in runs]
    steps = np.array(sorted(losses[0].keys() & losses[1].keys()))
    values = np.array([losses[1][step] - losses[0][step] for step in steps], dtype=np.float64)
    if not np.isfinite(values).any():
        ends = " and ".join(f"{int(run.column('step')[0])} to {run.last_step}" for run in runs)
        raise ValueError(f"no step has a known loss in both runs (they logged steps {ends}); nothing to compare")
    return LossDifference(steps, values)


def table(runs: Pair) -> Table:
    """Returns a table of means after warm-up, peak memory and their ratios."""
    caption = "means leave out the warm-up: the first tenth, at most 10, of the logged steps"
    out = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    out.add_column("", no_wrap=True)
    for letter, run in zip("AB", runs, strict=True):
        out.add_column(Text(f"{letter}  {run.label}"), justify="right", overflow="fold")
    out.add_column("B ÷ A", justify="right", no_wrap=True)
    rows = [(name, form, [scale * mean(run, key) for run in runs]) for name, key, scale, form in MEANS]
    rows += [(name, "{:.2f} GiB", [highest(run, key) / GIB for run in runs]) for name, key in PEAKS]
    for name, form, (first, second) in rows:
        if np.isfinite([first, second]).any():
            ratio = second / first if first else np.nan
            out.add_row(name, *(format_number(form, x) for x in (first, second)), format_number("{:.3f}", ratio))
    return out


def mean(run: Run, key: str) -> float:
    known = past_warmup(run.unprofiled(key))
    return float(known.mean()) if known.size else np.nan


# ---- what else differs ----------------------------------------------------------------------------------------------


def differences(runs: Pair) -> list[Difference]:
    """Returns differing flags, number of ranks and commit."""
    first, second = (run.info for run in runs)
    commits = Difference("commit", first.get("commit"), second.get("commit"))
    known = commits.first and commits.second and commits.first != commits.second
    return [*differing_flags(first, second), *([commits] if known else [])]


def warnings(runs: Pair) -> list[str]:
    """Returns reasons why the comparison may mislead."""
    out = []
    first, second = (run.info for run in runs)
    if not (first and second):
        out.append("a run.json is missing; other differences are unknown")
    flags = differing_flags(first, second)
    if course := [flag for flag in flags if flag.name in DETERMINE_LOSS]:
        out.append(f"flags that change the losses differ ({'; '.join(map(str, course))})")
    causes = [flag.name for flag in flags if flag.name not in HARMLESS]
    if len(causes) > 1:
        out.append(f"several flags differ ({', '.join(causes)}); a difference has no single cause")
    if machines := differing_machines(first, second):
        out.append(f"the machines differ ({'; '.join(map(str, machines))})")
    return [*out, *unmatched_steps(runs)]


def unmatched_steps(runs: Pair) -> list[str]:
    """Returns warnings about steps in one run only, different step sizes and non-finite losses."""
    first, second = ({int(step) for step in run.column("step")} for run in runs)
    out = []
    for letter, other, own, theirs in (("A", "B", first, second), ("B", "A", second, first)):
        if alone := sorted(own - theirs):
            span = f"{alone[0]} to {alone[-1]}" if len(alone) > 1 else f"{alone[0]}"
            out.append(
                f"{letter} logged {len(alone)} steps that {other} did not (in {span}); the comparison skips them"
            )
    tokens = [past_warmup(run.column("valid_tokens")) for run in runs]
    if all(values.size for values in tokens) and tokens[0][-1] != tokens[1][-1]:
        out.append(
            f"a step has {tokens[0][-1]:,.0f} targets in A and {tokens[1][-1]:,.0f} in B; losses are not comparable"
        )
    for letter, run in zip("AB", runs, strict=True):
        if unknown := int((~np.isfinite(run.column("loss"))).sum()):
            out.append(f"{letter}'s loss is not finite at {unknown} steps")
    return out


# ---- the figure -----------------------------------------------------------------------------------------------------


def figure(runs: Pair, difference: LossDifference) -> Figure:
    """Plots losses, their difference and tokens per second by step."""
    out = new_figure(9, 9)
    losses, apart, speed = out.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    draw_both(losses, runs, "loss", first_width=4.0)
    losses.set_title("Training loss", loc="left")
    losses.set_ylabel("nats per token")
    losses.set_ylim(*span_of([run.column("loss") for run in runs]))
    plain_ticks(losses.yaxis)
    draw_difference(apart, difference)
    draw_both(speed, runs, "tokens_per_second", first_width=1.6)
    speed.set_title("Throughput", loc="left")
    speed.set(ylabel="tokens per second", xlabel="training step")
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(run.has("tokens_per_second") for run in runs):
        limit_to_usual(speed, [run.column("tokens_per_second") for run in runs])
    handles, names = losses.get_legend_handles_labels()
    side_by_side = sum(map(len, names)) <= LEGEND_LETTERS - 10
    lines = [
        "\n     ".join(textwrap.wrap(name, LEGEND_LETTERS, break_on_hyphens=False, drop_whitespace=False))
        for name in names
    ]
    out.legend(handles, lines, loc="outside upper left", ncols=2 if side_by_side else 1)
    return out


def draw_both(axes: Axes, runs: Pair, key: str, first_width: float) -> None:
    """Plots both runs. The first line is wider, so it stays visible where the runs coincide."""
    for letter, run, color, width in zip("AB", runs, COLORS, (first_width, 1.6), strict=False):
        values, alpha = run.column(key), 0.55 if width > 1.6 else 1.0
        look = {"color": color, "linewidth": width, "alpha": alpha, "marker": marker(values), "markersize": 4}
        axes.plot(run.column("step"), values, label=f"{letter}  {run.label}", **look)


def draw_difference(axes: Axes, difference: LossDifference) -> None:
    look = {"color": COLORS[2], "linewidth": 1.4, "marker": marker(difference.values), "markersize": 4}
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot(difference.steps, difference.values, **look)
    step, value = difference.worst
    axes.plot(step, value, "o", markersize=9, markerfacecolor="none", markeredgecolor=GREY, markeredgewidth=1.4)
    axes.set_title("Loss difference", loc="left")
    axes.set_title(f"largest {value:+.3g} at step {step}", **SMALL_TITLE)
    axes.set_ylabel("B − A, nats per token")
