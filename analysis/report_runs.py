"""Knows what a page of results says of training runs and of sweeps of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .blocks import (
    Bar,
    Bars,
    Block,
    Cell,
    Charts,
    Details,
    Entry,
    Fact,
    Lines,
    Part,
    Section,
    Series,
    Table,
    facts_of,
    number,
    thinned,
)
from .figures import FEW
from .flags import named, section, shown, shown_setting
from .jsonl import read_lines
from .points import shown as shown_length
from .runs import Run, column, described
from .summary import GIB, Summary, smoothed, summarize, warmup_records


@dataclass(frozen=True)
class Column:
    """A chart of one column of the metrics, over the steps of every run that knows it."""

    title: str
    unit: str
    key: str
    scale: float = 1.0
    zero: bool = True
    warms_up: bool = True  # its first values may be out of all range


LOSS = Column("Training loss", "nats per token", "loss", zero=False)
COLUMNS: tuple[Column, ...] = (
    LOSS,
    Column("Throughput", "tokens per second, all ranks", "tokens_per_second"),
    Column("MFU", "% of the chip's dense peak", "mfu", 100.0),
    Column("Model arithmetic", "model TFLOP/s per GPU or process", "model_tflops_per_gpu"),
    Column("GPU memory", "GiB, peak of the worst GPU", "peak_memory_allocated_bytes", 1 / GIB),
    Column("Host memory", "GiB resident in a process", "host_rss_bytes", 1 / GIB),
    Column("Step time", "seconds", "step_seconds"),
    Column("Gradient norm", "before clipping", "grad_norm"),
    Column("Learning rate", "", "learning_rate", warms_up=False),
)
HEADINGS = (
    *("run", "model", "ranks", "tokens", "tokens/s", "MFU %", "peak GiB", "last loss"),  # what most look for, in sight
    *("schedule", "kernel", "remat", "steps", "s a step", "TFLOP/s", "smoothed loss", "device"),
)


def runs_section(runs: Sequence[Run]) -> Section:
    """A table of all runs, their courses over one legend, and what each was."""
    rows = [row(run, summarize(run)) for run in runs]
    notes = ["Numbers are medians past the warm-up: the first tenth, at most 10, of the logged steps."]
    table = Table("", HEADINGS, rows, notes, entries=range(len(runs)))
    kept = [thinned(len(run.steps)) for run in runs]
    entries = [Entry(run.label, run.column("step")[keep]) for run, keep in zip(runs, kept, strict=True)]
    charts = [chart(one, runs, kept) for one in COLUMNS if any(run.knows(one.key) for run in runs)]
    if any(len(keep) < len(run.steps) for run, keep in zip(runs, kept, strict=True)):
        notes.append(f"Of long runs {max(map(len, kept))} evenly spaced steps are drawn.")
    notes += [note for run in runs for note in run.notes]
    blocks: list[Block] = [table, Charts("", entries, charts), *(details(run) for run in runs)]
    return Section("runs", "Training runs", blocks)


def row(run: Run, s: Summary) -> list[str | Cell]:
    about, config = run.about, section(run.about, "config")
    length, ranks = config.get("model_max_length"), about.get("world_size")
    chosen = [str(about.get(key) or "") for key in ("schedule", "kernel", "remat")]
    memory = s.peak_memory_bytes / GIB
    return [
        run.label,
        word_or_missing(config, "model_name_or_path"),
        number(str(ranks), ranks if isinstance(ranks, int) else None),
        number(shown_length(length), length) if isinstance(length, int) else "",
        number(f"{s.tokens_per_second:,.0f}", s.tokens_per_second),
        number(f"{100 * s.mfu:.1f}", s.mfu),
        number(f"{memory:.2f}{'' if s.memory_is_gpu else ' (host)'}", memory),
        number(f"{s.last_loss:.4f}", s.last_loss),
        *chosen,
        number(f"{s.last_step:,}", s.last_step),
        number(f"{s.step_seconds:.3g}", s.step_seconds),
        number(f"{s.model_tflops_per_gpu:.3g}", s.model_tflops_per_gpu),
        number(f"{s.smoothed_loss:.4f}", s.smoothed_loss),
        word_or_missing(section(about, "hardware"), "device"),
    ]


def word_or_missing(known: Mapping[str, object], key: str) -> str | Cell:
    return str(known[key]) if known.get(key) else Cell("not recorded", None)


def chart(one: Column, runs: Sequence[Run], kept: Sequence[np.ndarray]) -> Lines:
    series = []
    for entry, (run, keep) in enumerate(zip(runs, kept, strict=True)):
        values = one.scale * run.column(one.key)
        if not run.knows(one.key):
            continue
        if one is not LOSS:
            series.append(Series(entry, values[keep]))
            continue
        smooth = len(run.steps) > FEW
        points = zip(column(run.evaluations, "step"), column(run.evaluations, "eval_loss"), strict=True)
        marks = [(float(step), float(loss)) for step, loss in points if np.isfinite(loss)]
        y, raw = (smoothed(values), values[keep]) if smooth else (values, ())
        series.append(Series(entry, y[keep], raw, marks=marks))
    warmup = max(warmup_records(len(keep)) for keep in kept) if one.warms_up else 0
    return Lines(one.title, one.unit, "training step", series, one.zero, warmup)


def details(run: Run) -> Details:
    """The command, every flag, and what the run chose and stood on."""
    about = run.about
    if not about:
        return Details(run.label, [Part("No run.json beside the metrics: flags, hardware and versions are not known.")])
    given = named(about)
    flags = [Fact(name, shown(value), name in given) for name, value in section(about, "config").items()]
    inner = ("config", "hardware", "versions", "model_config", "command", "commit")
    chosen = {key: value for key, value in about.items() if key not in inner and value not in (None, "", [], {})}
    hardware = section(about, "hardware") or {"device": "not recorded"}
    parts = [
        Part("Command", code=str(about.get("command") or "")),
        Part("Flags; those that the command names are marked", sorted(flags, key=lambda fact: not fact.named)),
        Part("Chosen", facts_of(chosen)),
        Part("Hardware and commit", facts_of({**hardware, "commit": about.get("commit") or "not recorded"})),
        *(Part(key.replace("_", " ").capitalize(), facts_of(section(about, key))) for key in inner[2:4]),
    ]
    return Details(run.label, [part for part in parts if part.facts or part.code], described(run))


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def read_cells(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    cells = read_lines(path, cell_of, notes)
    if not cells:
        raise ValueError(f"{path} holds no cells of a sweep")
    return cells


def cell_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if "name" not in value or not isinstance(value.get("flags"), dict):
        raise ValueError("is no cell of a sweep")
    return value


def sweep_section(name: str, cells: Sequence[Mapping[str, Any]], runs: Mapping[str, Run], i: int) -> Section:
    """A table of a sweep's cells with the flags that vary, and their throughput and memory side by side."""
    flags = list(dict.fromkeys(flag for cell in cells for flag in cell["flags"]))
    values = {flag: {cell["flags"].get(flag) for cell in cells} for flag in flags}
    varying = [flag for flag in flags if len(values[flag]) > 1 and flag != "output_dir"]
    found = {cell["name"]: summarize(run) for cell in cells if (run := run_of(cell, runs))}
    measured = ("tokens/s", "s a step", "peak GiB", "last loss", "seconds", "error")
    table = Table(
        "",
        ("cell", "status", "ranks", *varying, *measured),
        [cell_row(cell, varying, found.get(cell["name"])) for cell in cells],
    )
    blocks: list[Block] = [table]
    if found:
        entries = [Entry(cell["name"]) for cell in cells]
        blocks.append(
            Charts(
                "",
                entries,
                [
                    bars("Throughput", "tokens per second, median", cells, found, lambda s: s.tokens_per_second),
                    bars("Peak memory", "GiB", cells, found, lambda s: s.peak_memory_bytes / GIB),
                ],
            )
        )
    commands = [Part(str(cell["name"]), code=str(cell.get("command") or "")) for cell in cells]
    return Section(f"sweep-{i}", f"Sweep: {name}", [*blocks, Details("Commands", commands)])


