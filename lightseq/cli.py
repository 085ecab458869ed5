"""Training and the tools around it.

python3 -m lightseq COMMAND [--flag value ...]
python3 -m torch.distributed.run --nproc_per_node=4 -m lightseq COMMAND [--flag value ...]
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

import llama2
import llama3
from lightseq.config.command_line import help_text, shows_help
from lightseq.config.parser import refused
from lightseq.distributed.environment import is_main_process, set_up_process
from lightseq.models.presets import ModelFamily

BOTH = ModelFamily(
    "llama2 or llama3",
    {**llama2.FAMILY.presets, **llama3.FAMILY.presets},
    {**llama2.FAMILY.aliases, **llama3.FAMILY.aliases},
    llama3.FAMILY.scaled_preset,
    program="python3 -m lightseq train",
)


class Command(NamedTuple):
    module: str  # whose `main` takes a family and the words that follow, and returns the exit status
    about: str
    details: str | None = None  # above the flags of training, where it takes no others: such help comes at once


# By name and not imported: torch and transformers take seconds, and most commands need some of it only.
COMMANDS: Mapping[str, Command] = {
    "train": Command("lightseq.training.command", "trains a causal language model of transformers across ranks"),
    "verify": Command(
        "lightseq.tools.verify.command",
        "compares distributed loss and gradients with one process",
        "Compares loss and gradients of a few layers with one process, each kernel with float64, and what travels byte "
        "by byte, on the flags of a training run. Without --data_path data is made up.",
    ),
    "rehearse": Command(
        "lightseq.tools.plan.rehearsal",
        "runs a step without attention's arithmetic: does the length fit?",
        "Runs a step without attention's arithmetic, to see whether a length fits, on the flags of a training run. "
        "Data is made up.",
    ),
    "plan": Command("lightseq.tools.plan.command", "predicts memory and time of a run; with --attention, of one layer"),
    "evaluate": Command("lightseq.tools.evaluate.command", "measures loss by position, or retrieval"),
    "merge": Command("lightseq.tools.merge", "adds a trained adapter (--lora_rank) to the weights of its model"),
    "schedule": Command("lightseq.tools.schedule", "proves a schedule and draws its table"),
}


def main(argv: Sequence[str] | None = None) -> int:
    set_up_process()
    words = sys.argv[1:] if argv is None else list(argv)
    if words and (command := COMMANDS.get(words[0])):
        program = f"python3 -m lightseq {words[0]}"
        if command.details and shows_help(words[1:], partial(help_text, program, command.details)):
            return 0
        return import_module(command.module).main(BOTH, words[1:])
    if shows_help(words, overview):
        return 0
    if not is_main_process():
        return 2
    given = f"{words[0]!r} is no command" if words else "no command"
    return refused(f"{given}; choose one of {', '.join(COMMANDS)}")


def overview() -> str:
    about, _, *usages = (__doc__ or "").strip().splitlines()
    lines = ["usage: " + "\n       ".join(usages), "", about, ""]
    lines += [f"  {name:<10} {command.about}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "python3 -m lightseq COMMAND --help lists its flags."])
