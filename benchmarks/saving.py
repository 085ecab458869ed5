"""Measures what writing checkpoints costs the training beside it, from the metrics of a run that logged every step.

python3 -m benchmarks.saving OUTPUT_DIR [--skip 5] [--output benchmarks/results/saving.jsonl]

A save is charged with the time for which training waited for it, and with what the steps until the next save took
longer than those that no save was near: the steps before the first one, less the warm-up.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import append
from lightseq.config.parser import answered
from lightseq.training.metrics import METRICS, RUN, read_records


@dataclass(frozen=True)
class Cost:
    """Cost of one save, in seconds and as a share of an undisturbed step."""

    after_step: int
    waited_seconds: float
    slowed_seconds: float  # below 0 where the steps after it happened to be faster
    share_of_step_waited: float
    share_of_step: float


def costs(records: Sequence[Mapping[str, Any]], every: int, skip: int) -> tuple[float, list[Cost]]:
    """Returns the median of an undisturbed step, and the cost of every save but the last, which ends the run."""
    steps = {r["step"]: r for r in records if "loss" in r}
    last = max(steps, default=0)
    if len(steps) != last:
        raise ValueError(f"{len(steps)} records of {last} steps; train with --logging_steps 1")
    quiet = [r["step_seconds"] for step, r in steps.items() if skip < step <= every]
    if len(quiet) < 2:
        raise ValueError(f"only {len(quiet)} steps between the warm-up of {skip} and the first save; save less often")
    usual = statistics.median(quiet)
    found = []
    for saved in range(every, last, every):
        after = [steps[step] for step in range(saved + 1, min(saved + every, last) + 1)]
        waited = sum(r["saving_seconds"] for r in after)
        slowed = sum(r["step_seconds"] - usual for r in after)
        found.append(Cost(saved, waited, slowed, waited / usual, (waited + slowed) / usual))
    return usual, found


def report(run: Path, skip: int, output: Path | None) -> None:
    about = json.loads((run / RUN).read_text())
    usual, found = costs(read_records(run / METRICS), about["config"]["save_steps"], skip)
    print(f"an undisturbed step takes {usual:.3f} s")
    for cost in found:
        print(
            f"after step {cost.after_step}: waited {cost.waited_seconds:.3f} s ({cost.share_of_step_waited:.1%} of a "
            f"step), slowed later {cost.slowed_seconds:.3f} s; in all {cost.share_of_step:.1%}"
        )
    waited = statistics.median(cost.share_of_step_waited for cost in found)
    in_all = statistics.median(cost.share_of_step for cost in found)
    print(f"median: waited {waited:.1%}, in all {in_all:.1%} of a step")
    if output is not None:
        run_facts = {key: about[key] for key in ("command", "hardware", "world_size", "versions")}
        append(output, {"step_seconds": usual, "saves": [asdict(cost) for cost in found], **run_facts})


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--skip", type=int, default=5, help="steps of warm-up")
    parser.add_argument("--output", type=Path, help="where to append a line of JSON")
    asked = parser.parse_args(words)
    return answered(lambda: report(asked.run, asked.skip, asked.output))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
