"""Tables and plots of runs and benchmarks: `python3 -m analysis [COMMAND] ...`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from lightseq.config.parser import Parser, whole_number

from .output import SHARED_OUTPUT

# A wheel has this folder inside lightseq.
PROGRAM = "python3 -m analysis" if __package__ == "analysis" else "lightseq analyze"
# Packages of the extra `analysis`, and what to install for the command that lacks one.
EXTRA = {"matplotlib": "matplotlib", "jinja2": "jinja2 plotly", "plotly": "jinja2 plotly"}
CURVES = "curves"  # the command without a name
# Descriptions of the commands. The first sentence is in the overview. A module is imported when its command runs,
# because matplotlib takes long.
COMMANDS: Mapping[str, str] = {
    "attention": "Plots TFLOP/s per GPU from records of benchmarks/attention.py. Prints a Markdown table, too.",
    "step": "Plots tokens per second and memory from benchmarks/step.py. Prints a Markdown table, too.",
    "largest": "Plots the largest models that fit, from benchmarks/largest.py. Prints a Markdown table, too.",
    "evaluate": "Plots results of lightseq evaluate. Draws perplexity.png and needle.png from evaluation.jsonl files, "
    "and prints Markdown tables.",
    "plots": "Draws the figures that a YAML file describes. Takes all runs below a directory.",
    "compare": "Compares two runs. They should have the same losses, such as with and without FSDP. Prints the largest "
    "loss difference, means after warm-up and differing flags, and draws compare.png.",
    "profile": "Shows where the time of profiled steps went. Trace them with --profile_steps. Each millisecond counts "
    "once: as computation, or as communication that no kernel hides. Traces of a CPU are split by phase.",
    "report": "Writes an HTML page of all results below a directory. It is one self-contained file with training runs, "
    "sweeps, evaluations, verifications, plans and benchmarks. Needs jinja2 and plotly.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, or plots runs. Prints refused input as one line and returns 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in COMMANDS else CURVES
    try:
        arguments = parser(name).parse_args(words)
        return int(import_module(f".{name}", __package__).main(arguments))
    except ImportError as error:
        package = str(error.name).split(".")[0]
        if package not in EXTRA:
            raise
        problem = f"{package} is not installed; pip install {EXTRA[package]}"
    except (ValueError, OSError) as error:
        problem = str(error)
    print(f"analysis: error: {problem}", file=sys.stderr)
    return 2


def parser(name: str) -> Parser:
    """Returns the parser of a command."""
    if name == CURVES:
        lines = [f"  {name:<11} {text.partition('. ')[0]}" for name, text in COMMANDS.items()]
        out = Parser(
            prog=PROGRAM,
            description="Draws loss, throughput, memory and MFU from the metrics.jsonl of runs.",
            epilog="\n".join((f"commands ({PROGRAM} COMMAND -h lists their flags):", *lines)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    else:
        out = Parser(prog=f"{PROGRAM} {name}", description=COMMANDS[name])
    path = partial(out.add_argument, type=Path)
    output = f"{SHARED_OUTPUT}/NAMES for several"
    match name:
        case "curves":
            path("runs", metavar="OUTPUT_DIR", nargs="+", help="the --output_dir of a training run")
            output = f"OUTPUT_DIR; {output}"
        case "attention" | "step" | "largest":
            later = "JSONL records; later files replace earlier ones point by point"
            path("files", metavar="FILE", nargs="+", help=later)
            output = f"beside FILE; {output}"
        case "evaluate":
            path("paths", metavar="OUT", nargs="+", help="the --output_dir of an evaluation")
            output = f"OUT; {output}"
        case "plots":
            path("--config", metavar="FILE", required=True, help="YAML file, such as analysis/configs/flash.yaml")
            path("--runs", metavar="DIR", nargs="+", help="directories of runs, instead of `runs` in the file")
            output = f"DIR; {output}"
        case "compare":
            path("first", metavar="A", help="the --output_dir of a training run")
            path("second", metavar="B", help="the run to compare with A")
            output = f"{SHARED_OUTPUT}/compare-A-B"
        case "report":
            path("directory", metavar="DIR", help="directory to search, subdirectories too")
            path("--output", metavar="FILE", help="the HTML file (default: DIR/report.html)")
        case "profile":
            path("run", metavar="OUTPUT_DIR", help="directory of a run, or a trace file")
            out.add_argument("--rank", type=whole_number, default=0, help="rank whose trace is read (default: 0)")
    if name not in ("profile", "report"):
        path("--output", metavar="DIR", help=f"directory for the plots (default: {output})")
    return out


if __name__ == "__main__":
    sys.exit(main())
