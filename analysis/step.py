"""Benchmark of training steps: `python3 -m analysis step FILE...` plots tokens/s and memory by length."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from lightseq.config.lengths import format_tokens

from .benchmark import Benchmark
from .drawing import (
    GIB,
    GREY,
    new_figure,
    round_log_ticks,
    subtitle,
)
from .records import Record, read_lines

OURS = "lightseq"
BASELINE = "plain"
# Must be equal in one table.
SETTING = ("model", "layers", "world", "packed_rows", "lora_rank", "dtype", "device")
KEYS = (
    *("implementation", "label", "length", "skipped", "tokens_per_second", "tokens_per_second_lowest"),
    *("tokens_per_second_highest", "mfu", "model_tflops_per_gpu", "peak_memory_allocated_bytes", "first_loss"),
    *("last_loss", "losses_finite"),
)
COLORS = {
    OURS: "#0072B2",
    BASELINE: "#E69F00",
    "accelerate": "#009E73",
    "deepspeed": "#CC79A7",
    "deepspeed-offload": "#AA4499",
    "autosp": "#882255",
    "trl": "#56B4E9",
    "unsloth": "#D55E00",
}
OTHER_COLOR = "#7A5195"
GROUP_WIDTH = 0.86  # of the space between two lengths
WIDE_RANGE = 20.0  # highest over lowest value from which the axis is logarithmic


@dataclass(frozen=True)
class Comparison:
    """Comparable records by length: within a length the fastest first, skipped ones last."""

    setting: Mapping[str, Any]
    steps: Sequence[Record]

    @property
    def title(self) -> str:
        s = self.setting
        parts = [f"{s['model']}, {s['layers']} layers, {s['world']} × {s['device']}, {s['dtype']}"]
        if s["packed_rows"]:
            parts.append(f"packed documents of {format_tokens(s['packed_rows'])}")
        if s["lora_rank"]:
            parts.append(f"LoRA of rank {s['lora_rank']}")
        return ", ".join(parts)

    @property
    def lengths(self) -> list[int]:
        return sorted({step["length"] for step in self.steps})

    @property
    def labels(self) -> list[str]:
        """Labels in the order of bars: lightseq, the baseline, the others."""
        names = {step["label"]: step["implementation"] for step in self.steps}
        rank = {OURS: 0, BASELINE: 1}
        return sorted(names, key=lambda label: (rank.get(names[label], 2), names[label], len(label), label))

    def at(self, length: int, label: str) -> Record | None:
        return next((step for step in self.steps if (step["length"], step["label"]) == (length, label)), None)

    def speedup(self, step: Record) -> float | None:
        """Returns tokens per second divided by the baseline's."""
        baseline = self.at(step["length"], BASELINE)
        rate, reference = step["tokens_per_second"], baseline["tokens_per_second"] if baseline else None
        return rate / reference if rate and reference else None


# ---- the records ----------------------------------------------------------------------------------------------------


def read_steps(path: Path, notes: list[str]) -> list[Record]:
    return read_lines(path, check_record, notes)


def check_record(record: Record) -> Record:
    if record.get("benchmark") != "step":
        raise ValueError("is not a record of benchmarks/step.py")
    device = dict(record.get("hardware") or {}).get("device", "unknown device")
    record = {"device": device, "packed_rows": None, "lora_rank": None, **record}  # older records lack the last two
    if missing := [key for key in (*SETTING, *KEYS) if key not in record]:
        raise ValueError(f"has no {missing[0]!r}; it should be a record of benchmarks/step.py")
    return record


def compare(records: Iterable[Record]) -> list[Comparison]:
    """Returns one comparison per setting. Later records replace earlier ones of the same label and length."""
    found: dict[tuple[Any, ...], dict[tuple[int, str], Record]] = {}
    for record in records:
        setting = tuple(record[key] for key in SETTING)
        found.setdefault(setting, {})[record["length"], record["label"]] = record

    def order(step: Record) -> tuple[int, float, str]:
        return step["length"], -(step["tokens_per_second"] or 0.0), step["label"]

    return [
        Comparison(dict(zip(SETTING, setting, strict=True)), sorted(found[setting].values(), key=order))
        for setting in sorted(found, key=lambda setting: [value or 0 for value in setting])
    ]


def memory_gib(step: Record) -> float | None:
    size = step["peak_memory_allocated_bytes"]
    return size / GIB if size else None


def error_bar(step: Record) -> tuple[float, float]:
    """Returns the distances of the slowest and fastest steps from the median, in tokens per second."""
    rate = step["tokens_per_second"]
    return rate - step["tokens_per_second_lowest"], step["tokens_per_second_highest"] - rate


def spread(step: Record) -> float:
    """Returns fastest minus slowest, as a share of the median."""
    return sum(error_bar(step)) / float(step["tokens_per_second"])


# ---- the table ------------------------------------------------------------------------------------------------------


def table_rows(comparison: Comparison) -> list[list[str]]:
    """Returns a header row and a row per record, the fastest of a length first."""
    on_gpu = any(step["mfu"] is not None for step in comparison.steps)
    rows = [["", "tokens", "tokens/s", f"÷ {BASELINE}", "MFU" if on_gpu else "model TFLOP/s per GPU", "peak GiB"]]
    for step in comparison.steps:
        cells = ["–", "", "", ""]
        if step["tokens_per_second"] is not None:
            speedup, memory = comparison.speedup(step), memory_gib(step)
            mfu = f"{step['mfu']:.1%}" if step["mfu"] is not None else ""
            cells = [
                f"{step['tokens_per_second']:,.0f}",
                "" if speedup is None else f"{speedup:.2f}",
                mfu if on_gpu else f"{step['model_tflops_per_gpu'] or 0.0:.2g}",
                "" if memory is None else f"{memory:.1f}",
            ]
        rows.append([step["label"], format_tokens(step["length"]), *cells])
    return rows


