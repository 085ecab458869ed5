"""Plans a training run from its own flags, without a GPU: does it fit, how fast is it, how long can it be.

python3 -m lightseq plan --model_name_or_path llama3-8b --bf16 --torch_compile --model_max_length 1M \\
    --offload activations --gpus 8 --chip h200 --host_memory 1900
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightseq.config.command_line import underscored
from lightseq.config.parser import Parser, refused
from lightseq.memory.planner.rates import CHIPS, DEFAULT_CORES
from lightseq.models.presets import ModelFamily
from lightseq.tools.plan import attention


def parser() -> argparse.ArgumentParser:
    out = Parser(
        prog="python3 -m lightseq plan",
        usage="python3 -m lightseq plan --model_name_or_path NAME --model_max_length N --gpus N [--flag ...]",
        description="Predicts memory by category, the seconds of a step by part, where each layer's tensors wait, and "
        "the longest length that fits. Takes the flags of training (llama3/train.py --help) and these. With "
        "--attention: one attention layer over clusters of many sizes (plan --attention --help).",
        allow_abbrev=False,
    )
    out.add_argument("--gpus", type=int, required=True, help="GPUs of the run")
    out.add_argument("--gpus_per_host", type=int, default=8, help="(default: %(default)s)")
    out.add_argument("--chip", default="h200", help=f"{', '.join(CHIPS)} (default: %(default)s)")
    out.add_argument("--gpu_memory", type=float, metavar="GIB", help="of a GPU (default: the chip's)")
    out.add_argument(
        "--host_memory", type=float, metavar="GIB", help="of a host, for all its ranks (default: unbounded)"
    )
    out.add_argument(
        "--host_cores", type=int, metavar="N", help=f"of a host, for all its ranks (default: {DEFAULT_CORES} a rank)"
    )
    out.add_argument("--json", action="store_true", help="print an object instead of tables")
    out.add_argument("--output", type=Path, metavar="FILE", help="add the object as a line to this file")
    return out


def main(family: ModelFamily, words: Sequence[str]) -> int:
    """Returns 0 if the run fits, 1 if it does not, 2 with one line for what cannot be planned."""
    if "--attention" in words:
        return attention.main(words)
    try:
        own, training = parser().parse_known_args([underscored(word) for word in words])
        from lightseq.tools.plan.training import report  # imports torch, which takes seconds

        return 0 if report(family, own, training, " ".join(["python3 -m lightseq plan", *words])) else 1
    except (ValueError, OSError) as error:
        return refused(error)
