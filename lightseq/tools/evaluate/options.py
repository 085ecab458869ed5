"""Flags of `lightseq evaluate`: its own, and the flags of training. Imports no torch, so that --help is instant."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightseq.config.command_line import REQUIRED, REQUIRED_BY_TOOLS, parse
from lightseq.config.lengths import parse_tokens
from lightseq.config.parser import Parser, count_flag
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.rank_launcher import add_launcher_flags

PROGRAM: Final = "lightseq evaluate"
TASK_FLAGS: Final = {"loss": ("bins",), "needle": ("depths", "lengths", "trials", "choices")}
DEPTHS, TRIALS, CHOICES = "0,0.25,0.5,0.75,1", 4, 8


@dataclass(frozen=True)
class Options:
    """Flags of this command. None: not given."""

    task: str
    bins: str | None
    depths: str | None
    lengths: str | None
    trials: int | None
    choices: int | None


def parser() -> argparse.ArgumentParser:
    out = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --model_name_or_path DIR --output_dir DIR [--data_path DATA] [--flag value ...]",
        description="Evaluates a model under sequence parallelism and writes evaluation.jsonl. --task loss needs "
        "--data_path. It uses every GPU of the host.",
        epilog="Also takes the flags of training (lightseq train --help): model, data, precision, parallelism.",
        allow_abbrev=False,
        add_help=False,
    )
    out.add_argument("--task", default="loss", help=f"{' or '.join(TASK_FLAGS)} (default: loss)")
    loss, needle = (out.add_argument_group(f"--task {task}") for task in TASK_FLAGS)
    loss.add_argument("--bins", help="position bins: powers (of two), or a number of equal bins (default: powers)")
    needle.add_argument("--depths", help=f"needle positions from 0 (start) to 1 (end) (default: {DEPTHS})")
    needle.add_argument(
        "--lengths", help="tokens per text, such as 1K,2K (default: 1/4, 1/2 and 1 of --model_max_length)"
    )
    needle.add_argument("--trials", type=count_flag, help=f"texts per length and depth (default: {TRIALS})")
    needle.add_argument("--choices", type=count_flag, help=f"answers to choose from (default: {CHOICES})")
    return out


def help_text() -> str:
    out = parser()
    add_launcher_flags(out)
    return out.format_help()


def flags(words: Sequence[str]) -> tuple[Options, TrainConfig]:
    """Parses the flags of this command and of training. Raises ValueError for invalid flags."""
    if any(word.partition("=")[0] == "--score" for word in words):
        raise ValueError("--score was removed, because a result holds accuracy and greedy_accuracy; leave it out")
    own, rest = parser().parse_known_args(list(words))
    options = Options(**vars(own))
    if options.task not in TASK_FLAGS:
        raise ValueError(f"--task {options.task!r} is unknown; choose from {', '.join(TASK_FLAGS)}")
    for task, names in TASK_FLAGS.items():
        if task != options.task and (stray := [name for name in names if getattr(options, name) is not None]):
            raise ValueError(f"--{stray[0]} belongs to --task {task}, but the task is {options.task}; leave it out")
    # Without data, the haystack of a needle is synthetic.
    config = parse(rest, PROGRAM, REQUIRED if options.task == "loss" else (*REQUIRED_BY_TOOLS, "output_dir"))
    if config.load_in_4bit:
        raise ValueError(
            "--load_in_4bit True: evaluate would read the weights in 16 or 32 bits; leave it out, and evaluate what "
            "`lightseq merge` writes"
        )
    if options.task == "loss":
        return options, config
    if config.max_eval_samples is not None:
        given = f"--max_eval_samples {config.max_eval_samples}"
        raise ValueError(f"{given} belongs to --task loss, but the task is {options.task}; leave it out")
    lengths = lengths_of(options, config)
    if any(word.partition("=")[0] == "--model_max_length" for word in rest) and max(lengths) > config.model_max_length:
        given = f"--lengths {options.lengths} exceeds --model_max_length {config.model_max_length}"
        raise ValueError(f"{given}; leave --model_max_length out")
    return options, dataclasses.replace(config, model_max_length=max(lengths))


def lengths_of(options: Options, config: TrainConfig) -> list[int]:
    if options.lengths is None:
        return sorted({max(1, config.model_max_length // part) for part in (4, 2, 1)})
    return sorted({parse_tokens(word, "--lengths") for word in options.lengths.split(",")})
