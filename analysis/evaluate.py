"""Plots of evaluations: `python3 -m analysis evaluate OUT...` draws the results of `lightseq evaluate`.

perplexity.png has a line of perplexity by position per evaluation, needle.png a map of depth by length per search.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lightseq.config.lengths import format_tokens

from .drawing import SMALL_TITLE, label_lines, new_figure, plain_ticks, save, subtitle
from .output import markdown_table, output_dir, print_lines
from .records import Record, print_notes, read_each, read_lines
from .runs import labels, shared
from .style import GREY, looks

KEYS = {"loss": ("first", "last", "loss", "perplexity", "valid_tokens"), "needle": ("length", "depth", "accuracy")}
SCORES = {
    "likelihood": "share of texts where the right answer ranks first of {choices} (chance {chance:.3g})",
    "greedy": "share of texts whose greedy answer is right",
}
LITTLE_CONTEXT = 64  # tokens; higher perplexities before this position may be cut off
DARK = 0.6  # cells with higher scores have white text


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.jsonl: a summary, then a row per bin of positions or per depth and length."""

    label: str
    summary: Record
    rows: tuple[Record, ...]

    @property
    def kind(self) -> str:
        return str(self.summary["evaluation"])

    def values(self, key: str) -> list[float]:
        return sorted({row[key] for row in self.rows})

    def accuracy(self, length: float, depth: float) -> float | None:
        rows = (row["accuracy"] for row in self.rows if (row["length"], row["depth"]) == (length, depth))
        return next(rows, None)

    @property
    def score(self) -> str:
        choices = self.summary.get("choices")
        text = SCORES[self.summary["score"]].format(choices=choices, chance=1 / (choices or 1))
        return f"{text}; {self.summary['trials']} texts per cell"


def main(arguments: argparse.Namespace) -> int:
    notes: list[str] = []
    named = zip(arguments.paths, labels(arguments.paths), strict=True)
    found = read_each(named, lambda pair: read(*pair, notes), notes)
    output = output_dir(arguments.output, "evaluate", [path for path, _ in found])
    losses = [one for one in found.values() if one.kind == "loss"]
    needles = [one for one in found.values() if one.kind == "needle"]
    pictures = [save(perplexity_figure(losses), output, "perplexity")] if losses else []
    pictures += [save(needle_figure(needles), output, "needle")] if needles else []
    print_notes(notes)
    if losses:
        print_lines([*markdown_table(position_rows(losses)), ""])
    for one in needles:
        print_lines([f"{one.label}: {one.score}", "", *markdown_table(needle_rows(one)), ""])
    print_lines(pictures)
    return 0


def read(directory: Path, label: str, notes: list[str]) -> Evaluation:
    path = directory / "evaluation.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"no evaluation.jsonl in {directory}; give the --output_dir of lightseq evaluate")
    try:
        summary, *rows = read_lines(path, lambda record: record, notes) or [{}]
    except ValueError as error:
        raise ValueError(f"{error}; evaluate again") from None
    keys = KEYS.get(summary.get("evaluation", ""))
    if not keys or not rows or not all(key in row for row in rows for key in keys):
        raise ValueError(f"{path} is not an evaluation; write it with lightseq evaluate")
    return Evaluation(label, summary, tuple(rows))


# ---- the tables -----------------------------------------------------------------------------------------------------


def position_rows(found: Sequence[Evaluation]) -> list[list[str]]:
    """Returns perplexity by position, a column per evaluation. Bins that an evaluation lacks are empty."""
    rows = [["perplexity at positions", *(one.label for one in found)]]
    for first, last in sorted({(row["first"], row["last"]) for one in found for row in one.rows}):
        cells = [next((r for r in one.rows if (r["first"], r["last"]) == (first, last)), {}) for one in found]
        name = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        rows.append([name, *(number(cell.get("perplexity")) for cell in cells)])
    rows.append(["all", *(number(one.summary["perplexity"]) for one in found)])
    return rows


