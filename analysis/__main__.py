"""Draws training runs and prints what they come to: `python3 -m analysis OUTPUT_DIR... [--output DIR]`.

`python3 -m analysis attention FILE...` draws a benchmark of the attention layer.
`python3 -m analysis cluster FILE` draws a plan of the attention layer over clusters of many sizes.
`python3 -m analysis evaluate OUT...` draws evaluations: perplexity by position, and what a long text hides.
`python3 -m analysis step FILE...` draws a benchmark of whole training steps.
`python3 -m analysis largest FILE...` draws the largest models that fit.
`python3 -m analysis faults FILE...` prints what `make faults` did to runs.
`python3 -m analysis profile OUTPUT_DIR [--timeline]` accounts for the time of the steps that a run profiled.
`python3 -m analysis compare A B` says how far two runs are apart.
`python3 -m analysis plots --config FILE` draws the figures that a YAML file asks of many runs.
`python3 -m analysis watch OUTPUT_DIR` shows a run while it trains.
`python3 -m analysis report RESULTS_DIR` writes one HTML page of every run and benchmark below a directory.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from . import attention, cluster, compare, evaluate, faults, largest, plots, profile, report, step, watch
from .figures import draw
from .jsonl import say
from .pictures import add_format
from .runs import described, read_runs
from .summary import summarize, tables

COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "attention": attention.main,
    "cluster": cluster.main,
    "compare": compare.main,
    "evaluate": evaluate.main,
    "faults": faults.main,
    "largest": largest.main,
    "plots": plots.main,
    "profile": profile.main,
    "report": report.main,
    "step": step.main,
    "watch": watch.main,
}
TAKE_FILES = ("attention", "cluster", "faults", "largest", "step")  # the others take directories


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="analysis",
        usage="python3 -m analysis OUTPUT_DIR... [--output DIR] [--format png|svg|both]",
        description="Draws loss, throughput, memory and MFU from the metrics.jsonl of runs.",
        epilog="`python3 -m analysis attention FILE...` draws what benchmarks/attention.py measured, "
        "`python3 -m analysis cluster FILE` what `python3 -m lightseq plan --attention` predicted, "
        "`python3 -m analysis evaluate OUT...` what `python3 -m lightseq evaluate` measured, "
        "`python3 -m analysis step FILE...` what benchmarks/step.py measured, "
        "`python3 -m analysis largest FILE...` what benchmarks/largest.py found. "
        "`python3 -m analysis faults FILE...` prints what make faults did, "
        "`python3 -m analysis profile OUTPUT_DIR` accounts for the time of profiled steps, "
        "`python3 -m analysis compare A B` says how far two runs are apart, "
        "`python3 -m analysis plots --config FILE` draws the figures that a YAML file asks of many runs, "
        "`python3 -m analysis watch OUTPUT_DIR` shows a run while it trains, "
        "`python3 -m analysis report DIR` writes one HTML page of all results below a directory.",
    )
    out.add_argument("runs", metavar="OUTPUT_DIR", nargs="+", type=Path, help="the --output_dir of a training run")
    out.add_argument("--output", metavar="DIR", type=Path, help="where the pictures go (default: the first OUTPUT_DIR)")
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
    for command, draw_command in COMMANDS.items():
        if names_command(words, command):
            return draw_command(words[1:])
    arguments = parser().parse_args(words)
    notes: list[str] = []
    try:
        runs = read_runs(arguments.runs, notes)
        pictures = draw(runs, arguments.output or runs[0].directory, arguments.format)
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