def remarks(comparison: Comparison) -> list[str]:
    """Returns the spread of times, the range of losses, and reasons for missing numbers."""
    measured = [step for step in comparison.steps if step["tokens_per_second"] is not None]
    out = []
    if measured:
        widest = max(measured, key=spread)
        out.append(f"Medians. Widest spread: {spread(widest):.1%} of the median ({place(widest)}).")
    for length in comparison.lengths:
        losses = [step["last_loss"] for step in measured if step["length"] == length]
        known = [loss for loss in losses if loss is not None]
        if len(known) > 1:
            out.append(f"Last losses at {format_tokens(length)}: {min(known):.4f} to {max(known):.4f}.")
    for step in measured:
        if step["losses_finite"] is False:
            out.append(f"Not finite: losses of {place(step)}. Ignore its numbers.")
    return out + [f"– {place(step)}: {step['skipped']}" for step in comparison.steps if step["skipped"]]


def place(step: Record) -> str:
    return f"{step['label']}, {format_tokens(step['length'])}"


# ---- the figure -----------------------------------------------------------------------------------------------------


def figure(comparison: Comparison) -> Figure:
    """Plots tokens per second by length, and peak memory if it is known."""
    panels = 1 + any(map(memory_gib, comparison.steps))
    bars = len(comparison.labels) * len(comparison.lengths)
    out = new_figure(max(5.5, 2.0 + 0.5 * bars) * panels, 5.2)
    throughput, *memory = out.subplots(1, panels, squeeze=False)[0]
    throughput.set_title("Whole training steps", loc="left")
    throughput.set_ylabel("tokens per second, all GPUs")
    draw_bars(throughput, comparison, lambda step: step["tokens_per_second"], error_bar)
    for axes in memory:
        axes.set_title("Peak memory", loc="left")
        axes.set_ylabel("GiB per GPU")
        draw_bars(axes, comparison, memory_gib, lambda step: (0.0, 0.0))
    handles, labels = throughput.get_legend_handles_labels()
    out.legend(handles, labels, loc="outside lower left", ncols=min(len(labels), 4))
    subtitle(out, comparison.title)
    return out


def draw_bars(
    axes: Axes,
    comparison: Comparison,
    value: Callable[[Record], float | None],
    error: Callable[[Record], tuple[float, float]],
) -> None:
    """Plots a group of bars per length. A skipped record shows its reason."""
    labels, lengths = comparison.labels, comparison.lengths
    width = GROUP_WIDTH / len(labels)
    logarithmic = set_scale(axes, [v for step in comparison.steps if (v := value(step))])
    for i, (label, color) in enumerate(zip(labels, colors(comparison), strict=True)):
        for group, length in enumerate(lengths):
            x = group + (i - (len(labels) - 1) / 2) * width
            step = comparison.at(length, label)
            height = value(step) if step else None
            axes.bar(x, height or 0.0, 0.94 * width, color=color, label=label if group == 0 else None)
            if step and height:
                label_bar(axes, x, height, *error(step))
            elif step and step["skipped"]:
                reason = step["skipped"] if len(step["skipped"]) < 20 else "skipped"
                foot = axes.get_ylim()[0]
                axes.text(x, foot, f"  {reason}", rotation=90, ha="center", va="bottom", fontsize=8.5, color=GREY)
    axes.set_xlabel("tokens in the sequence")
    axes.set_xticks(range(len(lengths)), [format_tokens(length) for length in lengths])
    axes.grid(axis="x", visible=False)
    if not logarithmic and axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def set_scale(axes: Axes, known: Sequence[float]) -> bool:
    """Starts the axis at zero, or makes it logarithmic if the lowest bars would vanish. Returns True if logarithmic."""
    if not known:
        return False
    logarithmic = max(known) > WIDE_RANGE * min(known)
    if logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(min(known) / 3, 2 * max(known))
        round_log_ticks(axes.yaxis, "{:,g}".format)
    else:
        axes.set_ylim(0, 1.15 * max(known))
    return logarithmic


def label_bar(axes: Axes, x: float, height: float, below: float, above: float) -> None:
    """Labels a bar with its value and adds an error bar from the slowest to the fastest step."""
    if below + above > 0:
        axes.errorbar(x, height, [[below], [above]], fmt="none", ecolor="black", elinewidth=1.0, capsize=2)
    top = (x, height + above)
    axes.annotate(number(height), top, (0, 4), textcoords="offset points", ha="center", fontsize=8.5)


def number(value: float) -> str:
    """Returns three digits, such as 50.8k."""
    thousands = value >= 1000
    return f"{value / 1000 if thousands else value:#.3g}".removesuffix(".") + ("k" if thousands else "")


def colors(comparison: Comparison) -> list[tuple[float, float, float]]:
    """Returns a color per label: that of its implementation, paler for each further label."""
    implementations = {step["label"]: step["implementation"] for step in comparison.steps}
    counts: dict[str, int] = {}
    out = []
    for label in comparison.labels:
        implementation = implementations[label]
        i = counts[implementation] = counts.get(implementation, -1) + 1
        red, green, blue = (x + (1 - x) * (1 - 0.7**i) for x in to_rgb(COLORS.get(implementation, OTHER_COLOR)))
        out.append((red, green, blue))
    return out


BENCHMARK = Benchmark(
    name="step",
    title="Whole training steps",
    description="Plots tokens per second and peak memory by length",
    read=read_steps,
    group=compare,
    figure=figure,
    table_rows=table_rows,
    remarks=remarks,
)
