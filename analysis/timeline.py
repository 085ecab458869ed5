"""Timeline of one layer's attention and concurrent work from a trace: `analysis profile DIR --timeline`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightseq.profiling.trace import KINDS, Span

from .drawing import COLORS, GREY, new_figure

NAMES = tuple(name for name, _ in KINDS)
WAITS = "waits"  # for other ranks during the exchange, recognized by kernel name
KERNEL_LANES: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention, forward", "attention, backward"),
    "matrix products": ("matrix products",),
    "other kernels": (
        "loss", "MLP's product", "optimizer, norm, clip", "compiled layers' glue", "weights: cast and join",
        "other kernels",
    ),
}  # fmt: skip
HIDDEN_LANES: Mapping[str, tuple[str, ...]] = {  # should overlap with kernels
    "attention's exchange": ("attention's exchange",),
    "waits for other ranks": (WAITS,),
    "collectives": ("collectives",),
    "host copies": ("host copies",),
}
LANES = {**KERNEL_LANES, **HIDDEN_LANES}
COMMUNICATION = ("attention's exchange", "collectives")
MARGIN = 0.05  # share of the window shown before and after it


@dataclass(frozen=True)
class Window:
    """A time range of a trace, in microseconds."""

    title: str
    start: float
    end: float

    def cut(self, spans: Sequence[Span]) -> list[Span]:
        return [span for span in spans if span.end > self.start and span.start < self.end]


def windows(spans: Sequence[Span]) -> list[Window]:
    """Returns the middle layer's attention, forward and backward, from the previous matrix product to the next.

    In traces of attention only, a pass ends where the next begins. Raises ValueError if there is no attention.
    """
    found = []
    for word, other in (("forward", "backward"), ("backward", "forward")):
        borders = [NAMES.index(name) for name in ("matrix products", f"attention, {other}")]
        layers = attention_layers(spans, NAMES.index(f"attention, {word}"), borders)
        if layers:
            start, end = between_borders(spans, *layers[len(layers) // 2], borders)
            margin = MARGIN * (end - start)
            found.append(Window(f"A layer's attention, {word}", start - margin, end + margin))
    if not found:
        raise ValueError("the trace has no known attention kernel; see KINDS in lightseq.profiling.trace")
    return found


def attention_layers(spans: Sequence[Span], kind: int, borders: Sequence[int]) -> list[tuple[float, float]]:
    """Returns each layer's start and end. A layer ends where a kernel of the kinds `borders` starts."""
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


def between_borders(spans: Sequence[Span], start: float, end: float, borders: Sequence[int]) -> tuple[float, float]:
    """Extends a layer to the end of the border before it and the start of the border after it."""
    around = [span for span in spans if span.kind in borders]
    before = [span.end for span in around if span.end <= start]
    after = [span.start for span in around if span.start >= end]
    return max(before, default=start), min(after, default=end)


def name_of(span: Span) -> str:
    return WAITS if "symmetric_memory" in span.name else NAMES[span.kind]


def busy_ms(spans: Sequence[Span], window: Window, names: Sequence[str]) -> tuple[float, float]:
    """Returns milliseconds in which one of `names` runs, and the part of them in which no kernel runs."""
    kernels = {name for lane in KERNEL_LANES.values() for name in lane}
    edges = []
    for span in window.cut(spans):
        group = 0 if name_of(span) in kernels else 1 if name_of(span) in names else None
        if group is not None:
            edges += [(max(span.start, window.start), group, 1), (min(span.end, window.end), group, -1)]
    running, before, total, bare = [0, 0], window.start, 0.0, 0.0
    for at, group, change in sorted(edges):
        total += (at - before) * (running[1] > 0)
        bare += (at - before) * (running[1] > 0 and not running[0])
        before = at
        running[group] += change
    return total / 1e3, bare / 1e3


def figure(spans: Sequence[Span], title: str) -> Figure:
    found = windows(spans)
    out = new_figure(11, 0.6 + 2.9 * len(found))
    out.suptitle(title, x=0.01, ha="left", fontsize=10, color=GREY)
    for axes, window in zip(out.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        draw(axes, window, spans)
    return out


def draw(axes: Axes, window: Window, spans: Sequence[Span]) -> None:
    """Draws a lane per kind of work. Time zero is the start of the window."""
    inside = window.cut(spans)
    for place, names in enumerate(LANES.values()):
        edges = [(max(s.start, window.start), min(s.end, window.end)) for s in inside if name_of(s) in names]
        bars = [((start - window.start) / 1e3, (end - start) / 1e3) for start, end in edges]
        axes.broken_barh(bars, (place - 0.38, 0.76), facecolors=COLORS[place], linewidth=0)
    (total, bare), (_, waiting) = busy_ms(spans, window, COMMUNICATION), busy_ms(spans, window, [WAITS])
    text = f"{total:.1f} ms of communication, {bare:.1f} ms of it exposed; {waiting:.1f} ms waiting for other ranks"
    axes.set_title(window.title, loc="left")
    axes.set_title(text, loc="right", fontsize=10, fontweight="normal")
    axes.set_yticks(range(len(LANES)), list(LANES))
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.set_xlim(0, (window.end - window.start) / 1e3)
    axes.set_xlabel("ms")
    axes.grid(axis="y", visible=False)
