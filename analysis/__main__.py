"""Draws training runs and prints what they come to: `python3 -m analysis OUTPUT_DIR... [--output DIR]`.

`python3 -m analysis COMMAND` does so with what else writes JSONL: benchmarks, evaluations, profiles, sweeps, plans.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from . import attention, cluster, compare, evaluate, faults, largest, plots, profile, report, step, watch
from .figures import draw
from .jsonl import say
from .pictures import add_format, add_output, folder_of
from .runs import described, read_runs
from .summary import summarize, tables


class Command(NamedTuple):
    main: Callable[[Sequence[str]], int]
    operands: str
    about: str


COMMANDS: Mapping[str, Command] = {
    "attention": Command(attention.main, "FILE...", "draws what benchmarks/attention.py measured"),
    "step": Command(step.main, "FILE...", "draws what benchmarks/step.py measured"),
    "largest": Command(largest.main, "FILE...", "draws what benchmarks/largest.py found"),
    "cluster": Command(cluster.main, "FILE", "draws what lightseq plan --attention predicted"),
    "evaluate": Command(evaluate.main, "OUT...", "draws what lightseq evaluate measured"),
    "plots": Command(plots.main, "--config FILE", "draws the figures that a YAML file asks of runs"),
    "compare": Command(compare.main, "A B", "says how far two runs are apart"),
    "profile": Command(profile.main, "OUTPUT_DIR", "says where the time of profiled steps went"),
    "watch": Command(watch.main, "OUTPUT_DIR", "shows a run while it trains"),
    "report": Command(report.main, "DIR", "writes an HTML page of all results below it"),
    "faults": Command(faults.main, "FILE...", "prints what `make faults` did"),
}
TAKE_FILES = ("attention", "cluster", "faults", "largest", "step")  # the others take directories


def parser() -> argparse.ArgumentParser:
    usages = {name: f"{name} {command.operands}" for name, command in COMMANDS.items()}
    listed = "\n".join(f"  {usage:<22} {COMMANDS[name].about}" for name, usage in usages.items())
    out = argparse.ArgumentParser(
        prog="analysis",
        usage="python3 -m analysis OUTPUT_DIR... [--output DIR] [--format png|svg|both]",
        description="Draws loss, throughput, memory and MFU from the metrics.jsonl of runs.",
        epilog=f"with a command (python3 -m analysis COMMAND -h has its flags):\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("runs", metavar="OUTPUT_DIR", nargs="+", type=Path, help="the --output_dir of a training run")
    add_output(out, "OUTPUT_DIR")
    add_format(out)
    return out


def names_command(words: Sequence[str], command: str) -> bool:
    """Whether the first word is the command. A run in a directory of that name is a run, unless operands follow."""
    if list(words[:1]) != [command]:
        return False
    if not (Path(command) / "metrics.jsonl").is_file():
        return True
    return any(Path(word).is_file() for word in words[1:]) if command in TAKE_FILES else len(words) > 1


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    for name, command in COMMANDS.items():
        if names_command(words, name):
            return command.main(words[1:])
    arguments = parser().parse_args(words)
    notes: list[str] = []
    try:
        runs = read_runs(arguments.runs, notes)
        pictures = draw(runs, folder_of(arguments.output, [run.directory for run in runs]), arguments.format)
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2
    say([*notes, *(note for run in runs for note in run.notes)])
    for run in runs:
        if text := described(run):
            print(f"{run.label}: {text}")
    Console().print(*tables([summarize(run) for run in runs]))
    for picture in pictures:
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
