"""Benchmark of whole training steps. step_flags.py says what it measures, step_records.py measures it."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # instead of this folder, whose modules would hide packages

from collections.abc import Sequence

from benchmarks.step_flags import parse
from lightseq.config.parser import run_command


def main(words: Sequence[str]) -> int:
    return run_command(lambda: _compare(words))


def _compare(words: Sequence[str]) -> None:
    flags = parse(words)
    from benchmarks.step_records import compare  # imports torch, which takes seconds

    compare(flags, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
