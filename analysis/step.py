"""Benchmark of training steps: `python3 -m analysis step FILE...` plots tokens/s and memory by length."""

import textwrap
from collections.abc import Callable, Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightseq.config.lengths import format_tokens

from .benchmark import BASELINE, Benchmark, LengthTable, group_by, place, shades
from .drawing import Point, draw_bars, new_figure, subtitle, value_axis
from .output import GIB
from .records import Record

# Must be equal in one table.
SETTING = ("model", "layers", "world", "packed_rows", "lora_rank", "dtype", "device")
KEYS = (
    *("implementation", "label", "length", "skipped", "tokens_per_second", "tokens_per_second_lowest"),
    *("tokens_per_second_highest", "mfu", "model_tflops_per_gpu", "peak_memory_allocated_bytes", "first_loss"),
    *("last_loss", "losses_finite"),
)


class StepTable(LengthTable):
    """Records of one setting by length: within a length the fastest first, skipped ones last."""

    @property
    def title(self) -> str:
        s = self.setting
        parts = [f"{s['model']}, {s['layers']} layers, {s['world']} × {s['device']}, {s['dtype']}"]
        if s["packed_rows"]:
            parts.append(f"packed documents of {format_tokens(s['packed_rows'])}")
        if s["lora_rank"]:
            parts.append(f"LoRA of rank {s['lora_rank']}")
        return ", ".join(parts)

    def spread(self, record: Record) -> float:
        rates = [record[f"tokens_per_second{end}"] for end in ("_highest", "_lowest", "")]
        return float((rates[0] - rates[1]) / rates[2])

    def speedup(self, record: Record) -> float | None:
        """Returns tokens per second divided by the baseline's."""
        baseline = self.at(record["length"], BASELINE)
        rate, reference = record["tokens_per_second"], baseline["tokens_per_second"] if baseline else None
        return rate / reference if rate and reference else None

    def table_rows(self) -> list[list[str]]:
        """Returns a header row and a row per record, the fastest of a length first."""
        on_gpu = any(record["mfu"] is not None for record in self.records)
        rows = [["", "tokens", "tokens/s", f"÷ {BASELINE}", "MFU" if on_gpu else "model TFLOP/s per GPU", "peak GiB"]]
        for record in self.records:
            cells = ["–", "", "", ""]
            if record["tokens_per_second"] is not None:
                speedup, memory = self.speedup(record), record["peak_memory_allocated_bytes"]
                mfu = f"{record['mfu']:.1%}" if record["mfu"] is not None else ""
                cells = [
                    f"{record['tokens_per_second']:,.0f}",
                    "" if speedup is None else f"{speedup:.2f}",
                    mfu if on_gpu else f"{record['model_tflops_per_gpu'] or 0.0:.2g}",
                    f"{memory / GIB:.1f}" if memory else "",
                ]
            rows.append([record["label"], format_tokens(record["length"]), *cells])
        return rows

    def remarks_on_losses(self) -> list[str]:
        """Returns the range of the last losses, and losses that are not finite."""
        out = []
        for length in self.lengths:
            losses = [record["last_loss"] for record in self.measured if record["length"] == length]
            known = [loss for loss in losses if loss is not None]
            if len(known) > 1:
                out.append(f"Last losses at {format_tokens(length)}: {min(known):.4f} to {max(known):.4f}.")
        broken = [record for record in self.measured if record["losses_finite"] is False]
        return out + [f"Not finite: losses of {place(record)}. Ignore its numbers." for record in broken]

    def figure(self) -> Figure:
        """Plots tokens per second by length, and peak memory if it is known."""
        panels = 1 + any(record["peak_memory_allocated_bytes"] for record in self.records)
        out = new_figure(8.5 if panels == 1 else 11, 4)
        left, *right = out.subplots(1, panels, squeeze=False, sharey=True)[0]
        left.set(title="Whole training steps", xlabel="tokens per second, all GPUs")
        self.draw(left, throughput)
        for axes in right:
            axes.set(title="Peak memory", xlabel="GiB per GPU")
            self.draw(axes, memory)
        subtitle(out, self.title, "Medians; whiskers from the slowest to the fastest step")
        return out

    def draw(self, axes: Axes, point: Callable[[Record], Point]) -> None:
        """Plots the bars of each length, in the order of the table."""
        groups = {
            f"{format_tokens(length)} tokens": {r["label"]: point(r) for r in self.records if r["length"] == length}
            for length in self.lengths
        }
        draw_bars(axes, groups, shades(self.records))
        values = np.array([each.value for points in groups.values() for each in points.values()])
        value_axis(axes, values[np.isfinite(values)], may_be_logarithmic=True)


def throughput(record: Record) -> Point:
    if record["skipped"]:
        return Point(record["length"], np.nan, np.nan, np.nan, textwrap.shorten(record["skipped"], 40))
    rates = [record[f"tokens_per_second{end}"] for end in ("", "_lowest", "_highest")]
    return Point(record["length"], *rates)


def memory(record: Record) -> Point:
    size = (record["peak_memory_allocated_bytes"] or np.nan) / GIB
    return throughput(record)._replace(value=size, low=size, high=size)


def tables_of(records: Iterable[Record]) -> list[StepTable]:
    """Returns one table per setting. Later records replace earlier ones of the same label and length."""

    def order(record: Record) -> tuple[int, float, str]:
        return record["length"], -(record["tokens_per_second"] or 0.0), record["label"]

    found = group_by(records, SETTING)
    tables = []
    for key in sorted(found, key=lambda key: [value or 0 for value in key]):
        points = {(record["label"], record["length"]): record for record in found[key]}
        tables.append(StepTable(dict(zip(SETTING, key, strict=True)), sorted(points.values(), key=order)))
    return tables


BENCHMARK = Benchmark(
    name="step",
    title="Whole training steps",
    program="benchmarks/step.py",
    keys={"step": (*SETTING, *KEYS)},
    group=tables_of,
    defaults={"packed_rows": None, "lora_rank": None},
)
main = BENCHMARK.main
