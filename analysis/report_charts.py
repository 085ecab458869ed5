"""Charts of training runs on the page of `analysis report`: one per metric, with one legend."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .curves import PANELS, TFLOPS, losses, usual_top
from .drawing import FEW, span_of
from .runs import Run, column, phrase, settings, smooth
from .style import COLORS, DASHES, PLOTLY, WIDE, looks

POINTS, POINTS_PER_PANEL = 1000, 20_000  # at most, per curve; a page of many long runs stays small
MAX_TICKS = 7
MOST_IN_LEGEND = 12  # runs; more are named by one setting


def curves(runs: Sequence[Run], keys: Sequence[str]) -> go.Figure:
    """Returns a chart per metric with one legend, of runs or of a setting in `keys`. A click hides a line in all."""
    panels = [metric for metric in PANELS if any(run.has(metric.key) for run in runs)]
    if all(run.has("mfu") for run in runs):
        panels.remove(TFLOPS)
    rows = -(-(1 + len(panels)) // 2)
    titles = ["Training loss", *(metric.title for metric in panels)]
    out = make_subplots(rows, 2, subplot_titles=titles, vertical_spacing=0.3 / rows, shared_xaxes="all")
    names = legend_names(runs, keys)
    groups = list(dict.fromkeys(names))
    styles = dict(zip(groups, looks([[group] for group in groups]), strict=True))
    points = min(POINTS, POINTS_PER_PANEL // len(runs))

    def line(run: Run, name: str, values: np.ndarray, **options: Any) -> go.Scatter:
        shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), points)).round().astype(int))
        return go.Scatter(
            x=numbers(run.column("step")[shown]),
            y=numbers(values[shown]),
            mode="lines" if len(values) > FEW else "lines+markers",
            name=html.escape(name),
            legendgroup=name,
            hovertext=html.escape(run.label),
            line={"color": styles[name]["color"], "width": WIDE, "dash": DASHES[styles[name]["linestyle"]]},
            **options,
        )

    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        loss, is_long = run.column("loss"), len(run.steps) > FEW
        first = {"row": 1, "col": 1}
        out.add_trace(
            line(run, name, smooth(loss) if is_long else loss, showlegend=names.index(name) == place), **first
        )
        if is_long:
            out.add_trace(line(run, name, loss, opacity=0.3, showlegend=False), **first)
        if run.evaluations:
            diamonds: dict[str, Any] = {
                "mode": "markers",
                "marker": {"symbol": "diamond", "size": 9, "color": styles[name]["color"]},
            }
            diamonds |= {"name": html.escape(f"{run.label}, evaluation"), "legendgroup": name, "showlegend": False}
            x, y = column(run.evaluations, "step"), column(run.evaluations, "eval_loss")
            out.add_trace(go.Scatter(x=numbers(x), y=numbers(y), **diamonds), **first)
    out.update_yaxes(title_text="nats per token", range=span_of(losses(runs)), row=1, col=1)
    for i, metric in enumerate(panels, 1):
        at = {"row": i // 2 + 1, "col": i % 2 + 1}
        for run, name in zip(runs, names, strict=True):
            if run.has(metric.key):
                out.add_trace(line(run, name, metric.column(run), showlegend=False), **at)
        top = usual_top([metric.column(run) for run in runs])
        out.update_yaxes(title_text=metric.unit.partition(" (")[0], range=[0, top], **at)
    out.update_yaxes(nticks=MAX_TICKS, exponentformat="none", separatethousands=True)
    out.update_xaxes(title_text="training step", showticklabels=True, nticks=MAX_TICKS, ticklabelstandoff=4)
    lengths = [run.last_step for run in runs]
    if max(lengths) > 20 * min(lengths):
        out.update_xaxes(type="log", dtick=1, exponentformat="none")
    elif max(lengths) <= MAX_TICKS:
        out.update_xaxes(dtick=1)  # no half steps
    legend_rows = -(-len(groups) // max(1, 150 // (8 + max(map(len, groups)))))
    return out.update_layout(
        template=PLOTLY,
        height=320 * rows + 20 * legend_rows,
        margin={"l": 60, "r": 40, "t": 40, "b": 60},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        modebar={"orientation": "v"},
        hoverlabel={"namelength": -1},
    )


def legend_names(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """Returns each run's label, or for many runs its value of the setting with the most values that colors can show."""
    if len(runs) <= MOST_IN_LEGEND:
        return [run.label for run in runs]
    found = {key: [phrase(key, settings(run.info).get(key)) for run in runs] for key in keys}
    fitting = [values for values in found.values() if 1 < len(set(values)) <= len(COLORS)]
    return max(fitting, key=lambda values: len(set(values)), default=[f"{len(runs)} runs"] * len(runs))


def numbers(values: Iterable[float]) -> list[float]:
    """Rounds to six digits, because a page of many long runs should stay small."""
    return [float(f"{value:.6g}") for value in values]
