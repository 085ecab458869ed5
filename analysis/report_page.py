"""Page of `analysis report`: sections, tables and plotly charts for the template report.html."""

import html
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import yaml
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from lightseq.config.lengths import format_tokens

from .benchmark import Benchmark
from .curves import PANELS, TFLOPS, table_cells, usual_top
from .drawing import (
    COLORS,
    FEW,
    GIB,
    MAX_TICKS,
    log_ticks,
    span_of,
)
from .evaluate import Evaluation, needle_figure, needle_rows, perplexity_figure, position_rows
from .records import Record, read_lines
from .results import BENCHMARKS, CHECK_KEYS, Found
from .run_settings import setting_text
from .runs import Run, column, describe, section, smooth

POINTS = 1000  # at most, per curve; a page of many long runs stays small
DASHES = ("solid", "dash", "dot", "dashdot")
DETAIL_KEYS = ("lacks", "to_fit", "faster", "notes", "seconds", "config", "hardware", "versions")
NUMBER = re.compile(r"[-+\d.,→ ]+(e[-+]\d+)?(K|M|%|s|GiB GPU|GiB host)?|–?")


@dataclass(frozen=True)
class Table:
    """Rows of text; the first is the header."""

    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    @property
    def numeric(self) -> list[bool]:
        """Flags of the columns that contain only numbers."""
        return [all(NUMBER.fullmatch(text) for text in cells) for cells in zip(*self.rows[1:], strict=True)]


@dataclass(frozen=True)
class Details:
    """Texts that expand on a click, such as commands."""

    title: str
    texts: Sequence[str]
    about: str = ""


Files = Mapping[Path, Sequence[Record]]
Block = Any  # a heading, a plotly or matplotlib figure, a Table or Details


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]
    notes: Sequence[str] = ()


def render(found: Found, title: str) -> str:
    """Returns the HTML page. It is self-contained: plotly.js, data and tables are inside."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    charts = count()

    def chart_html(figure: go.Figure) -> Markup:
        options = {"displaylogo": False, "responsive": True}
        name = f"chart-{next(charts)}"
        return Markup(figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=options))

    environment.filters["chart"] = chart_html
    environment.filters["png"] = png
    environment.tests["chart"] = lambda block: isinstance(block, go.Figure)
    environment.tests["picture"] = lambda block: isinstance(block, Figure)
    environment.tests["table"] = lambda block: isinstance(block, Table)
    return environment.get_template("report.html").render(
        title=title,
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        sections=sections_of(found),
        left_out=[*found.left_out, *(f"{found.name(path)} is another kind of file" for path in found.others)],
        notes=found.notes,
        plotlyjs=Markup(get_plotlyjs()),
    )


def png(figure: Figure) -> str:
    """Returns a data URL of a figure as PNG."""
    file = BytesIO()
    figure.savefig(file)
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def sections_of(found: Found) -> list[Section]:
    """Returns a section per kind of result. Runs of a sweep are in the sweep's section."""
    sweeps = {path: runs_of_cells(cells, path.parent, found.runs) for path, cells in found.sweeps.items()}
    in_sweeps = [run.directory for runs in sweeps.values() for run in runs.values()]
    alone = [run for run in found.runs if run.directory not in in_sweeps]
    out = [runs_section(alone)] if alone else []
    out += [sweep_section(found.name(path.parent), found.sweeps[path], runs) for path, runs in sweeps.items()]
    out += [evaluations_section(found)] if found.evaluations else []
    out += [verifications_section(found)] if found.verifications else []
    out += [plans_section(found)] if found.plans else []
    return out + [
        benchmark_section(benchmark, found.benchmarks[benchmark.name], found)
        for benchmark in BENCHMARKS
        if benchmark.name in found.benchmarks
    ]


# ---- training runs --------------------------------------------------------------------------------------------------


def runs_section(runs: Sequence[Run]) -> Section:
    head = ["run", "model", "ranks", "tokens", *table_cells(runs[0]), "schedule", "kernel", "remat", "device"]
    notes = ["Numbers are medians after the warm-up, which is the first 10% of logged steps, at most 10."]
    table = Table([head, *map(run_row, runs)], notes=notes)
    return Section("Training runs", [table, curves(runs), *map(run_details, runs)])


