"""The flags of the benchmark of whole steps: what they are called, what they mean, and what is wrong with a value."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.flags import Flag, Parser, add_groups, length, listed, one_of, positive, seconds
from lightseq.config.command_line import parse as parse_training

NEEDED = ("--model_name_or_path=m", "--data_path=d", "--output_dir=o")  # by lightseq's trainer, whatever else is given
IMPLEMENTATIONS = ("lightseq", "plain", "accelerate", "deepspeed")

EXAMPLES = """examples:
  python3 benchmarks/step.py --model llama3.2-1b --lengths 32K,128K --nproc_per_node 4
  ... --model llama3-8b --layers 8 --lengths 128K --implementations lightseq,plain
  ... --lightseq_flags "--remat none --schedule ulysses" --lightseq_flags "--remat full"
  python3 -m analysis step outputs/step.jsonl"""

WHAT = (
    Flag("model", "NAME", "llama3.2-1b", "preset or local directory of a Llama; weights are random"),
    Flag("layers", "N", None, "cut the model to that many layers", positive),
    Flag("lengths", "N,...", "32K,128K", "tokens of the one sequence of a step; K is 2^10, M is 2^20", listed(length)),
    Flag(
        "implementations", "I,...", "all", f"all, {', '.join(IMPLEMENTATIONS)}",
        listed(one_of(IMPLEMENTATIONS), IMPLEMENTATIONS),
    ),
    Flag("nproc_per_node", "N", torch.cuda.device_count() or 2, "processes, one a GPU", positive),
)  # fmt: skip
HOW = (
    Flag("warmup", "N", 3, "steps before those that count", positive),
    Flag("steps", "N", 7, "steps that count", positive),
    Flag("timeout", "S", 900.0, "seconds that one implementation may take at one length", seconds),
    Flag("learning_rate", "R", 1e-5, "constant", float),
    Flag("seed", "N", 0, "of weights and data", int),
    Flag("output", "FILE", Path("outputs/step.jsonl"), "where the records go; logs beside it", Path),
    Flag("commit", "HASH", None, "what the records name where there is no git to ask"),
)


def parser() -> Parser:
    out = Parser(
        prog="benchmarks/step.py",
        description="Times whole training steps of one model, every implementation and length in processes of its own.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = add_groups(out, WHAT, HOW)
    more = "one more row of lightseq with these flags of llama3/train.py; may be given several times"
    group.add_argument("--lightseq_flags", metavar="WORDS", action="append", default=[], help=more)
    group.add_argument("--no_compile", action="store_true", help="lightseq and plain run without torch.compile")
    group.add_argument("--append", action="store_true", help="add to the output file where it exists")
    return out


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The flags, checked. Raises ValueError with one line for what is wrong."""
    flags = parser().parse_args(words)
    if not flags.output.suffix:
        raise ValueError(
            f"--output {flags.output} has no suffix; name it {flags.output}.jsonl, for its logs go beside it"
        )
    if flags.output.exists() and not flags.append:
        raise ValueError(f"--output {flags.output} exists; name another file, or give --append")
    if flags.lightseq_flags and "lightseq" not in flags.implementations:
        raise ValueError("--lightseq_flags needs lightseq among the --implementations")
    for given in flags.lightseq_flags:
        try:
            parse_training([*NEEDED, *shlex.split(given)], "")
        except ValueError as error:
            raise ValueError(f"--lightseq_flags {given!r}: {error}") from None
    return flags
