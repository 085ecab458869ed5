"""Plans a training run from its flags, without a GPU: whether it fits, how fast it is, and the longest sequence.

lightseq plan llama3-8b --bf16 --model_max_length 1M --gpus 8 --chip h200 --host_memory 1900
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightseq.config.command_line import config_file_of
from lightseq.config.flag_names import normalize_flag
from lightseq.config.parser import Parser, count_flag, print_error
from lightseq.models.presets import ModelFamily
from lightseq.plan.rates import CHIPS, DEFAULT_CORES
from lightseq.utils.process import without_collection


def parser() -> argparse.ArgumentParser:
    out = Parser(
        prog="lightseq plan",
        usage="lightseq plan MODEL --model_max_length N --gpus N [--flag ...]",
        description="Predicts memory by category, step time by part, the placement of each layer's activations, and "
        "the longest length that fits. Takes the flags of training (lightseq train --help) and these; MODEL is the "
        "value of --model_name_or_path.",
        allow_abbrev=False,
    )
    out.add_argument("--gpus", type=count_flag, required=True, help="number of GPUs")
    out.add_argument("--gpus_per_host", type=count_flag, default=8, help="GPUs per host (default: %(default)s)")
    out.add_argument("--chip", default="h200", help=f"one of {', '.join(CHIPS)} (default: %(default)s)")
    out.add_argument("--gpu_memory", type=float, metavar="GIB", help="memory per GPU (default: the chip's)")
    out.add_argument("--host_memory", type=float, metavar="GIB", help="memory per host (default: unlimited)")
    out.add_argument(
        "--host_cores", type=count_flag, metavar="N", help=f"CPU cores per host (default: {DEFAULT_CORES} per rank)"
    )
    out.add_argument(
        "--documents", metavar="NxP+A", help="rows hold trees of N answers of A tokens to a prompt of P, as 8x32K+2K"
    )
    out.add_argument("--json", action="store_true", help="print a JSON object instead of tables")
    out.add_argument("--output", type=Path, metavar="FILE", help="append the JSON object to this file as a line")
    return out


def split_flags(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags of the plan itself, and those of training. Raises ValueError for invalid ones of the former."""
    given = [normalize_flag(word) for word in words]
    if given and not given[0].startswith("-"):
        given.insert(0, "--model_name_or_path")
    file = config_file_of(given)
    if file is not None:
        from lightseq.config.config_file import plan_arguments_in  # imports PyYAML, which nothing else here needs

        given = [*map(normalize_flag, plan_arguments_in(file)), *given]
    return parser().parse_known_args(given)


def main(family: ModelFamily, words: Sequence[str]) -> int:
    """Runs `lightseq plan`. Returns 0 if the run fits, 1 if it does not, 2 on invalid input."""
    try:
        own, training = split_flags(words)
        with without_collection():
            from lightseq.tools.plan.training import report  # imports torch, which takes seconds

        return 0 if report(family, own, training, " ".join(["lightseq plan", *words])) else 1
    except (ValueError, OSError) as error:
        return print_error(error)
