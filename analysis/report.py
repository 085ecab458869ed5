"""One HTML page of all results below a directory: `python3 -m analysis report DIR [--output FILE]`.

Makes sections, tables and plotly charts for the template report.html.
"""

import argparse
import gzip
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import yaml
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure
from plotly.offline import get_plotlyjs

from lightseq.config.lengths import format_tokens

from .benchmark import Benchmark
from .curves import table_cells
from .drawing import name_log_scales
from .evaluate import needle_figure, needle_rows, perplexity_figure, position_rows
from .output import GIB
from .plots_file import short_name
from .records import Record, print_notes
from .report_charts import curves
from .results import BENCHMARKS, CHECK_KEYS, Found, find
from .runs import DESCRIBED, Run, describe, section, setting_text

SHOWN = "runs, sweeps, evaluations, verifications, plans of training, and benchmarks of attention, step and largest"
TITLE = "Results: "  # begins the title of every page
# Keys of a record that are shown beside its command, as far as it has them.
DETAIL_KEYS = ("lacks", "to_fit", "faster", "notes", "seconds", "config", "commit", "date", "hardware", "versions")
NUMBER = re.compile(r"[-+\d.,→ ]+(e[-+]\d+)?(K|M|%|s|GiB GPU|GiB host)?|–?")


@dataclass(frozen=True)
class Table:
    """Rows of text; the first is the header."""

    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def compact(self, keep: Sequence[str] = ()) -> "Table":
        """Moves columns with one known value in several rows into a note, except those in `keep`."""
        columns = list(zip(*self.rows, strict=True))
        known = {
            column: sorted({*column[1:]} - {""}) for column in columns if len(column) > 2 and column[0] not in keep
        }
        same = {column: values for column, values in known.items() if len(values) < 2}
        rows = list(zip(*(column for column in columns if column not in same), strict=True))
        text = "; ".join(f"{column[0]}: {values[0]}" for column, values in same.items() if values)
        return Table(rows, [*([f"The same in all rows that know it: {text}."] if text else []), *self.notes])

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


Block = Any  # a heading, a plotly or matplotlib figure, a Table or Details


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


def main(arguments: argparse.Namespace) -> int:
    directory = arguments.directory
    output = arguments.output or directory / "report.html"
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give one with runs or benchmarks")
    found = find(directory)
    if not found.summary:
        raise ValueError(f"nothing to show below {directory}: {[*found.left_out, f'it shows {SHOWN}'][0]}")
    if output.is_file() and TITLE not in output.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{output} exists and was not written by analysis report; give another file with --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(found, f"{TITLE}{directory.resolve().name}"), encoding="utf-8")
    notes = [f"not shown: {line}" for line in found.left_out]
    if count := len(found.others):
        notes.append(f"not shown: {count} other file{'s' * (count > 1)}, listed on the page; it shows {SHOWN}")
    print_notes([*notes, *found.notes])
    print(f"{found.summary}\n{output}")
    return 0


