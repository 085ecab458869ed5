"""Draws what `python3 -m lightseq evaluate` measured: `python3 -m analysis evaluate OUT... [--output DIR]`.

perplexity.png has a line for every evaluation by position, needle.png a map of depth by length for every search.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator, StrMethodFormatter

from . import command
from .figures import GREY, STYLE, colors
from .jsonl import read_lines, readable
from .markdown import table_lines
from .pictures import add_format, add_output, folder_of, save
from .points import shown
from .runs import labels

KEYS = {"loss": ("first", "last", "loss", "perplexity", "valid_tokens"), "needle": ("length", "depth", "accuracy")}
SCORES = {
    "likelihood": "share of texts whose right answer is the likeliest of {choices} (chance {chance:.3g})",
    "greedy": "share of texts answered right, token by token",
}
PANEL_COLUMNS = 2
HIGHEST_SHOWN = 3.0  # times the perplexity over all; past the first positions everything is shown
LITTLE_CONTEXT = 64
DARK = 0.6  # from this score on, words on a cell are white

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.jsonl: a summary, and a row a bin of positions or a cell of depth and length."""

    label: str
    summary: Record
    rows: tuple[Record, ...]

    @property
    def kind(self) -> str:
        return str(self.summary["evaluation"])

    def values(self, key: str) -> list[float]:
        return sorted({row[key] for row in self.rows})

    def cell(self, length: float, depth: float) -> Record | None:
        return next((row for row in self.rows if (row["length"], row["depth"]) == (length, depth)), None)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis evaluate",
        usage="python3 -m analysis evaluate OUT... [--output DIR] [--format png|svg|both]",
        description="Draws perplexity and needle from evaluation.jsonl files, and prints a Markdown table.",
    )
    out.add_argument("paths", metavar="OUT", nargs="+", type=Path, help="the --output_dir of an evaluation")
    add_output(out, "OUT")
    add_format(out)
    return out


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)

    def read_all(notes: list[str]) -> list[Evaluation]:
        named = zip(arguments.paths, labels(arguments.paths), strict=True)
        return readable(named, lambda pair: read(*pair, notes), notes)

    return command.run(
        arguments.paths,
        read_all,
        lambda found, paths: draw(found, folder_of(arguments.output, paths), arguments.format),
        markdown,
    )


def read(directory: Path, label: str, notes: list[str]) -> Evaluation:
    path = directory / "evaluation.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"no evaluation.jsonl in {directory}; name the --output_dir of python3 -m lightseq evaluate"
        )
    try:
        records = read_lines(path, lambda value: value, notes)
    except ValueError as why:
        raise ValueError(f"{why}; evaluate again") from None
    keys = KEYS.get(records[0].get("evaluation", ""), ()) if len(records) > 1 else ()
    if not keys or not all(key in row for row in records[1:] for key in keys):
        raise ValueError(f"{path} is no evaluation; make it with python3 -m lightseq evaluate")
    return Evaluation(label, records[0], tuple(records[1:]))


# ---- the tables -----------------------------------------------------------------------------------------------------


def markdown(found: Sequence[Evaluation]) -> list[str]:
    out: list[str] = []
    if losses := [e for e in found if e.kind == "loss"]:
        out += [*table_lines(position_rows(losses)), ""]
    for e in (e for e in found if e.kind == "needle"):
        out += [f"{e.label}: {scored(e)}", "", *table_lines(needle_rows(e)), ""]
    return out


def position_rows(found: Sequence[Evaluation]) -> list[list[str]]:
    """Perplexity by position, a column an evaluation; bins that an evaluation has not stay empty."""
    spans = sorted({(row["first"], row["last"]) for e in found for row in e.rows})
    rows = [["perplexity at positions", *(e.label for e in found)]]
    for first, last in spans:
        cells = [next((r for r in e.rows if (r["first"], r["last"]) == (first, last)), {}) for e in found]
        name = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        rows.append([name, *(number(cell.get("perplexity")) for cell in cells)])
    rows.append(["all", *(number(e.summary["perplexity"]) for e in found)])
    return rows


def needle_rows(e: Evaluation) -> list[list[str]]:
    lengths = e.values("length")
    rows = [["depth", *(f"{shown(int(length))} tokens" for length in lengths)]]
    for depth in e.values("depth"):
        cells = [e.cell(length, depth) for length in lengths]
        rows.append([f"{depth:.0%}", *("" if cell is None else f"{cell['accuracy']:.2f}" for cell in cells)])
    return rows


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}"


