"""Benchmark of whole training steps: its flags, which load without torch. step_records.py measures them."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Instead of this folder, whose modules would hide packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import shlex
import shutil
from collections.abc import Sequence

from benchmarks.command_line import NEEDED, Parser, check_output, length, listed, one_of, positive, seconds
from benchmarks.step_peers import IMPLEMENTATIONS
from lightseq.config.command_line import parse as parse_training
from lightseq.config.parser import run_command

ABOUT = """Times whole training steps of one model at several lengths, with lightseq's trainer and its alternatives.

Every implementation runs every length in separate processes, so running out of memory affects only one measurement. All
train the same weights on the same tokens, one sequence per step over all ranks, with fused AdamW. On several GPUs
`rows` and `unsloth` train one row per GPU. So does `trl` if --packed_rows is given or the model has sliding windows.
Implementations that cannot train the model, or do what --packed_rows, --lora_rank and --load_in_4bit ask for, are
recorded as skipped.
"""
EXAMPLES = """examples:
  python3 benchmarks/step.py --model llama3.2-1b --lengths 32K,128K --nproc_per_node 4
  ... --model llama3-8b --layers 8 --lengths 128K --implementations lightseq,plain
  ... --model gemma3-4b --lengths 16K,32K --implementations lightseq,trl,lightseq-sft,accelerate --nproc_per_node 2
  ... --model llama3-8b --lengths 32K --packed_rows 8K --lora_rank 16 --implementations lightseq,trl --nproc_per_node 1
  ... --lightseq_flags "--remat none --schedule ulysses" --lightseq_flags "--remat full"
  python3 -m analysis step outputs/step.jsonl"""


def main(words: Sequence[str]) -> int:
    return run_command(lambda: _compare(words))


def _compare(words: Sequence[str]) -> None:
    flags = parse(words)
    from benchmarks.step_records import compare  # imports torch, which takes seconds

    compare(flags, words)


def parser() -> Parser:
    out = Parser("benchmarks/step.py", ABOUT, EXAMPLES)
    what = out.add_argument_group("training").add_argument
    models = "preset of Llama, gemma3-4b (its text model), or directory with config.json; weights are random"
    what("--model", default="llama3.2-1b", metavar="NAME", help=models)
    what("--layers", type=positive, metavar="N", help="use only the first N layers")
    lengths = "sequence lengths in tokens; a step has one sequence"
    what("--lengths", type=listed(length), default="32K,128K", metavar="N,...", help=lengths)
    implementations = listed(one_of(*IMPLEMENTATIONS), IMPLEMENTATIONS)
    names = f"all, {', '.join(IMPLEMENTATIONS)}"
    what("--implementations", type=implementations, default="all", metavar="I,...", help=names)
    packed = "pack documents of N tokens into each row of --lengths (default: one document per row)"
    what("--packed_rows", type=length, metavar="N", help=packed)
    what("--lora_rank", type=positive, metavar="N", help="train LoRA adapters of this rank (default: all weights)")
    bits = "hold the layers' linears in four bits beneath adapters, as QLoRA does"
    what("--load_in_4bit", action="store_true", help=bits)
    processes = "processes, one per GPU; if not given, as many as GPUs, or 2 without GPUs"
    what("--nproc_per_node", type=positive, metavar="N", help=processes)
    how = out.add_argument_group("measurement").add_argument
    how("--warmup", type=positive, default=3, metavar="N", help="untimed steps before the measurement")
    how("--steps", type=positive, default=7, metavar="N", help="timed steps")
    how("--timeout", type=seconds, default=900.0, metavar="S", help="time limit for one implementation at one length")
    more = "measure lightseq with these flags of llama3/train.py, beside --implementations; may be repeated"
    how("--lightseq_flags", metavar="WORDS", action="append", default=[], help=more)
    python = "python with unsloth, which needs older transformers and TRL than trl; if not given, this one"
    how("--unsloth_python", metavar="PATH", help=python)
    out.add_output("outputs/step.jsonl")
    return out


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the flags. Raises ValueError with a one-line reason."""
    flags = parser().parse_args(words)
    if flags.unsloth_python and shutil.which(flags.unsloth_python) is None:
        raise ValueError(f"--unsloth_python {flags.unsloth_python} is not a program; give the path of a python")
    check_output(flags, logs_beside=True)
    for tokens in flags.lengths:
        if flags.packed_rows and tokens % flags.packed_rows:
            raise ValueError(f"--packed_rows {flags.packed_rows} does not divide --lengths {tokens}")
    if flags.load_in_4bit and not flags.lora_rank:
        raise ValueError("--load_in_4bit freezes the weights; add --lora_rank")
    for given in flags.lightseq_flags:
        try:
            parse_training([*NEEDED, *shlex.split(given)], "")
        except ValueError as error:
            raise ValueError(f"--lightseq_flags {given!r}: {error}") from None
    if flags.nproc_per_node is None:
        import torch  # takes seconds, which --help and refusals need not wait for

        flags.nproc_per_node = torch.cuda.device_count() or 2
    return flags


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