def render(found: Found, title: str) -> str:
    """Returns the HTML page. It is self-contained: plotly.js, data and tables are inside."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters.update(chart=lambda figure: Markup(figure.to_json().replace("<", r"\u003c")), png=png)
    environment.tests.update(
        chart=lambda block: isinstance(block, go.Figure),
        picture=lambda block: isinstance(block, Figure),
        table=lambda block: isinstance(block, Table),
    )
    return environment.get_template("report.html").render(
        title=title,
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        sections=sections_of(found),
        left_out=[*found.left_out, *(f"{found.name(path)} is another kind of file" for path in found.others)],
        notes=found.notes,
        plotlyjs=b64encode(gzip.compress(get_plotlyjs().encode())).decode(),
    )


def png(figure: Figure) -> str:
    """Returns a data URL of a figure as PNG."""
    for axes in figure.axes:
        name_log_scales(axes)
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
    return out + [benchmark_section(each, found) for each in BENCHMARKS if each.name in found.benchmarks]


def details(title: str, records: Iterable[Record], about: str = "", keys: Iterable[str] = DETAIL_KEYS) -> Details:
    """Returns the commands of records, and the settings and machines beside their numbers."""
    texts: list[str] = []
    for record in records:
        settings = {key: record[key] for key in keys if record.get(key) not in (None, "", [], {})}
        texts += [str(record.get("command") or "No command"), as_yaml(settings) if settings else ""]
    return Details(title, [text for text in dict.fromkeys(texts) if text], about)


def as_yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120).rstrip()


def words(values: Iterable[object]) -> list[str]:
    """Returns the cells of a row; unknown values are empty."""
    return ["" if value is None else str(value) for value in values]


# ---- training runs and sweeps ---------------------------------------------------------------------------------------


def runs_section(runs: Sequence[Run]) -> Section:
    head = ["run", "model", "ranks", "tokens", *table_cells(runs[0]), "schedule", "kernel", "remat", "device"]
    notes = ["Numbers are medians after the warm-up, which is the first 10% of logged steps, at most 10."]
    table = Table([head, *map(run_row, runs)], notes).compact()
    return Section("Training runs", [table, curves(runs, DESCRIBED), *map(run_details, runs)])


def run_row(run: Run) -> list[str]:
    info, config = run.info, section(run.info, "config")
    length = config.get("model_max_length")
    facts = [run.label, config.get("model_name_or_path") or "not recorded", info.get("world_size")]
    facts += [format_tokens(length) if isinstance(length, int) else None, *table_cells(run).values()]
    facts += [*map(info.get, ("schedule", "kernel", "remat"))]
    return words([*facts, section(info, "hardware").get("device") or "not recorded"])


def run_details(run: Run) -> Details:
    """Returns the run's command and its run.json."""
    if not run.info:
        return Details(run.label, ["No run.json beside the metrics: flags, hardware and versions are unknown."])
    return details(run.label, [run.info], describe([run.info]), keys=[key for key in run.info if key != "command"])


def sweep_section(name: str, cells: Sequence[Record], runs: Mapping[str, Run]) -> Section:
    """Returns a table of the cells with the varying flags, the curves of the runs, and one run's settings."""
    flags = list(dict.fromkeys(flag for cell in cells for flag in cell["flags"]))
    varying = [flag for flag in flags if len({cell["flags"].get(flag) for cell in cells}) > 1 and flag != "output_dir"]
    measured = list(table_cells(next(iter(runs.values())))) if runs else []
    headings = list(map(short_name, varying)) or ["cell"]
    rows = [[*headings, "status", "ranks", *measured, "seconds", "error"]]
    for cell in cells:
        run, status = runs.get(cell["name"]), cell.get("status") or "not run"
        if run is None and status == "done":
            status = "done; run not found below this directory"
        texts = [] if varying else [cell["name"]]
        texts += [setting_text(flag, cell["flags"][flag]) if flag in cell["flags"] else None for flag in varying]
        numbers = table_cells(run).values() if run else [""] * len(measured)
        seconds = None if cell.get("seconds") is None else f"{cell['seconds']:,.0f}"
        rows.append(words([*texts, status, cell.get("ranks"), *numbers, seconds, cell.get("error")]))
    blocks: list[Block] = [Table(rows).compact(headings)]
    blocks += [curves(list(runs.values()), varying)] if runs else []
    blocks.append(Details("Commands", words(cell.get("command") for cell in cells)))
    return Section(f"Sweep: {name}", [*blocks, *map(run_details, list(runs.values())[:1])])


def runs_of_cells(cells: Sequence[Record], folder: Path, runs: Sequence[Run]) -> dict[str, Run]:
    """Returns the run of each cell. Matches directory names, because recorded paths start at the sweep's directory."""
    below = {run.directory.name: run for run in runs if folder in run.directory.parents}
    names = {cell["name"]: Path(str(cell.get("output_dir"))).name for cell in cells}
    return {cell: replace(below[name], label=name) for cell, name in names.items() if name in below}


