"""Attention benchmark: `python3 -m analysis attention FILE...` plots TFLOP/s by length and prints a table."""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.figure import Figure

from lightseq.config.lengths import format_tokens

from .benchmark import CEILING, OURS, Benchmark, LengthTable, group_by, shades
from .drawing import Point, draw_bars, draw_line, label_lines, length_axis, new_figure, subtitle, value_axis
from .records import Record
from .style import GREY, THIN, WIDE, looks

# Must be equal in one table.
SETTING = ("heads", "kv_heads", "head_dim", "dtype", "batch", "world", "documents", "window", "device")
KEYS = (
    *("implementation", "request", "kernel", "transport", "length", "skipped", "seconds_min", "seconds_median"),
    *("seconds_max", "tflops_per_gpu"),
)
RATE = "TFLOP/s per GPU, counting the causal half"


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
        out = new_figure(8, 5)
        axes = out.subplots()
        if len(self.lengths) == 1:
            bars = {f"{format_tokens(self.lengths[0])} tokens": {key: point(mine[0]) for key, mine in lines.items()}}
            axes.set(xlabel=RATE)
            draw_bars(axes, bars, shades(self.measured))
            value_axis(axes, np.array([r["tflops_per_gpu"] for r in self.measured]), may_be_logarithmic=False)
            for record in self.measured:
                if record["implementation"] == CEILING:
                    axes.axvline(record["tflops_per_gpu"], color=GREY, linestyle="--", linewidth=1.2, zorder=0)
        else:
            axes.set(ylabel=RATE)
            for (label, records), look in zip(lines.items(), looks([[label] for label in lines]), strict=True):
                if records[0]["implementation"] == CEILING:
                    look |= {"color": GREY, "linestyle": "--"}
                is_ours = records[0]["implementation"] == OURS
                draw_line(axes, list(map(point, records)), label, **look, linewidth=WIDE if is_ours else THIN)
            axes.set_ylim(0)
            length_axis(axes, self.lengths)
            label_lines(axes)
        axes.set_title("Attention layer, forward and backward")
        subtitle(out, self.title, "Medians; whiskers from the slowest to the fastest repeat")
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


def point(record: Record) -> Point:
    """Returns the median rate, and the rates of the slowest and the fastest repeat."""
    rate, median = record["tflops_per_gpu"], record["seconds_median"]
    return Point(record["length"], rate, rate * median / record["seconds_max"], rate * median / record["seconds_min"])


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
