"""Tables and pictures of what runs and benchmarks wrote: `python3 -m analysis [COMMAND] ...`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import matplotlib

from . import attention, cluster, compare, curves, evaluate, largest, plots, profile, report, step, watch
from .drawing import STYLE


class Command(NamedTuple):
    main: Callable[[Sequence[str]], int]
    operands: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "attention": Command(attention.BENCHMARK.main, "FILE...", "draws what benchmarks/attention.py measured"),
    "step": Command(step.BENCHMARK.main, "FILE...", "draws what benchmarks/step.py measured"),
    "largest": Command(largest.BENCHMARK.main, "FILE...", "draws what benchmarks/largest.py found"),
    "cluster": Command(cluster.main, "FILE", "draws what lightseq plan --attention predicted"),
    "evaluate": Command(evaluate.main, "OUT...", "draws what lightseq evaluate measured"),
    "plots": Command(plots.main, "--config FILE", "draws the figures that a YAML file asks of runs"),
    "compare": Command(compare.main, "A B", "says how far two runs are apart"),
    "profile": Command(profile.main, "OUTPUT_DIR", "says where the time of profiled steps went"),
    "watch": Command(watch.main, "OUTPUT_DIR", "shows a run while it trains"),
    "report": Command(report.main, "DIR", "writes an HTML page of all results below it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, or draws the curves of runs; refused input is one line and status 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words and words[0] in COMMANDS else None
    try:
        with matplotlib.rc_context(dict(STYLE)):
            return COMMANDS[name].main(words[1:]) if name else curves.main(words, command_help())
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2


def command_help() -> str:
    lines = [f"  {f'{name} {command.operands}':<22} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(("with a command (python3 -m analysis COMMAND -h has its flags):", *lines))


if __name__ == "__main__":
    sys.exit(main())