# ---- evaluations, verifications, plans ------------------------------------------------------------------------------


def evaluations_section(found: Found) -> Section:
    """Returns the pictures and tables of `analysis evaluate`: one for all perplexities, one per needle search."""
    losses = [one for one in found.evaluations if one.kind == "loss"]
    blocks: list[Block] = []
    if losses:
        blocks += ["Perplexity by position", perplexity_figure(losses), Table(position_rows(losses))]
    for one in found.evaluations:
        if one.kind == "needle":
            note = f"{one.score[0].upper()}{one.score[1:]}."
            blocks += [f"Needle: {one.label}", needle_figure([one]), Table(needle_rows(one), [note])]
    for one in found.evaluations:
        facts = [str(one.summary[key]) for key in ("model", "schedule", "kernel") if one.summary.get(key)]
        blocks.append(details(one.label, [one.summary], ", ".join(facts)))
    return Section("Evaluations", blocks)


def verifications_section(found: Found) -> Section:
    """Returns a table of checks per verification, the name of its directory above it."""
    blocks: list[Block] = []
    for path, (header, *checks) in found.verifications.items():
        rows = [CHECK_KEYS, *(words(row[key] for key in CHECK_KEYS) for row in checks)]
        blocks.append(f"{found.name(path.parent)}: {'passed' if header['passed'] else 'FAILED'}")
        blocks += [Table(rows), details("Command", [header])]
    return Section("Verifications", blocks)


def plans_section(found: Found) -> Section:
    """Returns a row per planned run, and its command with what the planner suggests and notes."""
    plans = [(found.name(path), plan) for path, plans in found.plans.items() for plan in plans]
    head = ["plan", "model", "tokens", "GPUs", "device", "schedule", "fits", "GiB per GPU", "usable GiB"]
    head += ["GiB per host", "step", "tokens per second", "MFU", "longest that fits"]
    rows = [plan_row(name, plan) for name, plan in plans]
    commands = [details(row[0], [plan], ", ".join(row[1:6])) for row, (_, plan) in zip(rows, plans, strict=True)]
    return Section("Plans", [Table([head, *rows], ["Predicted by lightseq plan, not measured."]), *commands])


def plan_row(name: str, plan: Record) -> list[str]:
    config, hardware = plan["config"], plan["hardware"]
    length, longest = config.get("model_max_length"), plan["longest_length"]
    sizes = [f"{plan[key] / GIB:,.1f}" for key in ("peak_bytes", "usable_gpu_bytes", "host_bytes")]
    facts = [name, config.get("model_name_or_path"), length and format_tokens(length), hardware["gpus"]]
    facts += [section(hardware, "chip").get("device"), plan["schedule"], "yes" if plan["fits"] else "no", *sizes]
    facts += [f"{plan['step_seconds']:,.3g} s", f"{plan['tokens_per_second']:,.0f}", f"{plan['mfu']:.1%}"]
    return words([*facts, longest and f"{longest:,}"])


# ---- benchmarks -----------------------------------------------------------------------------------------------------


def benchmark_section(benchmark: Benchmark, found: Found) -> Section:
    """Returns the plots and tables of a benchmark, and the commands that measured them."""
    files = found.benchmarks[benchmark.name]

    def date(path: Path) -> str:
        return max(str(record["header"].get("date", "")) for record in files[path])

    by_date = sorted(files, key=lambda path: (date(path), path))  # later measurements replace earlier ones
    blocks: list[Block] = []
    for group in benchmark.group(record for path in by_date for record in files[path]):
        picture = group.figure()
        blocks += [group.title, *([picture] if picture is not None else [])]
        blocks.append(Table(group.table_rows(), group.remarks()))
    for path, records in files.items():
        headers = {record["header"].get("command"): record["header"] for record in records}
        blocks.append(details(found.name(path), headers.values()))
    return Section(benchmark.title, blocks)
