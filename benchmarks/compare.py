"""Repeats cells of the benchmarks on the GPUs at hand, and compares them with their baselines."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Instead of this folder, whose modules would hide packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.baseline_files import (
    FOLDER,
    UNITS,
    Cell,
    Measured,
    markdown,
    measured,
    number,
    read_cells,
    save_baseline,
)
from benchmarks.command_line import Parser, positive, seconds
from lightseq.config.parser import run_command
from lightseq.utils.formatting import aligned

ABOUT = """Repeats cells of the benchmarks on the GPUs at hand, and compares them with their baselines.

A cell is a file in benchmarks/baselines: a command, and what it measured on each kind of GPU. It is `slower` if its
median is worse than the baseline's by more than --tolerance and lies outside the baseline's range. The exit status is 1
if any cell is slower or fails. GPUs without a baseline are measured and not judged; --save makes theirs.
"""
EXAMPLES = """examples:
  python3 benchmarks/compare.py --list
  python3 benchmarks/compare.py --cells 1b-32k-2gpu,'attention-*'
  ... --cells '8b-*' --save
  ... --table"""


def main(words: Sequence[str]) -> int:
    """Runs the comparison. Returns the exit status: 1 if a cell is slower than its baseline or fails."""
    failures: list[str] = []
    return run_command(lambda: failures.extend(_run(parse(words)))) or int(bool(failures))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the flags. Raises ValueError with a one-line reason."""
    out = Parser("benchmarks/compare.py", ABOUT, EXAMPLES)
    add = out.add_argument
    add("--cells", metavar="NAME,...", help="names or patterns (default: all that the GPUs at hand can run)")
    add("--list", action="store_true", help="list the cells and their commands, and run nothing")
    add("--table", action="store_true", help="print the baselines as a table in Markdown, and run nothing")
    add("--gpus", type=positive, metavar="N", help="GPUs to use (default: those at hand)")
    add("--timeout", type=seconds, default=1800.0, metavar="S", help="time limit of a cell")
    add("--tolerance", type=float, default=0.05, metavar="SHARE", help="how much worse than the baseline is slower")
    add("--baselines", type=Path, default=FOLDER, metavar="DIR", help="folder of the cells")
    add("--save", action="store_true", help="write what is measured as the baseline of these GPUs")
    add("--output", type=Path, default=Path("outputs/compare"), metavar="DIR", help="folder for records and logs")
    return out.parse_args(words)


def _run(flags: argparse.Namespace) -> list[str]:
    """Returns the names of cells that are slower or failed."""
    cells = _chosen(read_cells(flags.baselines), flags.cells)
    if not cells:
        raise ValueError(f"--baselines {flags.baselines} has no cell, which is a JSON file; give another folder")
    if flags.list or flags.table:
        print(markdown(cells) if flags.table else "\n".join(_listed(cells)))
        return []
    if flags.output.exists() and any(flags.output.iterdir()):
        raise ValueError(f"--output {flags.output} is not empty; give another folder")
    import torch  # takes seconds

    from benchmarks.records import provenance

    gpus = flags.gpus or torch.cuda.device_count()
    fitting = {name: cell for name, cell in cells.items() if cell.gpus <= gpus}
    if not fitting:
        least = min(cell.gpus for cell in cells.values())
        raise ValueError(f"{gpus} GPUs are here, and the cells need at least {least}; --list shows them")
    for name in [name for name in cells if name not in fitting]:
        print(f"{name:<26} left out: it needs {cells[name].gpus} GPUs")
    flags.output.mkdir(parents=True, exist_ok=True)
    about = provenance(None, None if torch.cuda.device_count() else torch.device("cpu"))
    return [name for name, cell in fitting.items() if not _compare(cell, about, flags)]


def _chosen(cells: Mapping[str, Cell], patterns: str | None) -> dict[str, Cell]:
    """Returns the cells whose names match. Raises ValueError for a pattern that matches none."""
    if patterns is None:
        return dict(cells)
    names = dict[str, None]()
    for pattern in patterns.split(","):
        found = fnmatch.filter(cells, pattern.strip())
        if not found:
            nearest = difflib.get_close_matches(pattern, cells, n=3)
            guess = f"did you mean {' or '.join(nearest)}? " if nearest else ""
            raise ValueError(f"--cells {pattern} matches no cell; {guess}--list shows all {len(cells)}")
        names |= dict.fromkeys(found)
    return {name: cells[name] for name in names}


def _listed(cells: Mapping[str, Cell]) -> list[str]:
    rows = [[name, str(cell.gpus), cell.about] for name, cell in cells.items()]
    lines = aligned([["cell", "GPUs", "what"], *rows], left=(0, 2))
    commands = ["", *(f"    {cell.command}" for cell in cells.values())]
    return [text for pair in zip(lines, commands, strict=True) for text in pair if text]


def _compare(cell: Cell, about: Mapping[str, Any], flags: argparse.Namespace) -> bool:
    """Runs a cell and prints its line. Returns whether it is as fast as its baseline, or has none."""
    from benchmarks.processes import Failed, run
    from benchmarks.records import read_lines

    output = flags.output / f"{cell.name}.jsonl"
    log = output.with_suffix(".log")
    try:
        run(cell.words(output), flags.timeout, log)
        record = cell.chosen(read_lines(output))
    except (Failed, ValueError) as error:
        return _say(cell, f"failed: {error}; log {log}", ok=False)
    here = measured(record)
    device = about["hardware"]["device"]
    base = cell.baseline(device)
    if flags.save:
        save_baseline(cell, record, about, flags.baselines)
    if base is None:
        others = ", ".join(cell.baselines) or "any GPU"
        return _say(cell, f"{_numbers(here, cell)}; no baseline on {device}, only on {others}", ok=True)
    slower = is_slower(here, base, cell, flags.tolerance)
    ratio = speed_ratio(here, base, cell)
    verdict = "slower" if slower else "as fast" if ratio < 1 + flags.tolerance else "faster"
    return _say(cell, f"{_numbers(here, cell)}; baseline {_numbers(base, cell)}; {ratio:.2f}x, {verdict}", not slower)


def speed_ratio(here: Measured, base: Measured, cell: Cell) -> float:
    """Returns the speed here over that of the baseline."""
    return here.median / base.median if UNITS[cell.unit].more_is_better else base.median / here.median


def is_slower(here: Measured, base: Measured, cell: Cell, tolerance: float) -> bool:
    """Returns whether the median is worse by more than the tolerance, and outside the baseline's range."""
    outside = here.median < base.lowest if UNITS[cell.unit].more_is_better else here.median > base.highest
    return outside and speed_ratio(here, base, cell) < 1 - tolerance


def _numbers(found: Measured, cell: Cell) -> str:
    return f"{number(found.median, cell.unit)} {cell.unit}, {found.gib_per_gpu:.1f} GiB"


def _say(cell: Cell, text: str, ok: bool) -> bool:
    print(f"{cell.name:<26} {text}", flush=True)
    return ok


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
