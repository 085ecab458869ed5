"""Figures of many runs: curves by step, lines and bars by setting."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from lightseq.config.lengths import format_tokens

from .drawing import LOG_FROM, SMALL_TITLE, Point, draw_bars, draw_curve, draw_line, step_axis
from .metrics import Metric
from .runs import Run, phrase
from .style import looks

# Labels of the horizontal axis; others are the setting's name.
LABELS: Mapping[str, str] = {
    "model_max_length": "tokens in the sequence",
    "tokens_per_rank": "tokens per rank",
    "world_size": "ranks (GPUs, or processes on a CPU)",
    "per_device_train_batch_size": "batch, sequences per rank",
    "scaling_factor": "scaling factor of the model, 1 is the smallest",
}
COINCIDE = 0.01  # of the axis; closer curves are one stroke


def draw_steps(axes: Axes, groups: Mapping[tuple[str, ...], Sequence[Run]], metric: Metric) -> None:
    """Plots a curve per run, with markers on different steps, and says how far curves are apart that coincide."""
    step_axis(axes)
    for place, ((name, runs), look) in enumerate(zip(groups.items(), looks(list(groups)), strict=True)):
        for run in runs:
            label = ", ".join(name) if run is runs[0] else None
            look |= {"place": place, "count": len(groups), "label": label}
            draw_curve(axes, run.column("step"), metric.column(run), **look)
    curves = [dict(line.get_xydata().tolist()) for line in axes.lines]
    common = set.intersection(*map(set, curves))
    values = np.array([[curve[step] for step in common] for curve in curves])
    if len(curves) > 1 and np.isfinite(values).all() and values.size:
        apart = float(np.ptp(values, axis=0).max())
        if apart < COINCIDE * np.ptp(values):
            text = f"at most {apart:.2g} apart" if apart else "equal"
            axes.set_title(f"{len(curves)} curves: {text}", **SMALL_TITLE)


def draw_settings(axes: Axes, key: str, groups: Mapping[tuple[str, ...], Sequence[Point]]) -> None:
    """Plots lines over a numeric setting, and bars otherwise."""
    places = sorted({point.x for points in groups.values() for point in points}, key=number_first)
    names = {", ".join(name): points for name, points in groups.items()}
    styles = dict(zip(names, looks(list(groups)), strict=True))
    if len(places) == 1 or not all(map(is_number, places)):
        bars: dict[str, dict[str, Point]] = {}
        for place in places:
            heading = phrase(key, place) if len(names) > 1 else ""
            found = {name: point for name, points in names.items() for point in points if point.x == place}
            bars.setdefault(heading, {}).update(found if heading else {phrase(key, place): found[next(iter(names))]})
        draw_bars(axes, bars, {name: look["color"] for name, look in styles.items()})
        return
    for name, points in names.items():
        draw_line(axes, sorted(point._replace(x=float(point.x)) for point in points), name, **styles[name])
    axes.set_xlabel(LABELS.get(key, key.replace("_", " ")))
    if 0 < LOG_FROM * float(places[0]) <= float(places[-1]):
        axes.set_xscale("log", base=2)
    setting_ticks(axes, places)


def setting_ticks(axes: Axes, places: Sequence[str]) -> None:
    """Puts a tick at each value, and its text where there is room beside the text before it."""
    axes.autoscale_view()
    to_axes = axes.transScale + axes.transLimits
    texts, end = [], -1.0
    for place in places:
        text = tick(place)
        middle, half = to_axes.transform((float(place), 1.0))[0], 0.008 * len(text)
        texts.append(text if middle - half > end else "")
        end = middle + half if texts[-1] else end
    axes.set_xticks([float(place) for place in places], texts)
    axes.xaxis.set_minor_locator(NullLocator())


def tick(place: str) -> str:
    value = float(place)
    return format_tokens(int(value)) if value.is_integer() and value >= 1024 else f"{value:g}"


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def number_first(word: str) -> tuple[float, str]:
    """Sorts numbers by size, then words."""
    return (float(word), "") if is_number(word) else (np.inf, word)
