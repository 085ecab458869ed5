"""Attention benchmark: `python3 -m analysis attention FILE...` plots TFLOP/s by length and prints a table."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightseq.config.lengths import format_tokens

from .benchmark import Benchmark, LengthTable, group_by
from .drawing import GREY, Point, draw_line, length_axis, new_figure, ranges, subtitle
from .records import Record

CEILING = "single-gpu"  # the kernel on one GPU, an upper bound for every implementation
OURS = "lightseq"
# Must be equal in one table.
SETTING = ("heads", "kv_heads", "head_dim", "dtype", "batch", "world", "documents", "window", "device")
KEYS = (
    *("implementation", "request", "kernel", "transport", "length", "skipped", "seconds_min", "seconds_median"),
    *("seconds_max", "tflops_per_gpu"),
)
# A color per family, a marker per line. lightseq has the widest lines; the ceiling is black and dashed.
FAMILY_COLORS: Mapping[str, str] = {
    "ulysses": "#E69F00",
    "torch-cp": "#009E73",
    "ring-flash-attn": "#CC79A7",
    "ringmaster": "#8C8C8C",
}
OUR_COLORS = ("#0072B2", "#D55E00", "#56B4E9")
OTHER_COLOR = "#7A5195"
MARKERS = "os^Dv<>PX"


class AttentionTable(LengthTable):
    """Records of one setting in order of length, and the ceiling, which was measured on one GPU."""

    @property
    def title(self) -> str:
        s = self.setting
        batch = f", batch {s['batch']}" if s["batch"] > 1 else ""
        documents = f", documents {s['documents']}" if s["documents"] else ""
        window = f", window {s['window']:,}" if s["window"] else ""
        heads = f"{s['heads']}/{s['kv_heads']} heads of {s['head_dim']}"
        return f"{s['world']} × {s['device']}, {heads}, {s['dtype']}{batch}{documents}{window}"

    def by_label(self, records: Iterable[Record]) -> dict[str, list[Record]]:
        """Returns records by label: the ceiling first, then by speed at the longest length."""
        found = {label: records for (label,), records in group_by(records, ("label",)).items()}

        def slowness(label: str) -> tuple[bool, list[float]]:
            rates = {record["length"]: record["tflops_per_gpu"] or 0.0 for record in found[label]}
            order = [-rates.get(length, 0.0) for length in reversed(self.lengths)]
            return found[label][0]["implementation"] != CEILING, order

        return {label: found[label] for label in sorted(found, key=slowness)}

    def spread(self, record: Record) -> float:
        return float((record["seconds_max"] - record["seconds_min"]) / record["seconds_median"])

    def table_rows(self) -> list[list[str]]:
        """Returns a header row and a row per label, with a column per length."""

        def cell(record: Record | None) -> str:
            if record is None:
                return ""
            return "–" if record["skipped"] else number(record["tflops_per_gpu"])

        rows = [["TFLOP/s per GPU", *map(format_tokens, self.lengths)]]
        return rows + [
            [label, *(cell(self.at(length, label)) for length in self.lengths)] for label in self.by_label(self.records)
        ]

    def figure(self) -> Figure | None:
        """Plots TFLOP/s by length, as bars if there is one length."""
        lines = self.by_label(self.measured)
        if not lines:
            return None
        is_one_length = len(self.lengths) == 1
        out = new_figure(11, 1.8 + 0.42 * len(lines) if is_one_length else max(7.5, 2.5 + 0.26 * len(lines)))
        axes = out.subplots()
        if is_one_length:
            draw_bars(axes, lines)
            over = f" over {format_tokens(self.lengths[0])} tokens"
            axes.set(xlabel="TFLOP/s per GPU, counting the causal half")
        else:
            draw_lines(axes, lines)
            over = ""
            axes.set(ylabel="TFLOP/s per GPU, counting the causal half", ylim=(0, None))
            length_axis(axes, self.lengths)
            out.legend(loc="outside right upper", labelspacing=0.7)
        axes.set_title(f"Attention layer{over}, forward and backward")
        subtitle(out, self.title)
        return out


def tables_of(records: Iterable[Record]) -> list[AttentionTable]:
    """Returns one table per setting. Later records replace earlier ones of the same line and length.

    Every table has the ceiling, which was measured on one GPU.
    """
    found = group_by(records, SETTING)
    alone = {key for key, mine in found.items() if all(record["implementation"] == CEILING for record in mine)}
    tables = []
    for key in sorted(found.keys() - alone or alone):
        setting = dict(zip(SETTING, key, strict=True))
        ceiling = found.get(tuple({**setting, "world": 1}.values()), [])
        mine = [record for record in ceiling if record["implementation"] == CEILING]
        mine += [record for record in found[key] if record["implementation"] != CEILING]
        labeled = [{**record, "label": label_of(record, mine)} for record in mine]
        points = {(record["label"], record["length"]): record for record in labeled}
        tables.append(AttentionTable(setting, sorted(points.values(), key=lambda record: int(record["length"]))))
    return tables


def label_of(record: Record, records: Sequence[Record]) -> str:
    """Returns a line's label. It names kernel and transport only if the implementation ran with several."""
    name, kernel, transport = (record[key] for key in ("implementation", "kernel", "transport"))
    if name not in (CEILING, OURS):
        return str(name)
    mine = [other for other in records if other["implementation"] == name and not other["skipped"]]
    several_kernels = len({other["kernel"] for other in mine}) > 1
    several_transports = len({other["transport"] for other in mine}) > 1
    words = ["one GPU" if name == CEILING else f"{OURS} {record['request']}"]
    words += [kernel] if kernel and (name == CEILING or several_kernels) else []
    words += [transport] if transport and several_transports else []
    return ", ".join(words)


