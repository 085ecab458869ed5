"""Breaks small training runs in every way that docs/reliability.md lists, and writes a line of JSON for each fault.

python3 -m benchmarks.faults [--output benchmarks/results/faults.jsonl] [--only kill] [--share 0.1] [--seed 0]

Two processes on the CPU train a model of some thousand parameters in float32. After every fault the run goes on, and
must come to the very weights and losses of one that nothing befell; if not, this program says so and exits with 1.
"""

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults import fuzz, trials
from benchmarks.faults.ranks import write_inputs
from benchmarks.faults.trials import Bench, Record, SkipTrial
from benchmarks.report import commit_here

Fault = Callable[[Bench], Iterator[Record]]
# Name, how often, what makes one (or, for kills and fuzzing, all of them).
ONE_BY_ONE: dict[str, tuple[int, Fault]] = {
    "truncated checkpoint file": (10, partial(trials.damage, how=trials.truncate, kind="truncated")),
    "bit flipped in a checkpoint": (10, partial(trials.damage, how=trials.flip, kind="flipped")),
    "missing checkpoint file": (10, partial(trials.damage, how=trials.remove, kind="missing")),
    "disk full during a save": (5, trials.full_disk),
    "quota reached by one rank": (3, trials.short_files),
    "rank frozen (SIGSTOP)": (5, trials.freeze),
    "rank that raises": (6, trials.failing),
    "damaged data": (8, trials.corrupt_data),
    "NaN in one rank's gradient": (3, trials.sick_numbers),
    "second run on the directory": (4, trials.two_runs),
    "network cut": (3, trials.cut_network),
}
AT_ONCE: dict[str, tuple[int, Callable[[Bench, int], Iterator[Record]]]] = {
    "SIGKILL of a rank": (60, trials.kill),
    "random flags": (500, fuzz.flags),
    "malformed data file": (500, fuzz.files),
}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/faults.jsonl"))
    parser.add_argument("--only", default="", help="the faults whose names hold one of these words, as kill,network")
    parser.add_argument("--share", type=float, default=1.0, help="of the counts that are usual, at least one of each")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks inherit it
    trials.own_mounts()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    bench = Bench(folder, random.Random(asked.seed))
    write_inputs(folder)
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    with asked.output.open("w") as file:
        write(file, {"kind": "header", "commit": commit_here(), "seed": asked.seed, "share": asked.share,
                     "command": f"python3 -m benchmarks.faults {' '.join(words)}".strip(), "steps": trials.STEPS,
                     "save_steps": trials.SAVE_STEPS, "ranks": trials.RANKS, "torch": torch.__version__,
                     "python": platform.python_version(), "machine": platform.machine()})  # fmt: skip
        bench.undisturbed = trials.undisturbed(bench)
        asked_for = asked.only.lower().split(",")
        chosen = {name: make for name, make in faults(asked.share).items() if any(w in name.lower() for w in asked_for)}
        survived = [survive(name, make, bench, file) for name, make in chosen.items()]
    shutil.rmtree(folder)
    return 0 if all(survived) else 1


def faults(share: float) -> dict[str, Fault]:
    def repeated(count: int, make: Fault) -> Fault:
        return lambda bench: (record for _ in range(count) for record in make(bench))

    found: dict[str, Fault] = {}
    for name, (count, make_all) in AT_ONCE.items():
        found[name] = partial(make_all, **{"kills" if make_all is trials.kill else "count": max(1, int(count * share))})
    for name, (count, make) in ONE_BY_ONE.items():
        found[name] = repeated(max(1, int(count * share)), make)
    return found


def survive(name: str, make: Fault, bench: Bench, file: Any) -> bool:
    begin, count, lost = time.monotonic(), 0, 0
    try:
        for record in make(bench):
            count, lost = count + record.get("count", 1), max(lost, record.get("steps_lost", 0))
            write(file, {"kind": "fault", "fault": name, **record})
    except SkipTrial as why:
        write(file, {"kind": "skipped", "fault": name, "why": str(why)})
        print(f"{name}: not tried, {why}", flush=True)
        return True
    except AssertionError as why:
        write(file, {"kind": "failed", "fault": name, "after": count, "why": f"{why}"[-3000:]})
        print(f"{name}: not survived after {count}: {str(why)[-3000:]}", flush=True)
        return False
    seconds = time.monotonic() - begin
    write(file, {"kind": "survived", "fault": name, "count": count, "most_steps_lost": lost, "seconds": round(seconds)})
    print(f"{name}: {count} survived, at most {lost} steps lost, {seconds:.0f} s", flush=True)
    return True


def write(file: Any, record: Record) -> None:
    file.write(json.dumps(record) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
