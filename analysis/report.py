"""One HTML page of all results below a directory: `python3 -m analysis report DIR [--output FILE]`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from .records import print_notes
from .results import find

SHOWN = "runs, sweeps, evaluations, verifications, plans of training, and benchmarks of attention, step and largest"
TITLE = "Results: "  # begins the title of every page


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="analysis report",
        usage="python3 -m analysis report RESULTS_DIR [--output FILE.html]",
        description="Writes one self-contained HTML page of all training runs, sweeps, evaluations, verifications, "
        "plans and benchmarks below a directory. Needs jinja2 and plotly.",
    )
    parser.add_argument("directory", metavar="RESULTS_DIR", type=Path, help="directory to search, subdirectories too")
    parser.add_argument("--output", metavar="FILE", type=Path, help="the HTML file (default: RESULTS_DIR/report.html)")
    arguments = parser.parse_args(argv)
    try:
        from .report_page import render
    except ImportError as error:
        package = str(error.name).split(".")[0]
        if package not in ("jinja2", "plotly"):
            raise
        raise ValueError(f"the page needs {package}; pip install jinja2 plotly") from None
    directory = arguments.directory
    output = arguments.output or directory / "report.html"
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give one with runs or benchmarks")
    found = find(directory)
    if not found.summary:
        raise ValueError(f"nothing to show below {directory}: {reason(found.left_out)}")
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


def reason(left_out: Sequence[str]) -> str:
    if not left_out:
        return f"it shows {SHOWN}"
    more = f" (and {len(left_out) - 1} more files)" if len(left_out) > 1 else ""
    return f"{left_out[0]}{more}"