def scored(e: Evaluation) -> str:
    choices = e.summary.get("choices")
    text = SCORES[e.summary["score"]].format(choices=choices, chance=1 / (choices or 1))
    return f"{text}; {e.summary['trials']} a cell"


# ---- the figures ----------------------------------------------------------------------------------------------------


def draw(found: Sequence[Evaluation], output: Path, form: str = "png") -> list[Path]:
    """A picture for what there is of each kind in `output`, which is made where it is missing."""
    output.mkdir(parents=True, exist_ok=True)
    by_kind = {kind: [e for e in found if e.kind == kind] for kind in KEYS}
    paths: list[Path] = []
    with matplotlib.rc_context(dict(STYLE)):
        if by_kind["loss"]:
            paths += save(perplexity_figure(by_kind["loss"]), output, "perplexity", form)
        if by_kind["needle"]:
            paths += save(needle_figure(by_kind["needle"]), output, "needle", form)
    return paths


def perplexity_figure(found: Sequence[Evaluation]) -> Figure:
    """Against the tokens of context that a bin ends with, on logarithmic axes: a line that falls uses far context."""
    out = Figure(figsize=(8.5, 5), layout="constrained")
    axes = out.subplots()
    for e, color in zip(found, colors(len(found)), strict=True):
        known = [row for row in e.rows if row["perplexity"] is not None]
        points = [row["last"] + 1 for row in known], [row["perplexity"] for row in known]
        label = f"{e.label}: {number(e.summary['perplexity'])} over all"
        axes.plot(*points, "o-", color=color, markersize=5, markeredgecolor="white", label=label)
    axes.set_title("Perplexity by position", loc="left")
    axes.set(xlabel="tokens of context, up to", ylabel="perplexity of the next token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: shown(round(tokens)) if tokens >= 1 else ""))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    leave_out_beginnings(axes, found)
    low, high = axes.get_ylim()  # over several decades their own marks are enough
    axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:,g}") if high < 10 * low else NullFormatter())
    axes.grid(which="minor", axis="y", linewidth=0.5)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend(loc="best")
    return out


def leave_out_beginnings(axes: Axes, found: Sequence[Evaluation]) -> None:
    """Without context nothing can be predicted: how badly would leave no room for what far context does."""
    rows = [row for e in found for row in e.rows if row["perplexity"]]
    usual = HIGHEST_SHOWN * max(e.summary["perplexity"] or 0.0 for e in found)
    top = max([usual, *(1.1 * row["perplexity"] for row in rows if row["last"] >= LITTLE_CONTEXT)])
    highest = max([0.0, *(row["perplexity"] for row in rows)])
    if highest > top > 0:
        axes.set_ylim(0.95 * min(row["perplexity"] for row in rows), top)
        text = f"not shown: up to {number(highest)} with little context"
        axes.set_title(text, loc="right", fontsize=9.5, fontweight="normal", color=GREY)


def needle_figure(found: Sequence[Evaluation]) -> Figure:
    """A map for every evaluation, all on one scale from 0 to 1."""
    columns = min(PANEL_COLUMNS, len(found))
    rows = -(-len(found) // columns)
    widest = max(len(e.values("length")) for e in found)
    tallest = max(len(e.values("depth")) for e in found)
    size = (max(6.5, 2.2 + 0.9 * widest) * columns, (1.9 + 0.5 * tallest) * rows)
    out = Figure(figsize=size, layout="constrained")
    panels = out.subplots(rows, columns, squeeze=False).flatten()
    for axes, e in zip(panels, found, strict=False):
        draw_map(axes, e)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    return out


def draw_map(axes: Axes, e: Evaluation) -> None:
    lengths, depths = e.values("length"), e.values("depth")
    cells = [[e.cell(length, depth) for length in lengths] for depth in depths]
    scores = [[float("nan") if cell is None else cell["accuracy"] for cell in row] for row in cells]
    axes.imshow(scores, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            if cell is not None:
                color = "white" if cell["accuracy"] > DARK else "black"
                axes.text(x, y, f"{cell['accuracy']:.2f}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(lengths)), [shown(int(length)) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set(xlabel="tokens of the whole text", ylabel="depth of what is sought")
    axes.set_xticks([x + 0.5 for x in range(len(lengths) - 1)], minor=True)
    axes.set_yticks([y + 0.5 for y in range(len(depths) - 1)], minor=True)
    axes.set_axisbelow(False)
    axes.grid(visible=False)
    axes.grid(visible=True, which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(e.label, loc="left", pad=22)
    axes.text(0, 1.02, scored(e), transform=axes.transAxes, fontsize=9.5, color=GREY, va="bottom")
