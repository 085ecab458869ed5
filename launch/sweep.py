"""Runs a grid of training runs from a YAML file, one after another, and continues where it stopped.

python3 launch/sweep.py --config launch/sweeps/tiny.yaml --list
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The script runs uninstalled, and no module of this folder hides a package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import fcntl
import fnmatch
import os
import shutil
import signal
from argparse import Namespace
from collections.abc import Sequence

from launch.sweep_file import PROGRAM, Cell, read_sweep
from launch.sweep_run import Record, counted, current_records, run_or_submit
from lightseq.config.parser import Parser, count_flag, print_error
from lightseq.distributed.rank_launcher import INTERRUPTED
from lightseq.utils.files import open_output
from lightseq.utils.formatting import aligned, plural


def parser() -> Parser:
    out = Parser(prog=PROGRAM, description=(__doc__ or "").splitlines()[0])
    out.add_argument("--config", required=True, type=Path, metavar="FILE", help="YAML file of the sweep")
    out.add_argument("--list", action="store_true", help="list the cells and their status; run nothing")
    out.add_argument("--only", action="append", metavar="NAME", help="only cells with NAME in it (* and ? match)")
    out.add_argument("--retry-failed", action="store_true", help="rerun cells that failed or timed out")
    out.add_argument("--timeout", metavar="SECONDS", help="time limit of a cell: --set timeout_seconds=SECONDS")
    out.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
        help="override a setting of the file in every cell: ranks=2, length=[4K,8K], output_dir=outputs/two",
    )  # fmt: skip
    where = out.add_mutually_exclusive_group()
    where.add_argument("--submit", action="store_true", help="submit every cell to Slurm instead of running it here")
    where.add_argument(
        "--at_once", type=count_flag, default=1, metavar="N",
        help="number of cells to run side by side, each on its own GPUs (default: 1); they share the CPU cores",
    )  # fmt: skip
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sweep. Returns 0 if all chosen cells that fit this host are done or submitted, 1 if some failed, 2 for
    refused input, 130 if stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(parser().parse_args(argv))
    except (ValueError, OSError) as error:
        return print_error(error)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped; run the same command again to continue", file=sys.stderr)
        return INTERRUPTED


def run(arguments: Namespace) -> int:
    """Lists, runs or submits the cells of a sweep. Returns the exit status."""
    if arguments.at_once < 1:
        raise ValueError(f"--at_once {arguments.at_once}: give a number of cells above 0")
    if arguments.submit and shutil.which("sbatch") is None:
        raise ValueError("--submit: there is no sbatch here; leave it out to run the cells on this host")
    limit = [f"timeout_seconds={arguments.timeout}"] if arguments.timeout is not None else []
    sweep = read_sweep(arguments.config, [*arguments.changes, *limit])
    os.chdir(Path(__file__).resolve().parent.parent)  # every path in a sweep file starts here
    chosen = choose(sweep.cells, arguments.only)
    print(f"sweep: {sweep.description}, into {sweep.output_dir}")
    if arguments.list:
        return show(chosen, current_records(sweep))
    sweep.output_dir.mkdir(parents=True, exist_ok=True)
    with open_output(sweep.output_dir / ".sweep.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{sweep.output_dir} is in use ({error.strerror}); wait for the other sweep") from error
        return run_or_submit(sweep, chosen, current_records(sweep), arguments)


def choose(cells: Sequence[Cell], patterns: Sequence[str] | None) -> list[Cell]:
    chosen = [c for c in cells if not patterns or any(fnmatch.fnmatch(c.name, f"*{p}*") for p in patterns)]
    if not chosen:
        raise ValueError(f"--only {' '.join(patterns or [])} matches no cell; one is named {cells[0].name}")
    return chosen


def show(chosen: Sequence[Cell], records: dict[str, Record]) -> int:
    """Prints a line per cell, named as `--only` takes it, and the number of cells by status."""
    rows = [["", "cell", "status", "seconds", "error"]]
    for number, record in enumerate((records[cell.name] for cell in chosen), 1):
        seconds = "" if record.seconds is None else f"{record.seconds:,.0f}"
        rows.append([str(number), record.name, record.status, seconds, record.error or ""])
    print(*aligned(rows, left=(1, 2, 4)), sep="\n")
    print(f"{plural(len(chosen), 'cell')}: {counted(chosen, records)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
