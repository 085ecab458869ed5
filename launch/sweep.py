"""Runs a grid of training runs from a YAML file, one after the other, and goes on where it stopped.

python3 launch/sweep.py --config launch/sweeps/tiny.yaml --list
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # runs uninstalled, and hides no package behind this folder

import argparse
import fnmatch
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from launch import sweep_table
from launch.sweep_cells import Cell, expand
from launch.sweep_estimate import estimate, gpu_name, measured
from launch.sweep_file import Sweep, read_sweep
from launch.sweep_records import FAILED, FILE, Record, now, read_records, steps, write_records
from launch.sweep_run import LOG, followed, local_command, make_data, run, slurm_command, submit, typed

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="launch/sweep.py", description=(__doc__ or "").splitlines()[0])
    out.add_argument("--config", required=True, type=Path, metavar="FILE", help="the sweep, in YAML")
    out.add_argument("--list", action="store_true", help="show the cells and how long they will take; run nothing")
    out.add_argument("--submit", action="store_true", help="hand every cell to sbatch instead of running it here")
    out.add_argument("--only", action="append", metavar="NAME", help="cells whose name has this in it (* and ? match)")
    out.add_argument("--retry-failed", action="store_true", help="run cells again that failed or took too long")
    out.add_argument("--timeout", type=float, metavar="SECONDS", help="of a cell, instead of the file's")
    out.add_argument("--device", metavar="NAME", help='GPU to estimate for, as "NVIDIA H100" (default: the one here)')
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """0: all cells asked for are done (or handed over); 1: some failed; 2: the input was refused; 130: stopped."""
    arguments = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sweep = read_sweep(arguments.config)
        os.chdir(ROOT)  # every path in a sweep file starts here
        if arguments.timeout is not None:
            if not arguments.timeout > 0:
                raise ValueError(f"--timeout {arguments.timeout:g}: give a number of seconds above 0")
            sweep = replace(sweep, timeout_seconds=arguments.timeout)
        if arguments.submit and shutil.which("sbatch") is None:
            raise ValueError("--submit: there is no sbatch here; leave it out to run the cells on this host")
        cells = expand(sweep)
        chosen = choose(cells, arguments.only)
        noted = read_records(sweep.output_dir)
        known = {cell.name: now(cell, noted.get(cell.name), typed(cell, local_command(cell))) for cell in cells}
        records = followed(known)
        if arguments.list:
            show(sweep, chosen, cells, records, arguments.device)
            return 0
        return go(sweep, chosen, {**noted, **records}, arguments)
    except (ValueError, OSError) as error:
        print(f"launch/sweep.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("launch/sweep.py: stopped; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED


def choose(cells: Sequence[Cell], patterns: Sequence[str] | None) -> list[Cell]:
    chosen = [c for c in cells if not patterns or any(fnmatch.fnmatch(c.name, f"*{p}*") for p in patterns)]
    if not chosen:
        raise ValueError(f"--only {' '.join(patterns or [])}: no cell has such a name, as {cells[0].name}; see --list")
    return chosen


def show(
    sweep: Sweep, chosen: Sequence[Cell], cells: Sequence[Cell], records: Mapping[str, Record], device: str | None
) -> None:
    """The table. Cells that ran teach about those that did not, chosen or not."""
    console = Console(highlight=False)
    todo = [cell for cell in chosen if records[cell.name].status != "done"]
    ran = measured(cells, records) if todo else []
    device = device or gpu_name()
    times = {cell.name: estimate(cell, ran, device) if cell in todo else None for cell in chosen}
    source = "by the cells that ran" if ran else f"by 40% of the peak of {device}"
    console.print(sweep_table.describe(sweep), markup=False)
    console.print(f"in every cell: {sweep_table.fixed_line(chosen)}", markup=False)
    console.print(sweep_table.table(chosen, records, times))
    for line in sweep_table.failures(chosen, records):
        console.print(f"failed: {line}", markup=False)
    console.print(sweep_table.total(chosen, records, times, source), markup=False)


def go(sweep: Sweep, chosen: Sequence[Cell], records: dict[str, Record], arguments: argparse.Namespace) -> int:
    """Runs or submits what is to be done, noting each end as it comes."""
    leave = {"done", "submitted"} | (set() if arguments.retry_failed else {*FAILED})
    todo = [cell for cell in chosen if records[cell.name].status not in leave]
    print(f"{sweep_table.describe(sweep)}\n{left_out(chosen, records)}{len(todo)} to run")
    if arguments.submit:
        for cell in todo:
            slurm_command(sweep, cell)  # what no job can be made of is refused before any is handed over
    write_records(sweep.output_dir, records.values())
    if todo and sweep.data is not None:
        make_data(sweep.data)
    terminal = sweep_table.Terminal(len(todo))
    try:
        for cell in todo:
            terminal.begin(cell)
            one = submit(sweep, cell, records[cell.name]) if arguments.submit else here(sweep, cell, records, terminal)
            records[cell.name] = one
            write_records(sweep.output_dir, records.values())
            terminal.say(one)
    finally:
        terminal.close()
    return finish(sweep, chosen, records)


def here(sweep: Sweep, cell: Cell, records: dict[str, Record], terminal: sweep_table.Terminal) -> Record:
    """Runs a cell on this host; if it is interrupted, that is noted too."""
    record = replace(records[cell.name], command=typed(cell, local_command(cell)), error=None, job_id=None)
    try:
        ended = run(cell, sweep.timeout_seconds, lambda: terminal.step(cell, len(steps(cell.output_dir))))
    except KeyboardInterrupt:
        records[cell.name] = replace(record, status="stopped", seconds=None)
        write_records(sweep.output_dir, records.values())
        raise
    return replace(record, status=ended.status, seconds=round(ended.seconds, 3), error=ended.error)


def left_out(chosen: Sequence[Cell], records: Mapping[str, Record]) -> str:
    """What is not run, and why: `2 done, 1 failed before (--retry-failed), `."""
    statuses = [records[cell.name].status for cell in chosen]
    failed = sum(status in FAILED for status in statuses)
    words = [f"{statuses.count(status)} {status}" for status in ("done", "submitted") if status in statuses]
    words += [f"{failed} failed before (--retry-failed runs them)"] if failed else []
    return "".join(f"{word}, " for word in words)


def finish(sweep: Sweep, chosen: Sequence[Cell], records: Mapping[str, Record]) -> int:
    statuses = [records[cell.name].status for cell in chosen]
    counts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    print(f"{', '.join(counts)}; records  {sweep.output_dir / FILE}")
    failed = [cell for cell in chosen if records[cell.name].status in FAILED]
    for cell in failed:
        job = records[cell.name].job_id
        print(f"failed  {f'slurm-{job}.out' if job else cell.output_dir / LOG}")
    return 1 if failed else 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
