"""Charts of training runs on the page of `analysis report`: one per metric, with one legend."""

import html
from collections.abc import Iterable, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .curves import PANELS, TFLOPS, losses, usual_top
from .drawing import FEW, span_of
from .metrics import METRICS
from .runs import Run, column, phrase, settings, smooth
from .style import COLORS, DASHES, PLOTLY, WIDE, looks

POINTS, POINTS_PER_PANEL = 1000, 20_000  # at most, per curve; a page of many long runs stays small
MAX_TICKS = 7
LOSS = METRICS["loss"]
MOST_IN_LEGEND = 12  # runs; more are named by one setting


def curves(runs: Sequence[Run], keys: Sequence[str]) -> go.Figure:
    """Returns a chart per metric with one legend, of runs or of a setting in `keys`. A click hides a line in all."""
    panels = [metric for metric in (LOSS, *PANELS) if any(run.has(metric.key) for run in runs)]
    if all(run.has("mfu") for run in runs):
        panels.remove(TFLOPS)
    rows = -(-len(panels) // 2)
    titles = [metric.title for metric in panels]
    out = make_subplots(rows, 2, subplot_titles=titles, vertical_spacing=0.3 / rows, shared_xaxes="all")
    names = legend_names(runs, keys)
    groups = list(dict.fromkeys(names))
    styles = dict(zip(groups, looks([[group] for group in groups]), strict=True))
    for i, metric in enumerate(panels):
        at = {"row": i // 2 + 1, "col": i % 2 + 1}
        for run, name in zip(runs, names, strict=True):
            look, label = styles[name], {"legendgroup": name, "hovertext": html.escape(run.label), "showlegend": False}
            line = {"color": look["color"], "width": WIDE, "dash": DASHES[look["linestyle"]]}
            values, is_long = metric.column(run), len(run.steps) > FEW
            shown = np.linspace(0, len(values) - 1, min(len(values), POINTS, POINTS_PER_PANEL // len(runs)))
            shown = np.unique(shown.round().astype(int))
            known = [] if not run.has(metric.key) else [(values, 1.0)]
            if known and metric is LOSS and is_long:
                known = [(smooth(values), 1.0), (values, 0.3)]
            for y, opacity in known:
                x, mode = numbers(run.column("step")[shown]), "lines" if is_long else "lines+markers"
                out.add_trace(
                    go.Scatter(
                        x=x, y=numbers(y[shown]), mode=mode, opacity=opacity, line=line, name=html.escape(name), **label
                    ),
                    **at,
                )
            if metric is LOSS and run.evaluations:
                places, held_out = (numbers(column(run.evaluations, key)) for key in ("step", "eval_loss"))
                diamonds = {"mode": "markers", "marker": {"symbol": "diamond", "size": 9, "color": look["color"]}}
                diamonds["name"] = html.escape(f"{run.label}, evaluation")
                out.add_trace(go.Scatter(x=places, y=held_out, **diamonds, **label), **at)
        limits = span_of(losses(runs)) if metric is LOSS else (0, usual_top([metric.column(run) for run in runs]))
        out.update_yaxes(title_text=metric.unit.partition(" (")[0], range=limits, **at)
    for group in groups:
        next(trace for trace in out.data if trace.legendgroup == group).showlegend = True
    out.update_yaxes(nticks=MAX_TICKS, exponentformat="none", separatethousands=True)
    out.update_xaxes(title_text="training step", showticklabels=True, nticks=MAX_TICKS, ticklabelstandoff=4)
    lengths = [run.last_step for run in runs]
    if max(lengths) > 20 * min(lengths):
        out.update_xaxes(type="log", dtick=1, exponentformat="none")
    elif max(lengths) <= MAX_TICKS:
        out.update_xaxes(dtick=1)  # no half steps
    legend_rows = -(-len(groups) // max(1, 150 // (8 + max(map(len, groups)))))
    legend = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0}
    margin, hover = {"l": 60, "r": 40, "t": 40, "b": 60}, {"namelength": -1}
    out.update_layout(template=PLOTLY, height=320 * rows + 20 * legend_rows, legend=legend, margin=margin)
    return out.update_layout(modebar={"orientation": "v"}, hoverlabel=hover)


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