def run_row(run: Run) -> list[str]:
    info, config = run.info, section(run.info, "config")
    length = config.get("model_max_length")
    facts = [run.label, config.get("model_name_or_path") or "not recorded", info.get("world_size")]
    facts += [format_tokens(length) if isinstance(length, int) else None, *table_cells(run).values()]
    facts += [*map(info.get, ("schedule", "kernel", "remat"))]
    facts += [section(info, "hardware").get("device") or "not recorded"]
    return ["" if fact is None else str(fact) for fact in facts]


def curves(runs: Sequence[Run]) -> go.Figure:
    """Returns a chart per metric with one legend. A click on a run hides it in all charts."""
    panels = [panel for panel in PANELS if any(run.has(panel.curves[0].key) for run in runs)]
    if all(run.has("mfu") for run in runs):
        panels.remove(TFLOPS)
    rows = -(-(1 + len(panels)) // 2)
    titles = ["Training loss", *(panel.title for panel in panels)]
    out = make_subplots(rows, 2, subplot_titles=titles, vertical_spacing=0.3 / rows, shared_xaxes="all")
    for place, run in enumerate(runs):
        out.add_traces(loss_traces(run, place), rows=1, cols=1)
    losses = [run.column("loss") for run in runs] + [column(run.evaluations, "eval_loss") for run in runs]
    out.update_yaxes(title_text="nats per token", range=span_of(losses), row=1, col=1)
    for i, panel in enumerate(panels, 1):
        row, col, curve = i // 2 + 1, i % 2 + 1, panel.curves[0]
        for place, run in enumerate(runs):
            if run.has(curve.key):
                trace = line(run, place, curve.scale * run.column(curve.key), showlegend=False)
                out.add_trace(trace, row, col)
        top = usual_top([curve.scale * run.column(curve.key) for run in runs])
        out.update_yaxes(title_text=panel.unit.partition(" (")[0], range=[0, top], row=row, col=col)
    out.update_yaxes(nticks=MAX_TICKS, exponentformat="none", separatethousands=True)
    out.update_xaxes(title_text="training step", showticklabels=True, nticks=MAX_TICKS, ticklabelstandoff=4)
    lengths = [run.last_step for run in runs]
    if max(lengths) > 20 * min(lengths):
        ticks = log_ticks(1, max(lengths))
        out.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,g}" for tick in ticks])
    return styled(out, height=320 * rows)


def loss_traces(run: Run, place: int) -> list[go.Scatter]:
    """Returns a run's loss, with its running mean if the run is long, and its evaluations as diamonds."""
    loss = run.column("loss")
    is_long = len(run.steps) > FEW
    out = [line(run, place, smooth(loss) if is_long else loss)]
    if is_long:
        out.append(line(run, place, loss, opacity=0.3, showlegend=False))
    if run.evaluations:
        x, y = column(run.evaluations, "step"), column(run.evaluations, "eval_loss")
        diamonds = {"symbol": "diamond", "size": 9, "color": COLORS[place % len(COLORS)]}
        name = f"{html.escape(run.label)}, evaluation"
        look = {"mode": "markers", "marker": diamonds, "name": name, "legendgroup": place, "showlegend": False}
        out.append(go.Scatter(x=numbers(x), y=numbers(y), **look))
    return out


def line(run: Run, place: int, values: np.ndarray, **options: Any) -> go.Scatter:
    """Returns a line over a run's steps, in the color of the run's place in the legend."""
    shown = thinned(len(run.steps))
    return go.Scatter(
        x=numbers(run.column("step")[shown]),
        y=numbers(values[shown]),
        mode="lines" if len(run.steps) > FEW else "lines+markers",
        name=html.escape(run.label),
        legendgroup=place,
        line={"color": COLORS[place % len(COLORS)], "dash": DASHES[place // len(COLORS) % len(DASHES)]},
        **options,
    )


def thinned(count: int) -> np.ndarray:
    """Returns indices of at most POINTS evenly spaced points, including the last."""
    return np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int))


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Rounds to six digits; unknown numbers become None."""
    return [None if value is None or not np.isfinite(value) else float(f"{value:.6g}") for value in values]


def run_details(run: Run) -> Details:
    """Returns the run's command and its run.json."""
    if not run.info:
        return Details(run.label, ["No run.json beside the metrics: flags, hardware and versions are unknown."])
    rest = {key: value for key, value in run.info.items() if key != "command" and value not in (None, "", [], {})}
    return Details(run.label, [str(run.info.get("command") or "No command"), as_yaml(rest)], describe(run))


