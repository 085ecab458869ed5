"""What writing checkpoints costs the training beside it, from the metrics of a run that logged every step.

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

from lightseq.training.metrics import METRICS, RUN, read_records


@dataclass(frozen=True)
class Cost:
    """Of one save, in seconds and as a share of an undisturbed step."""

    after_step: int
    waited_seconds: float
    slowed_seconds: float  # below 0 where the steps after it happened to be faster
    share_of_step_waited: float
    share_of_step: float


def costs(records: Sequence[Mapping[str, Any]], every: int, skip: int) -> tuple[float, list[Cost]]:
    """The median of an undisturbed step, and what every save but the last, which ends the run, cost."""
    steps = {r["step"]: r for r in records if "loss" in r}
    if len(steps) != max(steps, default=0):
        raise ValueError(f"{len(steps)} records of {max(steps, default=0)} steps; train with --logging_steps 1")
    quiet = [r["step_seconds"] for step, r in steps.items() if skip < step <= every]
    if len(quiet) < 2:
        raise ValueError(f"only {len(quiet)} steps between the warm-up of {skip} and the first save; save less often")
    usual = statistics.median(quiet)
    found = []
    for saved in range(every, max(steps), every):
        after = [steps[step] for step in range(saved + 1, min(saved + every, max(steps)) + 1)]
        waited = sum(r["saving_seconds"] for r in after)
        slowed = sum(r["step_seconds"] - usual for r in after)
        found.append(Cost(saved, waited, slowed, waited / usual, (waited + slowed) / usual))
    return usual, found


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--skip", type=int, default=5, help="steps of warm-up")
    parser.add_argument("--output", type=Path, help="where to append a line of JSON")
    asked = parser.parse_args(words)
    try:
        run = json.loads((asked.run / RUN).read_text())
        usual, found = costs(read_records(asked.run / METRICS), run["config"]["save_steps"], asked.skip)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"an undisturbed step takes {usual:.3f} s")
    print("after step   waited   slowed later   of a step: waited, in all")
    for cost in found:
        print(f"{cost.after_step:10d} {cost.waited_seconds:7.3f}s {cost.slowed_seconds:12.3f}s"
              f" {cost.share_of_step_waited:17.1%} {cost.share_of_step:9.1%}")  # fmt: skip
    waited, total = (statistics.median(values) for values in zip(
        *((cost.share_of_step_waited, cost.share_of_step) for cost in found), strict=True))  # fmt: skip
    print(f"    median {'':33}{waited:10.1%} {total:9.1%}")
    if asked.output is not None:
        about = {key: run[key] for key in ("command", "hardware", "world_size", "versions")}
        with asked.output.open("a") as file:
            file.write(json.dumps({"step_seconds": usual, "saves": [asdict(cost) for cost in found], **about}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
