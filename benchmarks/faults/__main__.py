"""Breaks small training runs in every way that docs/reliability.md lists, and writes a line of JSON for each fault.

python3 -m benchmarks.faults [--output benchmarks/results/faults.jsonl] [--only kill] [--share 0.1] [--seed 0]

Two processes on the CPU train a model of some thousand parameters in float32. After every fault the run goes on, and
must come to the very weights and losses of one without a fault; if not, this program says so and exits with 1.
"""

import argparse
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

import torch

from benchmarks.faults import fuzz, trials
from benchmarks.faults.ranks import RANKS, write_inputs
from benchmarks.faults.trials import Bench, Record, SkipTrial
from benchmarks.records import append
from lightseq.training import run_info

Fault = Callable[[Bench, int], Iterator[Record]]


def repeated(make: Callable[[Bench], Iterator[Record]]) -> Fault:
    return lambda bench, count: (record for _ in range(count) for record in make(bench))


# Name, how often, and what makes so many of them.
FAULTS: dict[str, tuple[int, Fault]] = {
    "SIGKILL of a rank": (60, trials.kill),
    "random flags": (500, fuzz.flags),
    "malformed data file": (500, fuzz.files),
    "truncated checkpoint file": (10, repeated(partial(trials.damage, how=trials.truncate, kind="truncated"))),
    "bit flipped in a checkpoint": (10, repeated(partial(trials.damage, how=trials.flip, kind="flipped"))),
    "missing checkpoint file": (10, repeated(partial(trials.damage, how=trials.remove, kind="missing"))),
    "disk full during a save": (5, repeated(trials.full_disk)),
    "quota reached by one rank": (3, repeated(trials.short_files)),
    "rank frozen (SIGSTOP)": (5, repeated(trials.freeze)),
    "rank that raises": (6, repeated(trials.failing)),
    "damaged data": (8, repeated(trials.corrupt_data)),
    "NaN in one rank's gradient": (3, repeated(trials.nonfinite)),
    "second run on the directory": (4, repeated(trials.two_runs)),
    "network cut": (3, repeated(trials.cut_network)),
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
    asked.output.unlink(missing_ok=True)
    append(asked.output, {
        "kind": "header", "commit": run_info.commit() or "unknown", "seed": asked.seed, "share": asked.share,
        "command": f"python3 -m benchmarks.faults {' '.join(words)}".strip(), "steps": trials.STEPS,
        "save_steps": trials.SAVE_STEPS, "ranks": RANKS, "torch": torch.__version__,
        "python": platform.python_version(), "machine": platform.machine(),
    })  # fmt: skip
    bench.undisturbed = trials.undisturbed(bench)
    chosen = [name for name in FAULTS if any(word in name.lower() for word in asked.only.lower().split(","))]
    survived = [survive(name, max(1, int(FAULTS[name][0] * asked.share)), bench, asked.output) for name in chosen]
    shutil.rmtree(folder)
    return 0 if all(survived) else 1


def survive(name: str, times: int, bench: Bench, output: Path) -> bool:
    """Makes a fault so many times, and returns whether training survived it."""
    begin, count, lost = time.monotonic(), 0, 0
    try:
        for record in FAULTS[name][1](bench, times):
            count, lost = count + record.get("count", 1), max(lost, record.get("steps_lost", 0))
            append(output, {"kind": "fault", "fault": name, **record})
    except SkipTrial as why:
        append(output, {"kind": "skipped", "fault": name, "why": str(why)})
        print(f"{name}: not tried, {why}", flush=True)
        return True
    except AssertionError as why:
        append(output, {"kind": "failed", "fault": name, "after": count, "why": str(why)[-3000:]})
        print(f"{name}: not survived after {count}: {str(why)[-3000:]}", flush=True)
        return False
    seconds = round(time.monotonic() - begin)
    append(output, {"kind": "survived", "fault": name, "count": count, "most_steps_lost": lost, "seconds": seconds})
    print(f"{name}: {count} survived, at most {lost} steps lost, {seconds} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
