"""Tables and plots of runs and benchmarks: `python3 -m analysis [COMMAND] ...`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

try:
    import matplotlib
except ModuleNotFoundError:
    print("analysis: error: matplotlib is not installed; pip install matplotlib", file=sys.stderr)
    sys.exit(2)

from . import attention, compare, curves, evaluate, largest, plots, profile, report, step
from .drawing import STYLE


class Command(NamedTuple):
    main: Callable[[Sequence[str]], int]
    operands: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "attention": Command(attention.BENCHMARK.main, "FILE...", "plots results of benchmarks/attention.py"),
    "step": Command(step.BENCHMARK.main, "FILE...", "plots results of benchmarks/step.py"),
    "largest": Command(largest.BENCHMARK.main, "FILE...", "plots results of benchmarks/largest.py"),
    "evaluate": Command(evaluate.main, "OUT...", "plots results of lightseq evaluate"),
    "plots": Command(plots.main, "--config FILE", "draws the figures that a YAML file describes"),
    "compare": Command(compare.main, "A B", "compares two runs"),
    "profile": Command(profile.main, "OUTPUT_DIR", "shows where the time of profiled steps went"),
    "report": Command(report.main, "DIR", "writes an HTML page of all results in DIR"),
}

REMOVED: Mapping[str, str] = {
    "cluster": "python3 -m lightseq plan --attention prints the efficiency of every schedule",
    "needle": "python3 -m analysis evaluate draws the needle searches of lightseq evaluate",
    "watch": "watch a run in TensorBoard (train with --report_to tensorboard) or read its log",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, or plots runs. Prints refused input as one line and returns 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words and words[0] in COMMANDS else None
    try:
        if words and words[0] in REMOVED:
            raise ValueError(f"there is no command {words[0]!r} any more; {REMOVED[words[0]]}")
        with matplotlib.rc_context(dict(STYLE)):
            return COMMANDS[name].main(words[1:]) if name else curves.main(words, command_help())
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2


def command_help() -> str:
    lines = [f"  {f'{name} {command.operands}':<22} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(("commands (python3 -m analysis COMMAND -h lists their flags):", *lines))


if __name__ == "__main__":
    sys.exit(main())
