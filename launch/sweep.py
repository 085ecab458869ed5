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
from dataclasses import dataclass, field, replace

from launch.sweep_file import LABELS, PROGRAM, Cell, Sweep, expand, read_sweep
from launch.sweep_records import FAILED, FILE, Record, current_record, lock, read_records, write_records
from launch.sweep_run import (
    LOG,
    Running,
    as_typed,
    check_ended,
    end,
    ended,
    make_data,
    slurm_command,
    start,
    submit,
    with_job_status,
)
from lightseq.config.parser import count_flag
from lightseq.distributed.rank_launcher import gpus_here
from lightseq.utils.formatting import aligned
from lightseq.utils.process import silence_loggers

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = 130
POLL_SECONDS = 0.25


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog=PROGRAM, description=(__doc__ or "").splitlines()[0])
    out.add_argument("--config", required=True, type=Path, metavar="FILE", help="YAML file of the sweep")
    out.add_argument("--list", action="store_true", help="list the cells and their status; run nothing")
    out.add_argument("--submit", action="store_true", help="submit every cell to Slurm instead of running it here")
    out.add_argument(
        "--only", action="append", metavar="NAME", help="only cells whose name contains NAME (* and ? match)"
    )
    out.add_argument("--retry-failed", action="store_true", help="rerun cells that failed or timed out")
    out.add_argument("--timeout", type=float, metavar="SECONDS", help="time limit of a cell (default: the file's)")
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
        check(arguments)
        sweep = replace(sweep, cell_seconds=arguments.timeout or sweep.cell_seconds)
        cells = expand(sweep)
        chosen = choose(cells, arguments.only)
        if arguments.list:
            show(sweep, chosen, current_records(sweep, cells))
            return 0
        with lock(sweep.output_dir / ".sweep.lock", f"another call of {PROGRAM} runs; wait until it ends"):
            # Only now, because the other call may have been writing records.
            return run_or_submit(sweep, chosen, current_records(sweep, cells), arguments)
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped; run the same command again to continue", file=sys.stderr)
        return INTERRUPTED


def check(arguments: argparse.Namespace) -> None:
    if arguments.timeout is not None and not 0 < arguments.timeout < math.inf:
        raise ValueError(f"--timeout {arguments.timeout:g}: give a number of seconds above 0")
    if arguments.at_once < 1:
        raise ValueError(f"--at_once {arguments.at_once}: give a number of cells above 0")
    if arguments.submit and arguments.at_once > 1:
        raise ValueError("--at_once: Slurm decides how many jobs run at once; leave it out with --submit")
    if arguments.submit and shutil.which("sbatch") is None:
        raise ValueError("--submit: there is no sbatch here; leave it out to run the cells on this host")


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
        print(f"{PROGRAM}: note: {note}", file=sys.stderr)
    found = {cell.name: current_record(cell, noted.get(cell.name), as_typed(cell)) for cell in cells}
    return {**noted, **with_job_status(found)}


def show(sweep: Sweep, chosen: Sequence[Cell], records: Mapping[str, Record]) -> None:
    """Prints a line per cell, named as `--only` takes it, and the settings that all cells share."""
    first, rows = chosen[0].settings, [["", "cell", "status", "seconds"]]
    same = {key: word for key, word in first.items() if all(cell.settings.get(key) == word for cell in chosen)}
    for number, record in enumerate((records[cell.name] for cell in chosen), 1):
        seconds = "" if record.seconds is None else f"{record.seconds:,.0f}"
        rows.append([str(number), record.name, record.status, seconds])
    print(describe(sweep))
    print(f"in every cell: {', '.join(f'{LABELS.get(key, key)}={word}' for key, word in same.items())}")
    print(*aligned(rows, left=(1, 2)), sep="\n")
    for record in (records[cell.name] for cell in chosen):
        if record.status in FAILED:
            print(f"failed: {record.name}: {record.error}")
    print(f"{len(chosen)} cells, {sum(records[cell.name].status != 'done' for cell in chosen)} not done")


def describe(sweep: Sweep) -> str:
    return f"sweep: {sweep.description}, into {sweep.output_dir}"