# ---- the figure -----------------------------------------------------------------------------------------------------


def draw_lines(axes: Axes, lines: Mapping[str, Sequence[Record]]) -> None:
    for (label, records), look in zip(lines.items(), looks(lines.values()), strict=True):
        draw_line(axes, list(map(point, records)), label, markeredgecolor="white", markeredgewidth=0.6, **look)


def draw_bars(axes: Axes, lines: Mapping[str, Sequence[Record]]) -> None:
    """Plots one length as bars, the fastest at the top, with the ceiling as a line across all bars."""
    for label, records in lines.items():
        (look,) = looks([records])  # all bars of a family share a color
        rate = records[0]["tflops_per_gpu"]
        bars = {"xerr": ranges([point(records[0])]), "ecolor": GREY, "capsize": 3}
        axes.barh(label, rate, 0.7, color=look["color"], **bars)
        axes.annotate(number(rate), (0, label), (6, 0), textcoords="offset points", va="center", color="white")
        if records[0]["implementation"] == CEILING:
            axes.axvline(rate, color="black", linestyle="--", linewidth=1.2, zorder=4)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def point(record: Record) -> Point:
    """Returns the median rate, and the rates of the slowest and the fastest repeat."""
    rate, median = record["tflops_per_gpu"], record["seconds_median"]
    return Point(record["length"], rate, rate * median / record["seconds_max"], rate * median / record["seconds_min"])


def looks(lines: Iterable[Sequence[Record]]) -> list[dict[str, Any]]:
    """Returns color, marker and width of each line by its family and its place in the family."""
    counts: dict[str, int] = {}
    out: list[dict[str, Any]] = []
    for records in lines:
        name = str(records[0]["implementation"])
        family = next((family for family in FAMILY_COLORS if name.startswith(family)), name)
        i = counts[family] = counts.get(family, -1) + 1
        look = {"color": FAMILY_COLORS.get(family, OTHER_COLOR), "linewidth": 1.3, "markersize": 6, "zorder": 2}
        if family == CEILING:
            look |= {"color": "black", "linestyle": "--", "markersize": 4, "linewidth": 1.8}
        elif family == OURS:
            look |= {"color": OUR_COLORS[i % len(OUR_COLORS)], "linewidth": 2.0, "markersize": 7, "zorder": 3}
            i //= len(OUR_COLORS)
        out.append({**look, "marker": MARKERS[i % len(MARKERS)]})
    return out


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


BENCHMARK = Benchmark(
    name="attention",
    title="Attention layer, forward and backward",
    program="benchmarks/attention.py without --check",
    keys={"attention": (), None: (*SETTING, *KEYS)},
    group=tables_of,
    defaults={"documents": "", "window": 0},  # one document, no window
)
main = BENCHMARK.main
