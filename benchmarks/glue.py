"""What stands between products and attention in a step: norms, rotation, SwiGLU. Eager, by Liger, or compiled.

python3 benchmarks/glue.py --output benchmarks/results/glue-1xh100.jsonl

Every step is taken in processes of its own, by ours alone but for the kernels named: the ways in turns, over and over.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # and hides no package behind this folder

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.flags import Parser, positive
from benchmarks.plan_points import K, Point, add_choice, line, take
from benchmarks.training.records import look_at_machine
from benchmarks.training.trials import ROOT
from lightseq.config.parser import refused

WITH_LIGER = ROOT / "benchmarks" / "training" / "liger_point.py"


class Way(NamedTuple):
    """`liger`: which of its kernels take the place of transformers'; its SwiGLU takes that of our MLP over tiles."""

    name: str
    compiled: bool
    liger: str = ""


WAYS = (
    Way("eager", False),
    Way("liger norms and rotation", False, "rope,rms_norm"),
    Way("liger norms, rotation and swiglu", False, "rope,rms_norm,swiglu"),
    Way("compiled", True),
    Way("compiled, liger norms and rotation", True, "rope,rms_norm"),
)
POINTS = (
    Point("1b 32K", 1, "llama3.2-1b", 32 * K, warmup=3, steps=5),
    Point("8b, 8 layers, 32K", 1, "llama3-8b", 32 * K, layers=8, warmup=2, steps=3),
)


def main(words: Sequence[str]) -> int:
    try:
        flags = parser().parse_args(words)
    except ValueError as error:
        return refused(error)
    machine, begin = look_at_machine(), time.monotonic()
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    with flags.output.open("a", encoding="utf-8") as file:
        for turn in range(flags.turns):
            for point in POINTS:
                for way in WAYS:
                    left = 60 * flags.minutes - (time.monotonic() - begin)
                    if flags.only not in f"{point.name}, {way.name}":
                        continue
                    if left < 60:
                        print("no time left")
                        return 0
                    asked = replace(point, name=f"{point.name}, {way.name}", words=f"--torch_compile {way.compiled}")
                    worker = (str(WITH_LIGER), way.liger) if way.liger else None
                    record = take(asked, machine, min(left, flags.timeout), flags.commit, worker)
                    file.write(json.dumps({**record, "benchmark": "glue", "way": way.name, "turn": turn}) + "\n")
                    file.flush()
                    print(line(record), flush=True)
    return 0


def parser() -> Parser:
    out = Parser(prog="benchmarks/glue.py", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    out.add_argument("--turns", type=positive, default=2, help="how often each is run (default: 2)")
    out.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSONL, to the end of which it goes")
    add_choice(out)
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