def run_or_submit(
    sweep: Sweep, chosen: Sequence[Cell], records: dict[str, Record], arguments: argparse.Namespace
) -> int:
    """Runs or submits the cells that are left, and records each outcome as it comes."""
    leave = {"done", "submitted"} | (set() if arguments.retry_failed else {*FAILED})
    todo = [cell for cell in chosen if records[cell.name].status not in leave]
    devices = () if arguments.submit else gpus_here().devices
    wide = [cell for cell in todo if devices and cell.ranks > len(devices)]
    todo = [cell for cell in todo if cell not in wide]
    for cell in todo:
        check_ended(cell)
        if arguments.submit:
            slurm_command(sweep, cell)  # refuses a cell that fits no job before any is submitted
    print(f"{describe(sweep)}\n{left_out(chosen, records, len(wide), len(devices))}{len(todo)} to run")
    write_records(sweep.output_dir, records.values())
    if todo and sweep.data is not None:
        make_data(sweep.data)
    reporter = Reporter(sweep, records, len(todo))
    if arguments.submit:
        for cell in todo:
            reporter.note(submit(sweep, cell, records[cell.name]))
    else:
        run_here(reporter, todo, arguments.at_once, devices if arguments.at_once > 1 else ())
    return finish(sweep, chosen, records)


@dataclass
class Reporter:
    """Records and prints the outcomes of cells."""

    sweep: Sweep
    records: dict[str, Record]
    count: int
    noted: int = field(default=0, init=False)

    def note(self, record: Record) -> None:
        self.records[record.name] = record
        write_records(self.sweep.output_dir, self.records.values())
        if record.status == "stopped":
            return
        self.noted += 1
        took = "" if record.seconds is None else f" in {record.seconds:,.0f} s"
        job = f" as job {record.job_id}" if record.status == "submitted" else ""
        why = f": {record.error}" if record.error else ""
        print(f"[{self.noted}/{self.count}] {record.name}  {record.status}{took}{job}{why}", flush=True)


def run_here(reporter: Reporter, todo: Sequence[Cell], at_once: int, devices: Sequence[str]) -> None:
    """Runs cells on this host in their order, except that a cell may overtake one that waits for more GPUs.

    Each cell gets its own of the `devices`; if there are none, a cell sees the GPUs that this program sees. Cells that
    are stopped are recorded as such.
    """
    waiting, running, records = list(todo), list[Running](), reporter.records
    try:
        while waiting or running:
            free = [gpu for gpu in devices if not any(gpu in one.gpus for one in running)]
            fits = (cell for cell in waiting if not devices or cell.ranks <= len(free))
            if len(running) < at_once and (cell := next(fits, None)):
                waiting.remove(cell)
                print(f"{cell.name} runs; its log is {cell.output_dir / LOG}", flush=True)
                records[cell.name] = replace(records[cell.name], command=as_typed(cell))
                running.append(start(cell, tuple(free[: cell.ranks])))
                continue
            time.sleep(POLL_SECONDS)
            for one in [*running]:
                if record := ended(one, records[one.cell.name], reporter.sweep.cell_seconds):
                    running.remove(one)
                    reporter.note(record)
    finally:
        for one in running:  # stopped: end all of them before writing records, which may fail
            end(one.process)
        for one in running:
            reporter.note(replace(records[one.cell.name], status="stopped", seconds=None, error=None, job_id=None))


def left_out(chosen: Sequence[Cell], records: Mapping[str, Record], wide: int, gpus: int) -> str:
    """Returns what is not run, and why: `2 done, 1 failed before (...), 3 need more than the 2 GPUs here, `."""
    statuses = [records[cell.name].status for cell in chosen]
    failed = sum(status in FAILED for status in statuses)
    words = [f"{statuses.count(status)} {status}" for status in ("done", "submitted") if status in statuses]
    words += [f"{failed} failed before (--retry-failed runs them)"] if failed else []
    words += [f"{wide} need more than the {gpus} GPU{'s' * (gpus > 1)} here"] if wide else []
    return "".join(f"{word}, " for word in words)


def finish(sweep: Sweep, chosen: Sequence[Cell], records: Mapping[str, Record]) -> int:
    found = [records[cell.name] for cell in chosen]
    statuses = [record.status for record in found]
    counts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    print(f"{', '.join(counts)}; records  {sweep.output_dir / FILE}")
    failed = [record for record in found if record.status in FAILED]
    for record in failed:
        print(f"failed  {f'slurm-{record.job_id}.out' if record.job_id else Path(record.output_dir) / LOG}")
    return 1 if failed else 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
