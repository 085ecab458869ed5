"""Times whole training steps of one model at several lengths: lightseq's trainer and what one would use instead.

python3 benchmarks/step.py --model llama3.2-1b --lengths 32K,128K --nproc_per_node 4

Every implementation takes every length in processes of its own, so that one that runs out of memory or hangs costs only
itself. All train the same weights on the same tokens, a sequence a step over all ranks, with fused AdamW.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # and hides no package behind this folder

import argparse
import json
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from benchmarks.report import commit_here
from benchmarks.training.flags import parse, parser
from benchmarks.training.launch import Failed, run
from benchmarks.training.outcome import Outcome, read_outcome
from benchmarks.training.records import Machine, Provenance, line, look_at_machine, record, table
from benchmarks.training.trials import Trial, setting_of, trials, write_inputs
from lightseq.training.metrics import METRICS, RUN


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        parser().print_help()
        return 0
    try:
        flags = parse(words)
        machine = look_at_machine()
        setting = setting_of(flags, machine.on_gpu)
        write_inputs(setting, flags.lengths)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    provenance = provenance_of(words, flags, machine)
    points = []
    with flags.output.open("a" if flags.append else "w", encoding="utf-8") as file:
        for trial in trials(flags, setting):
            point = take(trial, provenance)
            file.write(json.dumps(point) + "\n")
            file.flush()
            print(line(point) + (f" ({trial.log})" if point["skipped"] else ""), flush=True)
            points.append(point)
    Console().print(table(points))
    print(f"records  {flags.output}")
    return 0


def provenance_of(words: Sequence[str], flags: argparse.Namespace, machine: Machine) -> Provenance:
    command = f"python3 benchmarks/step.py {shlex.join(words)}"
    return Provenance(command, flags.commit or commit_here(), datetime.now(UTC).isoformat(timespec="seconds"), machine)


def take(trial: Trial, provenance: Provenance) -> dict[str, Any]:
    """Runs a trial; its record says `skipped` where it came to nothing."""
    outcome: Outcome | None = None
    skipped: str | None = None
    for earlier in (trial.result, trial.directory / RUN, trial.directory / METRICS):
        earlier.unlink(missing_ok=True)  # of an earlier benchmark, whose numbers must not count
    try:
        run(trial.command, trial.setting.timeout, trial.log)
        outcome = read_outcome(trial)
    except Failed as why:
        skipped = str(why)
    return record(trial, outcome, skipped, provenance)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
