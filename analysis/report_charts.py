"""Charts of training runs on the page of `analysis report`: one per metric, with one legend."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .curves import PANELS, TFLOPS, losses, usual_top
from .drawing import COLORS, FEW, span_of
from .runs import Run, column, smooth

POINTS = 1000  # at most, per curve; a page of many long runs stays small
MAX_TICKS = 7
DASHES = ("solid", "dash", "dot", "dashdot")


def curves(runs: Sequence[Run]) -> go.Figure:
    """Returns a chart per metric with one legend. A click on a run hides it in all charts."""
    panels = [panel for panel in PANELS if any(run.has(panel.curves[0].key) for run in runs)]
    if all(run.has("mfu") for run in runs):
        panels.remove(TFLOPS)
    rows = -(-(1 + len(panels)) // 2)
    titles = ["Training loss", *(panel.title for panel in panels)]
    out = make_subplots(rows, 2, subplot_titles=titles, vertical_spacing=0.3 / rows, shared_xaxes="all")
    for place, run in enumerate(runs):
        out.add_traces(loss_traces(run, place), rows=1, cols=1)
    out.update_yaxes(title_text="nats per token", range=span_of(losses(runs)), row=1, col=1)
    for i, panel in enumerate(panels, 1):
        at, curve = {"row": i // 2 + 1, "col": i % 2 + 1}, panel.curves[0]
        for place, run in enumerate(runs):
            if run.has(curve.key):
                out.add_trace(line(run, place, curve.of(run), showlegend=False), **at)
        top = usual_top([curve.of(run) for run in runs])
        out.update_yaxes(title_text=panel.unit.partition(" (")[0], range=[0, top], **at)
    out.update_yaxes(nticks=MAX_TICKS, exponentformat="none", separatethousands=True)
    out.update_xaxes(title_text="training step", showticklabels=True, nticks=MAX_TICKS, ticklabelstandoff=4)
    lengths = [run.last_step for run in runs]
    if max(lengths) > 20 * min(lengths):
        out.update_xaxes(type="log", dtick=1, exponentformat="none")
    legend_rows = -(-len(runs) // max(1, 150 // (8 + max(len(run.label) for run in runs))))
    return out.update_layout(
        template="plotly_white",
        height=320 * rows + 20 * legend_rows,
        margin={"l": 60, "r": 40, "t": 40, "b": 60},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        modebar={"orientation": "v"},
        hoverlabel={"namelength": -1},
    )


def loss_traces(run: Run, place: int) -> list[go.Scatter]:
    """Returns a run's loss, with its running mean if the run is long, and its evaluations as diamonds."""
    loss = run.column("loss")
    is_long = len(run.steps) > FEW
    out = [line(run, place, smooth(loss) if is_long else loss)]
    if is_long:
        out.append(line(run, place, loss, opacity=0.3, showlegend=False))
    if run.evaluations:
        x, y = column(run.evaluations, "step"), column(run.evaluations, "eval_loss")
        diamonds = {"symbol": "diamond", "size": 9, "color": COLORS[place % len(COLORS)]}
        name = f"{html.escape(run.label)}, evaluation"
        look = {"mode": "markers", "marker": diamonds, "name": name, "legendgroup": place, "showlegend": False}
        out.append(go.Scatter(x=numbers(x), y=numbers(y), **look))
    return out


def line(run: Run, place: int, values: np.ndarray, **options: Any) -> go.Scatter:
    """Returns a line over a run's steps, in the color of the run's place in the legend."""
    total = len(run.steps)
    shown = np.unique(np.linspace(0, total - 1, min(total, POINTS)).round().astype(int))
    return go.Scatter(
        x=numbers(run.column("step")[shown]),
        y=numbers(values[shown]),
        mode="lines" if total > FEW else "lines+markers",
        name=html.escape(run.label),
        legendgroup=place,
        line={"color": COLORS[place % len(COLORS)], "dash": DASHES[place // len(COLORS) % len(DASHES)]},
        **options,
    )


def numbers(values: Iterable[float]) -> list[float]:
    """Rounds to six digits, because a page of many long runs should stay small."""
    return [float(f"{value:.6g}") for value in values]