def run_of(cell: Mapping[str, Any], runs: Mapping[str, Run]) -> Run | None:
    """The run in the cell's directory. Paths in a sweep begin where it was started, so the name alone counts."""
    return runs.get(Path(str(cell.get("output_dir"))).name)


def cell_row(cell: Mapping[str, Any], varying: Sequence[str], s: Summary | None) -> list[str | Cell]:
    out: list[str | Cell] = [str(cell["name"]), str(cell.get("status") or ""), plain_number(cell.get("ranks"))]
    out += [flag_value(flag, cell["flags"].get(flag)) for flag in varying]
    if s is None:
        out += [""] * 4
    else:
        out += [
            number(f"{s.tokens_per_second:,.0f}", s.tokens_per_second),
            number(f"{s.step_seconds:.3g}", s.step_seconds),
            number(f"{s.peak_memory_bytes / GIB:.2f}", s.peak_memory_bytes),
            number(f"{s.last_loss:.4f}", s.last_loss),
        ]
    seconds = cell.get("seconds")
    return [*out, number(f"{seconds:,.0f}", seconds) if seconds is not None else "", str(cell.get("error") or "")]


def flag_value(flag: str, value: object) -> str | Cell:
    """An empty one has a meaning that an empty cell would hide."""
    return shown_setting(flag, value) if value == "" else plain_number(value)


def plain_number(value: object) -> str | Cell:
    """A flag's value; one that is a number sorts as one."""
    if value is None:
        return ""
    try:
        return Cell(str(value), float(str(value)))
    except ValueError:
        return str(value)


def bars(
    title: str,
    unit: str,
    cells: Sequence[Mapping[str, Any]],
    found: Mapping[str, Summary],
    value: Callable[[Summary], float],
) -> Bars:
    out = []
    for entry, cell in enumerate(cells):
        s = found.get(cell["name"])
        known = s is not None and np.isfinite(value(s))
        out.append(Bar(entry, value(s) if s and known else None, why="" if known else why_missing(cell, s)))
    return Bars(title, unit, [("", out)])


def why_missing(cell: Mapping[str, Any], s: Summary | None) -> str:
    """A cell that is done, and whose run lies elsewhere, did not fail."""
    status = str(cell.get("status") or "not run")
    return "not recorded" if s is not None else "its run is not below this directory" if status == "done" else status
