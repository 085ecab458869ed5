"""Runs a grid of training runs from a YAML file, one after another, and continues where it stopped.

python3 launch/sweep.py --config launch/sweeps/tiny.yaml --list
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The script runs uninstalled, and no module of this folder hides a package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import fnmatch
import math
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from launch import sweep_table
from launch.sweep_cells import Cell, expand
from launch.sweep_estimate import assumed, check_device, estimate, measured
from launch.sweep_file import Sweep, read_sweep
from launch.sweep_lock import LOG, check_ended, sweep_lock
from launch.sweep_records import FAILED, FILE, Record, current_record, read_records, steps, write_records
from launch.sweep_run import (
    Running,
    as_typed,
    end,
    ended,
    local_command,
    make_data,
    slurm_command,
    start,
    submit,
    with_job_status,
)
from lightseq.config.parser import count_flag
from lightseq.distributed.rank_launcher import gpus_here
from lightseq.utils.process import silence_loggers

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = 130
POLL_SECONDS = 0.25


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="launch/sweep.py", description=(__doc__ or "").splitlines()[0])
    out.add_argument("--config", required=True, type=Path, metavar="FILE", help="YAML file of the sweep")
    out.add_argument("--list", action="store_true", help="list the cells and their estimated times; run nothing")
    out.add_argument("--submit", action="store_true", help="submit every cell to Slurm instead of running it here")
    out.add_argument(
        "--only", action="append", metavar="NAME", help="only cells whose name contains NAME (* and ? match)"
    )
    out.add_argument("--retry-failed", action="store_true", help="rerun cells that failed or timed out")
    out.add_argument("--timeout", type=float, metavar="SECONDS", help="time limit of a cell (default: the file's)")
    out.add_argument("--device", metavar="NAME", help="GPU to estimate for, such as h100 (default: this host's)")
    out.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
        help="override a setting of the file in every cell: ranks=2, length=[4K,8K], output_dir=outputs/two",
    )  # fmt: skip
    out.add_argument(
        "--at_once", type=count_flag, default=1, metavar="N",
        help="number of cells to run side by side, each on its own GPUs (default: 1); they share the CPU cores",
    )  # fmt: skip
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sweep. Returns 0 if all chosen cells that fit this host are done or submitted, 1 if some failed, 2 for
    refused input, 130 if stopped."""
    arguments = parser().parse_args(argv)
    silence_loggers()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sweep = read_sweep(arguments.config, arguments.changes)
        os.chdir(ROOT)  # every path in a sweep file starts here
        if arguments.timeout is not None:
            if not 0 < arguments.timeout < math.inf:
                raise ValueError(f"--timeout {arguments.timeout:g}: give a number of seconds above 0")
            sweep = replace(sweep, timeout_seconds=arguments.timeout)
        if arguments.at_once < 1:
            raise ValueError(f"--at_once {arguments.at_once}: give a number of cells above 0")
        if arguments.submit and arguments.at_once > 1:
            raise ValueError("--at_once: Slurm decides how many jobs run at once; leave it out with --submit")
        if arguments.submit and shutil.which("sbatch") is None:
            raise ValueError("--submit: there is no sbatch here; leave it out to run the cells on this host")
        cells = expand(sweep)
        chosen = choose(cells, arguments.only)
        if arguments.list:
            show(sweep, chosen, cells, current_records(sweep, cells), arguments.device)
            return 0
        with sweep_lock(sweep.output_dir):  # before the records are read: another call may be writing them
            return run_or_submit(sweep, chosen, current_records(sweep, cells), arguments)
    except (ValueError, OSError) as error:
        print(f"launch/sweep.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("launch/sweep.py: stopped; run the same command again to continue", file=sys.stderr)
        return INTERRUPTED


def choose(cells: Sequence[Cell], patterns: Sequence[str] | None) -> list[Cell]:
    chosen = [c for c in cells if not patterns or any(fnmatch.fnmatch(c.name, f"*{p}*") for p in patterns)]
    if not chosen:
        raise ValueError(f"--only {' '.join(patterns or [])} matches no cell; one is named {cells[0].name}")
    return chosen


def current_records(sweep: Sweep, cells: Sequence[Cell]) -> dict[str, Record]:
    """Returns the present records of all cells, and the records of other sweep files in the same directory."""
    notes: list[str] = []
    noted = read_records(sweep.output_dir, notes)
    for note in notes:
        print(f"launch/sweep.py: note: {note}", file=sys.stderr)
    found = {
        cell.name: current_record(cell, noted.get(cell.name), as_typed(cell, local_command(cell))) for cell in cells
    }
    return {**noted, **with_job_status(found)}


def show(
    sweep: Sweep, chosen: Sequence[Cell], cells: Sequence[Cell], records: Mapping[str, Record], device: str | None
) -> None:
    """Prints the table of the chosen cells. Estimates are based on all cells that ran, chosen or not."""
    todo = [cell for cell in chosen if records[cell.name].status != "done"]
    ran = measured(cells, records) if todo else []
    device = check_device(device) if device else gpus_here().name
    times = {cell.name: estimate(cell, ran, device) if cell in todo else None for cell in chosen}
    source = "estimated from the cells that ran" if ran else assumed(device)
    console = Console(highlight=False)
    with console.capture() as capture:
        console.print(sweep_table.table(chosen, records, times))
    print(sweep_table.describe(sweep))
    print(f"in every cell: {sweep_table.fixed_line(chosen)}")
    print(*(line.rstrip() for line in capture.get().splitlines()), sep="\n")
    for line in sweep_table.failures(chosen, records):
        print(f"failed: {line}")
    print(sweep_table.total(chosen, records, times, source))


def run_or_submit(
    sweep: Sweep, chosen: Sequence[Cell], records: dict[str, Record], arguments: argparse.Namespace
) -> int:
    """Runs or submits the cells that are left, and records each outcome as it comes."""
    leave = {"done", "submitted"} | (set() if arguments.retry_failed else {*FAILED})
    todo = [cell for cell in chosen if records[cell.name].status not in leave]
    devices = () if arguments.submit else gpus_here().devices
    wide = [cell for cell in todo if devices and cell.ranks > len(devices)]
    todo = [cell for cell in todo if cell not in wide]
    check_ended(todo)
    print(f"{sweep_table.describe(sweep)}\n{left_out(chosen, records, len(wide), len(devices))}{len(todo)} to run")
    if arguments.submit:
        for cell in todo:
            slurm_command(sweep, cell)  # refuses a cell that fits no job before any is submitted
    write_records(sweep.output_dir, records.values())
    if todo and sweep.data is not None:
        make_data(sweep.data)
    reporter = Reporter(sweep, records, sweep_table.Terminal(len(todo)))
    try:
        if arguments.submit:
            for cell in todo:
                reporter.note(submit(sweep, cell, records[cell.name]))
        else:
            run_here(reporter, todo, arguments.at_once, devices if arguments.at_once > 1 else ())
    finally:
        reporter.terminal.close()
    return finish(sweep, chosen, records)


@dataclass(frozen=True)
class Reporter:
    """Records and shows the outcomes of cells."""

    sweep: Sweep
    records: dict[str, Record]
    terminal: sweep_table.Terminal

    def note(self, record: Record, say: bool = True) -> None:
        self.records[record.name] = record
        write_records(self.sweep.output_dir, self.records.values())
        if say:
            self.terminal.say(record)


def run_here(reporter: Reporter, todo: Sequence[Cell], at_once: int, devices: Sequence[str]) -> None:
    """Runs cells on this host in their order, except that a cell may overtake one that waits for more GPUs.

    Each cell gets its own of the `devices`; if there are none, a cell sees the GPUs that this program sees. Cells that
    are stopped are recorded as such.
    """
    waiting, running = list(todo), list[Running]()
    try:
        while waiting or running:
            while len(running) < at_once and (cell := next_cell(waiting, running, devices)):
                waiting.remove(cell)
                running.append(start(cell, own_gpus(cell, running, devices)))
            time.sleep(POLL_SECONDS)
            reporter.terminal.show([(one.cell, len(steps(one.cell.output_dir))) for one in running])
            for one in [*running]:
                if result := ended(one, reporter.sweep.timeout_seconds):
                    running.remove(one)
                    record = replace(local_record(reporter, one.cell), status=result.status, error=result.error)
                    reporter.note(replace(record, seconds=round(result.seconds, 3)))
    finally:
        for one in running:  # stopped: end all of them before writing records, which may fail
            end(one.process)
        for one in running:
            reporter.note(replace(local_record(reporter, one.cell), status="stopped", seconds=None), say=False)


def local_record(reporter: Reporter, cell: Cell) -> Record:
    return replace(reporter.records[cell.name], command=as_typed(cell, local_command(cell)), error=None, job_id=None)


def next_cell(waiting: Sequence[Cell], running: Sequence[Running], devices: Sequence[str]) -> Cell | None:
    """Returns the first cell for which enough GPUs are free; without `devices` the first cell."""
    free = len(devices) - sum(len(one.gpus) for one in running)
    return next((cell for cell in waiting if not devices or cell.ranks <= free), None)


def own_gpus(cell: Cell, running: Sequence[Running], devices: Sequence[str]) -> tuple[str, ...]:
    taken = {gpu for one in running for gpu in one.gpus}
    return tuple(gpu for gpu in devices if gpu not in taken)[: cell.ranks]


def left_out(chosen: Sequence[Cell], records: Mapping[str, Record], wide: int, gpus: int) -> str:
    """Returns what is not run, and why: `2 done, 1 failed before (...), 3 need more than the 2 GPUs here, `."""
    statuses = [records[cell.name].status for cell in chosen]
    failed = sum(status in FAILED for status in statuses)
    words = [f"{statuses.count(status)} {status}" for status in ("done", "submitted") if status in statuses]
    words += [f"{failed} failed before (--retry-failed runs them)"] if failed else []
    words += [f"{wide} need more than the {gpus} GPU{'s' * (gpus > 1)} here"] if wide else []
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