def as_yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120).rstrip()


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def sweep_section(name: str, cells: Sequence[Record], runs: Mapping[str, Run]) -> Section:
    """Returns a table of the cells with the varying flags, and the curves of the runs."""
    flags = list(dict.fromkeys(flag for cell in cells for flag in cell["flags"]))
    varying = [flag for flag in flags if len({cell["flags"].get(flag) for cell in cells}) > 1 and flag != "output_dir"]
    measured = list(table_cells(next(iter(runs.values())))) if runs else []
    head = ["cell", "status", "ranks", *varying, *measured, "seconds", "error"]
    rows = [cell_row(cell, varying, runs.get(cell["name"]), len(measured)) for cell in cells]
    blocks: list[Block] = [Table([head, *rows])]
    if runs:
        blocks.append(curves(list(runs.values())))
    commands = Details("Commands", [str(cell.get("command") or "") for cell in cells])
    blocks += [commands, *map(run_details, runs.values())]
    return Section(f"Sweep: {name}", blocks)


def runs_of_cells(cells: Sequence[Record], folder: Path, runs: Sequence[Run]) -> dict[str, Run]:
    """Returns the run of each cell. Matches directory names, because recorded paths start at the sweep's directory."""
    below = {run.directory.name: run for run in runs if folder in run.directory.parents}
    names = {cell["name"]: Path(str(cell.get("output_dir"))).name for cell in cells}
    return {cell: replace(below[name], label=name) for cell, name in names.items() if name in below}


def cell_row(cell: Record, varying: Sequence[str], run: Run | None, measured: int) -> list[str]:
    status = str(cell.get("status") or "not run")
    if run is None and status == "done":
        status = "done; run not found below this directory"
    values = [cell["flags"].get(flag) for flag in varying]
    settings = ["" if value is None else setting_text(flag, value) for flag, value in zip(varying, values, strict=True)]
    numbers = table_cells(run).values() if run else [""] * measured
    end = [text("{:,.0f}", cell.get("seconds")), str(cell.get("error") or "")]
    return [str(cell["name"]), status, str(cell.get("ranks") or ""), *settings, *numbers, *end]


