"""Knows what a page of results says of benchmarks: of the attention layer, of its errors, and of whole steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import attention, largest, step
from .blocks import Bar, Bars, Cell, Charts, Details, Entry, Lines, Part, Section, Series, Table, facts_of, number
from .jsonl import read_lines
from .points import Line, read_tables, shown
from .points import Table as Lengths
from .step_points import FLOOR, Comparison, Step, read_comparisons
from .summary import GIB

ERRORS = ("relative_error_out", "relative_error_dq", "relative_error_dk", "relative_error_dv")
WORST = "worst_error_over_single_gpu"


def sources(paths: Sequence[Path], root: Path) -> list[Details]:
    """What each file was measured with: one part a command, however many records repeat it."""
    out = []
    for path in paths:
        headers = {str(v.get("command") or ""): v for v in objects(path) if "benchmark" in v}
        parts = []
        for command, header in headers.items():
            about = {key: header[key] for key in ("commit", "date", "flops") if header.get(key)}
            inner = {**about, **dict(header.get("hardware") or {}), **dict(header.get("versions") or {})}
            parts += [Part("Command", code=command)] if command else []
            parts += [Part("Measured with", facts_of(inner))]
        out.append(Details(str(path.relative_to(root)), parts))
    return out


def objects(path: Path) -> list[Mapping[str, Any]]:
    """What of a file was readable when it was found, and told then."""
    return read_lines(path, lambda value: value, [])


def first_header(path: Path) -> Mapping[str, Any]:
    return next((value for value in objects(path) if "benchmark" in value), {})


def by_date(paths: Iterable[Path]) -> list[Path]:
    """Later measurements last, so that they count where points repeat."""
    return sorted(paths, key=lambda path: (str(first_header(path).get("date", "")), path))


# ---- the attention layer --------------------------------------------------------------------------------------------


def attention_section(paths: Sequence[Path], root: Path) -> Section:
    """A chart and a table a setting; what different devices did is never joined."""
    devices: dict[str, list[Path]] = {}
    for path in by_date(paths):
        device = dict(first_header(path).get("hardware") or {}).get("device", "unknown device")
        devices.setdefault(str(device), []).append(path)
    blocks: list[Table | Charts | Details] = []
    for mine in devices.values():
        for table in read_tables(mine, []):
            blocks += attention_blocks(table)
    notes = ["Forward and backward of one layer, the causal half counted. Of points measured twice the later counts."]
    return Section("attention", "Attention layer", [*blocks, *sources(paths, root)], notes)


def attention_blocks(table: Lengths) -> list[Table | Charts]:
    rows: list[list[str | Cell]] = []
    for line in table.lines:
        points = [line.at(length) for length in table.lengths]
        rows.append([line.label, *(Cell("", None) if p is None else length_cell(p.tflops) for p in points)])
    columns = ("TFLOP/s per GPU", *map(shown, table.lengths))
    out: list[Table | Charts] = []
    drawn = [line for line in table.lines if line.measured]
    if drawn and len(table.lengths) > 1:
        entries = [Entry(line.label, [point.length for point in line.measured]) for line in drawn]
        ticks = [(length, shown(length)) for length in table.lengths]
        series = [attention_series(i, line) for i, line in enumerate(drawn)]
        chart = Lines("Forward and backward", "TFLOP/s per GPU", "tokens in the sequence", series, ticks=ticks)
        out.append(Charts(table.title, entries, [chart]))
    order = [drawn.index(line) if line in drawn else -1 for line in table.lines] if out else []
    return [*out, Table("" if out else table.title, columns, rows, attention.remarks(table), entries=order)]


def length_cell(tflops: float | None) -> Cell:
    return Cell("–", None) if tflops is None else Cell(f"{tflops:,.0f}" if tflops >= 10 else f"{tflops:.3g}", tflops)


def attention_series(i: int, line: Line) -> Series:
    bounds = [point.bounds for point in line.measured]
    values = [point.tflops for point in line.measured]
    return Series(i, values, low=[low for low, _ in bounds], high=[high for _, high in bounds])


def errors_section(paths: Sequence[Path], root: Path) -> Section:
    """Relative errors against float64, one table a file."""
    blocks: list[Table | Details] = []
    for path in paths:
        points = [value for value in objects(path) if "benchmark" not in value and "length" in value]
        rows: list[list[str | Cell]] = []
        for point in points:
            name = " ".join(str(point[key]) for key in ("implementation", "request") if point.get(key))
            cells = [number(f"{v:.2e}", v) if (v := point.get(key)) is not None else Cell("–", None) for key in ERRORS]
            worst = point.get(WORST)
            last = number(f"{worst:.3f}", worst) if worst is not None else Cell(str(point.get("skipped") or ""), None)
            length = number(shown(point["length"]), point["length"])
            rows.append([name, *(str(point.get(key) or "") for key in ("kernel", "transport")), length, *cells, last])
        columns = ("", "kernel", "transport", "tokens", "out", "dq", "dk", "dv", "worst ÷ one GPU")
        blocks.append(Table(str(path.relative_to(root)), columns, rows))
    notes = ["Relative errors of the output and the gradients against float64."]
    return Section("errors", "Errors of the attention layer", [*blocks, *sources(paths, root)], notes)


# ---- whole steps ----------------------------------------------------------------------------------------------------


def step_section(paths: Sequence[Path], root: Path) -> Section:
    blocks: list[Table | Charts | Details] = []
    for comparison in read_comparisons(by_date(paths), []):
        blocks += step_blocks(comparison)
    return Section("steps", "Whole training steps", [*blocks, *sources(paths, root)])


def step_blocks(comparison: Comparison) -> list[Table | Charts]:
    labels = comparison.labels
    rows: list[list[str | Cell]] = [step_row(one, comparison.ratio(one)) for one in comparison.steps]
    columns = ("", "tokens", "tokens/s", f"÷ {FLOOR}", "MFU %", "TFLOP/s", "peak GiB", "last loss", "note")
    charts = [Bars("Throughput", "tokens per second, all GPUs", speeds(comparison))]
    if any(one.peak_memory_bytes for one in comparison.steps):
        charts.append(Bars("Peak memory", "GiB per GPU", memories(comparison)))
    order = [labels.index(one.label) for one in comparison.steps]
    notes = [remark for remark in step.remarks(comparison) if not remark.startswith("–")]  # the table says those
    table = Table("", columns, rows, notes, entries=order)
    return [Charts(comparison.setting.title, [Entry(label) for label in labels], charts), table]


def step_row(one: Step, ratio: float | None) -> list[str | Cell]:
    rate, tflops, loss = one.tokens_per_second, one.model_tflops_per_gpu, one.losses[1] if one.losses else None
    gib = one.peak_memory_bytes / GIB if one.peak_memory_bytes else None
    return [
        one.label,
        number(shown(one.length), one.length),
        number(f"{rate or 0:,.0f}", rate),
        number(f"{ratio or 0:.2f}", ratio),
        number(f"{100 * (one.mfu or 0):.1f}", one.mfu),
        number(f"{tflops or 0:.3g}", tflops),
        number(f"{gib or 0:.1f}", gib),
        number(f"{loss or 0:.4f}", loss),
        one.skipped or ("" if one.losses_finite else "losses are not finite"),
    ]


def speeds(comparison: Comparison) -> list[tuple[str, list[Bar]]]:
    def bar(i: int, one: Step) -> Bar:
        if one.tokens_per_second is None:
            return Bar(i, None, why=one.skipped or "not known")
        return Bar(i, one.tokens_per_second, *one.bounds)

    return grouped(comparison, bar)


def memories(comparison: Comparison) -> list[tuple[str, list[Bar]]]:
    def bar(i: int, one: Step) -> Bar:
        gib = one.peak_memory_bytes / GIB if one.peak_memory_bytes else None
        return Bar(i, gib, why=(one.skipped or "not known") if gib is None else "")

    return grouped(comparison, bar)


def grouped(comparison: Comparison, bar: Callable[[int, Step], Bar]) -> list[tuple[str, list[Bar]]]:
    out = []
    for length in comparison.lengths:
        found = [(i, comparison.at(length, label)) for i, label in enumerate(comparison.labels)]
        out.append((f"{shown(length)} tokens", [bar(i, one) for i, one in found if one]))
    return out


# ---- the largest model ----------------------------------------------------------------------------------------------


def largest_section(paths: Sequence[Path], root: Path) -> Section:
    """A chart and a table a device; the bars end where models fit, their lines where they are too large."""
    blocks: list[Table | Charts | Details] = []
    for one in largest.read(by_date(paths), []):
        names = [f"{largest.series(r)}, {largest.gpus(r)}" for r in one.found]
        sizes = [(r["parameters"], r["too_many_parameters"] or r["parameters"]) for r in one.found]
        bars = [Bar(i, *(x / largest.BILLION for x in (fits, fits, above))) for i, (fits, above) in enumerate(sizes)]
        if bars:
            chart = Bars("Parameters", "billions; the line: up to what is too large", [("", bars)])
            blocks.append(Charts(one.setting.device, [Entry(name) for name in names], [chart]))
        rows: list[list[str | Cell]] = [largest_row(r) for r in one.found]
        columns = ("", "GPUs", "scale", "parameters", "GiB a GPU", "too large")
        title = "" if bars else one.setting.device
        blocks.append(Table(title, columns, rows, largest.remarks(one), entries=range(len(rows))))
    return Section("largest", "The largest model that fits", [*blocks, *sources(paths, root)])


def largest_row(r: Mapping[str, Any]) -> list[str | Cell]:
    peak, above = r["peak_bytes"], r["too_many_parameters"]
    return [
        largest.series(r),
        number(str(r["gpus"]), r["gpus"]),
        number(str(r["largest"]), r["largest"]),
        number(f"{r['parameters']:,}", r["parameters"]),
        number(f"{(peak or 0) / GIB:.1f}", peak),
        number(f"{above or 0:,}", above),
    ]
