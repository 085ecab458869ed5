"""Comparison of two runs of the same seed and data: `python3 -m analysis compare A B`."""

import argparse
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from .curves import THROUGHPUT, limit_to_usual, losses
from .drawing import SMALL_TITLE, draw_curve, legend_below, new_figure, plain_ticks, save, span_of, step_axis, subtitle
from .output import GIB, format_number, number_table, output_dir, print_lines, print_tables
from .records import Record, print_notes
from .runs import Run, describe, highest, labels, past_warmup, read_run, section, setting_text, versions
from .style import BLUE, GREEN, GREY, RED

Pair = tuple[Run, Run]
LEGEND_LETTERS = 100  # per line of the legend
PATHS = ("output_dir", "overwrite_output_dir")  # without effect on results
# Settings without effect on training. Differences are listed but do not count as causes.
HARMLESS = ("commit", "save_strategy", "save_steps", "save_total_limit", "eval_strategy", "eval_steps", "report_to")
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
        step, value = self.worst
        if value == 0:
            return f"The losses are equal to the last bit at all {len(known)} steps."
        largest = f"Largest loss difference: {value:+.3g} (B − A) at step {step}"
        return f"{largest}; mean {np.abs(known).mean():.2g} over {len(known)} steps."


def main(arguments: argparse.Namespace) -> int:
    directories = [arguments.first, arguments.second]
    first, second = (read_run(path, label) for path, label in zip(directories, labels(directories), strict=True))
    runs = (first, second)
    difference = loss_difference(runs)
    picture = save(figure(runs, difference), output_dir(arguments.output, "compare", directories), "compare")
    print_notes([*first.notes, *second.notes])
    for letter, run in zip("AB", runs, strict=True):
        print(f"{letter}  {run.label}: {describe([run.info]) or 'no run.json'}")
    changed = differing(flags_of(first.info), flags_of(second.info))
    print_lines(f"differs  {values}" for values in changed.values())
    print(difference)
    print_tables(table(runs))
    for warning in warnings(runs, changed):
        print(f"analysis: warning: {warning}", file=sys.stderr)
    print(picture)
    return 0


# ---- the numbers ----------------------------------------------------------------------------------------------------


def loss_difference(runs: Pair) -> LossDifference:
    """Returns the differences at common steps. Raises ValueError if no step has a loss in both runs."""
    one, other = (dict(zip(run.column("step"), run.column("loss"), strict=True)) for run in runs)
    steps = np.array(sorted(one.keys() & other.keys()))
    values = np.array([other[step] - one[step] for step in steps], dtype=np.float64)
    if not np.isfinite(values).any():
        ends = " and ".join(f"{int(run.column('step')[0])} to {run.last_step}" for run in runs)
        raise ValueError(f"no step has a known loss in both runs (they logged steps {ends}); nothing to compare")
    return LossDifference(steps, values)


def table(runs: Pair) -> Table:
    """Returns a table of means after warm-up, peak memory and their ratios."""
    caption = "means leave out the warm-up: the first tenth, at most 10, of the logged steps"
    out = number_table([f"A  {runs[0].label}", f"B  {runs[1].label}", "B ÷ A"], caption=caption)
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


def differing(first: Record, second: Record) -> dict[str, str]:
    """Returns both values of the settings that both have with different values, as `name: value and value`."""
    return {
        name: f"{name}: {setting_text(name, first[name])} and {setting_text(name, second[name])}"
        for name in first
        if name in second and first[name] != second[name]
    }


def flags_of(info: Record) -> Record:
    """Returns the flags of a run.json, its number of ranks and its commit."""
    flags = {name: value for name, value in section(info, "config").items() if name not in PATHS}
    others = {"ranks": info.get("world_size"), "commit": info.get("commit")}
    return {**flags, **{name: value for name, value in others.items() if value is not None}}


def machine_of(info: Record) -> Record:
    """Returns the device and the software versions of a run.json."""
    return {"device": section(info, "hardware").get("device"), **section(info, "versions")} if info else {}


def warnings(runs: Pair, changed: Mapping[str, str]) -> list[str]:
    """Returns reasons why the comparison may mislead."""
    out = []
    first, second = (run.info for run in runs)
    if not (first and second):
        out.append("a run.json is missing; other differences are unknown")
    if course := [changed[flag] for flag in DETERMINE_LOSS if flag in changed]:
        out.append(f"flags that change the losses differ ({'; '.join(course)})")
    causes = [flag for flag in changed if flag not in HARMLESS]
    if len(causes) > 1:
        out.append(f"several flags differ ({', '.join(causes)}); a difference has no single cause")
    if machines := differing(machine_of(first), machine_of(second)):
        out.append(f"the machines differ ({'; '.join(machines.values())})")
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
    one, two = (past_warmup(run.column("valid_tokens")) for run in runs)
    if one.size and two.size and one[-1] != two[-1]:
        out.append(f"a step has {one[-1]:,.0f} targets in A and {two[-1]:,.0f} in B; losses are not comparable")
    for letter, run in zip("AB", runs, strict=True):
        if unknown := int((~np.isfinite(run.column("loss"))).sum()):
            out.append(f"{letter}'s loss is not finite at {unknown} steps")
    return out


# ---- the figure -----------------------------------------------------------------------------------------------------


def figure(runs: Pair, difference: LossDifference) -> Figure:
    """Plots losses, their difference if there is one, and tokens per second by step. B is dashed, to show A beneath."""
    is_equal = difference.worst[1] == 0
    heights = (3, 2) if is_equal else (3, 2, 2)
    out = new_figure(9, 1.3 * sum(heights))
    loss, *apart, speed = out.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    loss.set(title="Training loss", ylabel="nats per token", ylim=span_of(losses(runs)))
    speed.set(title=THROUGHPUT.title, ylabel=THROUGHPUT.unit)
    for letter, run, color, dash in zip("AB", runs, (BLUE, RED), ("-", "--"), strict=True):
        label = textwrap.fill(f"{letter}  {run.label}", LEGEND_LETTERS, break_on_hyphens=False, drop_whitespace=False)
        look: dict[str, Any] = {
            "color": color,
            "linestyle": dash,
            "marker": "o" if len(run.steps) == 1 else "",
            "label": label,
        }
        draw_curve(loss, run.column("step"), run.column("loss"), **look)
        draw_curve(speed, run.column("step"), run.column("tokens_per_second"), **look)
    plain_ticks(loss.yaxis)
    for axes in apart:
        draw_difference(axes, difference)
    if is_equal:
        loss.set_title(str(difference).removesuffix("."), **SMALL_TITLE)
    step_axis(speed)
    if any(run.has("tokens_per_second") for run in runs):
        limit_to_usual(speed, [run.column("tokens_per_second") for run in runs])
    legend_below(out, loss.lines)
    infos = [run.info for run in runs]
    subtitle(out, describe(infos), versions(infos))
    return out


def draw_difference(axes: Axes, difference: LossDifference) -> None:
    axes.axhline(0, color=GREY, linewidth=0.8)
    draw_curve(axes, difference.steps, difference.values, color=GREEN, marker="")
    step, value = difference.worst
    axes.plot(step, value, "o", markersize=9, markerfacecolor="none", markeredgecolor=GREY, markeredgewidth=1.4)
    axes.set_title("Loss difference")
    axes.set_title(f"largest {value:+.3g} at step {step}", **SMALL_TITLE)
    axes.set_ylabel("B − A, nats per token")