def needle_rows(found: Evaluation) -> list[list[str]]:
    lengths = found.values("length")
    rows = [["depth", *(f"{format_tokens(int(length))} tokens" for length in lengths)]]
    for depth in found.values("depth"):
        scores = [found.accuracy(length, depth) for length in lengths]
        rows.append([f"{depth:.0%}", *("" if score is None else f"{score:.2f}" for score in scores)])
    return rows


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}"


# ---- the figures ----------------------------------------------------------------------------------------------------


def perplexity_figure(found: Sequence[Evaluation]) -> Figure:
    """Draws perplexity over the context at each bin's end. A line that keeps falling shows use of distant context."""
    out = new_figure(8.5, 5)
    axes = out.subplots()
    for one, look in zip(found, looks([[one.label] for one in found]), strict=True):
        known = [row for row in one.rows if row["perplexity"] is not None]
        points = [row["last"] + 1 for row in known], [row["perplexity"] for row in known]
        label = f"{one.label}: {number(one.summary['perplexity'])} over all"
        axes.plot(*points, label=label, **look)
    axes.set(title="Perplexity by position", xlabel="tokens of context, up to", ylabel="perplexity of the next token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: format_tokens(round(tokens)) if tokens >= 1 else ""))
    cut_off_first_positions(axes, found)
    plain_ticks(axes.yaxis)
    axes.xaxis.set_minor_locator(NullLocator())
    label_lines(axes)
    subtitle(out, shared(one.summary.get("model") for one in found))
    return out


def cut_off_first_positions(axes: Axes, found: Sequence[Evaluation]) -> None:
    """Limits the axis: the first positions have little context, and their high perplexity would flatten the rest."""
    rows = [row for one in found for row in one.rows if row["perplexity"]]
    usual = 3.0 * max(one.summary["perplexity"] or 0.0 for one in found)
    top = max([usual, *(1.1 * row["perplexity"] for row in rows if row["last"] >= LITTLE_CONTEXT)])
    highest = max([0.0, *(row["perplexity"] for row in rows)])
    if highest > top > 0:
        axes.set_ylim(0.95 * min(row["perplexity"] for row in rows), top)
        axes.set_title(f"not shown: up to {number(highest)} with little context", **SMALL_TITLE)


def needle_figure(found: Sequence[Evaluation]) -> Figure:
    """Draws a map per search, one below the other, with one color scale from 0 to 1."""
    widest = max(len(one.values("length")) for one in found)
    tallest = max(len(one.values("depth")) for one in found)
    out = new_figure(max(6.5, 2.2 + 0.9 * widest), (1.9 + 0.5 * tallest) * len(found))
    for axes, one in zip(out.subplots(len(found), squeeze=False)[:, 0], found, strict=True):
        draw_map(axes, one)
    subtitle(out, shared(one.summary.get("model") for one in found))
    return out


def draw_map(axes: Axes, found: Evaluation) -> None:
    lengths, depths = found.values("length"), found.values("depth")
    scores = [[found.accuracy(length, depth) for length in lengths] for depth in depths]
    axes.pcolormesh(np.array(scores, dtype=float), cmap="Blues", vmin=0.0, vmax=1.0, edgecolors="white", linewidth=2)
    for y, row in enumerate(scores):
        for x, score in enumerate(row):
            if score is not None:
                color = "white" if score > DARK else "black"
                axes.text(x + 0.5, y + 0.5, f"{score:.2f}", ha="center", va="center", color=color)
    axes.set_xticks(np.arange(len(lengths)) + 0.5, [format_tokens(int(length)) for length in lengths])
    axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{depth:.0%}" for depth in depths])
    axes.set(xlabel="tokens in the text", ylabel="depth of the needle")
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(found.label, pad=38)
    above = {"xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    axes.annotate(found.score.replace("; ", ";\n"), (0, 1), **above, fontsize=9.5, color=GREY)