def text(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


# ---- evaluations, verifications, plans ------------------------------------------------------------------------------


def evaluations_section(found: Found) -> Section:
    """Returns the pictures and tables of `analysis evaluate`: one for all perplexities, one per needle search."""
    losses = [one for one in found.evaluations if one.kind == "loss"]
    blocks: list[Block] = []
    if losses:
        blocks += ["Perplexity by position", perplexity_figure(losses), Table(position_rows(losses))]
    for one in found.evaluations:
        if one.kind == "needle":
            blocks += [f"Needle: {one.label}", needle_figure([one]), Table(needle_rows(one), [sentence(one.score)])]
    return Section("Evaluations", [*blocks, *map(evaluation_details, found.evaluations)])


def sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def evaluation_details(evaluation: Evaluation) -> Details:
    summary = evaluation.summary
    facts = [f"{summary[key]}" for key in ("model", "schedule", "kernel") if summary.get(key)]
    return command_details(evaluation.label, summary, ", ".join(facts))


def verifications_section(found: Found) -> Section:
    """Returns a table of checks per verification, the name of its directory above it."""
    blocks: list[Block] = []
    for path, (header, *checks) in found.verifications.items():
        verdict = "passed" if header["passed"] else "FAILED"
        blocks.append(f"{found.name(path.parent)}: {verdict}")
        rows = [[str(row[key]) for key in CHECK_KEYS] for row in checks]
        blocks.append(Table([["check", "result", "detail"], *rows]))
        blocks.append(command_details("Command", header))
    return Section("Verifications", blocks)


def plans_section(found: Found) -> Section:
    """Returns a row per planned run, and its command with what the planner suggests and notes."""
    plans = [(found.name(path), plan) for path, plans in found.plans.items() for plan in plans]
    head = [
        "plan",
        "model",
        "tokens",
        "GPUs",
        "device",
        "schedule",
        "fits",
        "GiB per GPU",
        "usable GiB",
        "GiB per host",
    ]
    head += ["step", "tokens per second", "MFU", "longest that fits"]
    details = [command_details(name, plan, ", ".join(plan_row(name, plan)[1:6])) for name, plan in plans]
    notes = ["Predicted by lightseq plan, not measured."]
    return Section("Plans", [Table([head, *(plan_row(*pair) for pair in plans)], notes), *details])


def plan_row(name: str, plan: Record) -> list[str]:
    config, hardware = plan["config"], plan["hardware"]
    length, longest = config.get("model_max_length"), plan["longest_length"]
    sizes = [f"{plan[key] / GIB:,.1f}" for key in ("peak_bytes", "usable_gpu_bytes", "host_bytes")]
    facts = [name, config.get("model_name_or_path"), length and format_tokens(length), hardware["gpus"]]
    facts += [section(hardware, "chip").get("device"), plan["schedule"], "yes" if plan["fits"] else "no", *sizes]
    facts += [f"{plan['step_seconds']:,.3g} s", f"{plan['tokens_per_second']:,.0f}", f"{plan['mfu']:.1%}"]
    return ["" if fact is None else str(fact) for fact in (*facts, longest and f"{longest:,}")]


def command_details(title: str, record: Record, about: str = "") -> Details:
    """Returns a record's command, and the settings beside its numbers."""
    settings = {key: record[key] for key in DETAIL_KEYS if record.get(key)}
    texts = [str(record.get("command") or "No command"), as_yaml(settings) if settings else ""]
    return Details(title, [text for text in texts if text], about)


# ---- benchmarks -----------------------------------------------------------------------------------------------------


def benchmark_section(benchmark: Benchmark[Any], files: Files, found: Found) -> Section:
    """Returns the plots and tables of a benchmark, and the commands that measured them."""
    records = [record for path in by_date(files) for record in files[path]]
    blocks: list[Block] = []
    for group in benchmark.group(records):
        picture = benchmark.figure(group)
        blocks += [group.title, *([picture] if picture is not None else [])]
        blocks.append(Table(benchmark.table_rows(group), benchmark.remarks(group)))
    return Section(benchmark.title, [*blocks, *sources(files, found)])


def by_date(files: Files) -> list[Path]:
    """Returns the paths by date, so later measurements replace earlier ones."""
    return sorted(files, key=lambda path: (max((str(h.get("date", "")) for h in headers(path)), default=""), path))


def headers(path: Path) -> list[Record]:
    return [record for record in read_lines(path, dict, []) if "benchmark" in record]


def sources(files: Files, found: Found) -> list[Details]:
    """Returns the commands that wrote each file, and their machine."""
    out = []
    for path in files:
        commands = {str(header.get("command") or ""): header for header in headers(path)}
        keys = ("commit", "date", "hardware", "versions")
        machines = [as_yaml({key: header[key] for key in keys if header.get(key)}) for header in commands.values()]
        out.append(Details(found.name(path), [*commands, *dict.fromkeys(machines)]))
    return out


def styled(figure: go.Figure, height: int) -> go.Figure:
    """Applies the page's style to a chart and leaves room for a legend below the axes."""
    names = [trace.name for trace in figure.data if trace.name and trace.showlegend is not False]
    columns = max(1, 150 // (8 + max(map(len, names), default=0)))
    return figure.update_layout(
        template="plotly_white",
        height=height + 20 * -(-len(names) // columns),
        margin={"l": 60, "r": 40, "t": 40, "b": 60},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        modebar={"orientation": "v"},
        hoverlabel={"namelength": -1},
    )
