"""Draws what one layer's attention runs beside: `python3 -m analysis profile OUTPUT_DIR --timeline`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightseq.profiling.trace import KINDS, Span

from .figures import COLORS, GREY, STYLE

NAMES: Final = tuple(name for name, _ in KINDS)
WAITS: Final = "waits"  # of the exchange, told apart by their kernel's name
# From top to bottom, what each lane holds; kernels first, what should hide beneath them after.
LANES: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("attention, forward", "attention, backward"),
    "matrix products": ("matrix products",),
    "other kernels": (
        "loss", "MLP's product", "optimizer, norm, clip", "compiled layers' glue", "weights: cast and join",
        "other kernels",
    ),
    "attention's exchange": ("attention's exchange",),
    "waits for other ranks": (WAITS,),
    "collectives": ("collectives",),
    "host copies": ("host copies",),
}  # fmt: skip
KERNELS: Final = 3  # lanes of them
MOVING: Final = ("attention's exchange", "collectives")
MARGIN: Final = 0.05  # of the time between two products, shown before and after it


@dataclass(frozen=True)
class Window:
    """A stretch of a trace, in microseconds."""

    title: str
    start: float
    end: float

    def cut(self, spans: Sequence[Span]) -> list[Span]:
        return [span for span in spans if span.end > self.start and span.start < self.end]


def windows(spans: Sequence[Span]) -> list[Window]:
    """A layer in the middle, forward and backward: what lies between two matrix products around its attention, or, in
    traces of attention alone, between the passes before and after.

    Raises ValueError where there is no attention.
    """
    found = []
    for word, other in (("forward", "backward"), ("backward", "forward")):
        borders = [NAMES.index(name) for name in ("matrix products", f"attention, {other}")]
        layers = attentions(spans, NAMES.index(f"attention, {word}"), borders)
        if layers:
            start, end = between(spans, *layers[len(layers) // 2], borders)
            margin = MARGIN * (end - start)
            found.append(Window(f"A layer's attention, {word}", start - margin, end + margin))
    if not found:
        raise ValueError(
            "the trace has no attention kernel that is known by its name; see KINDS in lightseq.profiling.trace"
        )
    return found


def attentions(spans: Sequence[Span], kind: int, borders: Sequence[int]) -> list[tuple[float, float]]:
    """Start and end of each layer's: kernels of that kind between which none of the kinds of `borders` begins."""
    found: list[tuple[float, float]] = []
    together = False
    for span in spans:
        if span.kind == kind:
            start, end = found.pop() if together else (span.start, span.end)
            found.append((start, max(end, span.end)))
            together = True
        elif span.kind in borders:
            together = False
    return found


def between(spans: Sequence[Span], start: float, end: float, borders: Sequence[int]) -> tuple[float, float]:
    """From the last border before a layer's attention to the first one after, as far as there are such."""
    around = [span for span in spans if span.kind in borders]
    before = [span.end for span in around if span.end <= start]
    after = [span.start for span in around if span.start >= end]
    return max(before, default=start), min(after, default=end)


def name_of(span: Span) -> str:
    """Its kind; the kernels in which the exchange waits for other ranks by themselves."""
    return WAITS if "symmetric_memory" in span.name else NAMES[span.kind]


def shares(spans: Sequence[Span], window: Window, what: Sequence[str] = MOVING) -> tuple[float, float]:
    """Milliseconds of the window with any of `what`, and of those the ones beside no kernel."""
    kernels = {name for lane in [*LANES.values()][:KERNELS] for name in lane}
    edges = []
    for span in window.cut(spans):
        group = 0 if name_of(span) in kernels else 1 if name_of(span) in what else None
        if group is not None:
            edges += [(max(span.start, window.start), group, 1), (min(span.end, window.end), group, -1)]
    busy, before, total, bare = [0, 0], window.start, 0.0, 0.0
    for at, group, change in sorted(edges):
        total += (at - before) * (busy[1] > 0)
        bare += (at - before) * (busy[1] > 0 and not busy[0])
        before = at
        busy[group] += change
    return total / 1e3, bare / 1e3


def figure(spans: Sequence[Span], title: str) -> Figure:
    shown = windows(spans)
    with matplotlib.rc_context(dict(STYLE)):
        out = Figure(figsize=(11, 0.6 + 2.9 * len(shown)), layout="constrained")
        out.suptitle(title, x=0.01, ha="left", fontsize=10, color=GREY)
        for axes, window in zip(out.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
            draw(axes, window, spans)
    return out


def draw(axes: Axes, window: Window, spans: Sequence[Span]) -> None:
    """A lane a kind of work; time begins with the window."""
    cut = window.cut(spans)
    for place, kinds in enumerate(LANES.values()):
        edges = [(max(s.start, window.start), min(s.end, window.end)) for s in cut if name_of(s) in kinds]
        bars = [((start - window.start) / 1e3, (end - start) / 1e3) for start, end in edges]
        axes.broken_barh(bars, (place - 0.38, 0.76), facecolors=COLORS[place], linewidth=0)
    (moving, bare), (_, waiting) = shares(spans, window), shares(spans, window, [WAITS])
    said = (
        f"{moving:.1f} ms of communication, {bare:.1f} of it beside no kernel; {waiting:.1f} ms waiting for other ranks"
    )
    axes.set_title(window.title, loc="left")
    axes.set_title(said, loc="right", fontsize=10, fontweight="normal")
    axes.set_yticks(range(len(LANES)), list(LANES))
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.set_xlim(0, (window.end - window.start) / 1e3)
    axes.set_xlabel("ms")
    axes.grid(axis="y", visible=False)
