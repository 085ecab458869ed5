"""Benchmark of one attention layer: its flags (attention_flags.py), or its measurement (attention_points.py)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Instead of this folder, whose modules would hide packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections.abc import Sequence

from benchmarks.attention_flags import parser
from lightseq.distributed.environment import is_main_process


def main(words: Sequence[str]) -> None:
    if {"-h", "--help"} & set(words):
        if is_main_process():
            parser().print_help()
        return
    from benchmarks.attention_points import measure_all  # imports torch, which takes seconds

    measure_all(words)


if __name__ == "__main__":
    main(sys.argv[1:])
