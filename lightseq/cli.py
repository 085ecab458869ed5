"""Trains language models on long sequences, and plans, verifies and evaluates such runs.

lightseq COMMAND [--flag value ...]                     train, verify and evaluate use every GPU of this host
lightseq COMMAND --nproc_per_node 4 [--flag value ...]
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lightseq.config.command_line import help_text, launcher_flags_in_file, print_help_if_asked
from lightseq.config.parser import print_error
from lightseq.distributed.environment import is_main_process, set_up_process
from lightseq.distributed.rank_launcher import end_at_once_on_ctrl_c, start_ranks
from lightseq.models.presets import FAMILIES, LLAMA3, ModelFamily
from lightseq.utils.process import silence_loggers, without_collection
from lightseq.utils.source import describe_source
from lightseq.utils.versions import check_transformers

# Both families of Llama, and all others.
BOTH = ModelFamily(
    "any family",
    {name: preset for family in FAMILIES for name, preset in family.presets.items()},
    {hub_id: name for family in FAMILIES for hub_id, name in family.aliases.items()},
    LLAMA3.scaled_preset,
    program="lightseq train",
)


class Command(NamedTuple):
    module: str  # its `main` takes a family and the rest of the command line, and returns the exit status
    about: str
    details: str | None = None  # for commands with the flags of training: their help needs no import
    on_ranks: bool = False  # the command starts one process per GPU, unless a launcher did


# A module is imported when its command runs, because torch and transformers take seconds to import.
COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "lightseq.training.command", "trains a transformers causal language model across ranks", on_ranks=True
    ),
    "verify": Command(
        "lightseq.tools.verify.command",
        "compares distributed loss and gradients with one process",
        "Compares loss and gradients of a few layers with one process, the attention kernel with float64, and every "
        "byte of a transfer. Takes the flags of training; without --data_path it uses synthetic data.",
        on_ranks=True,
    ),
    "plan": Command("lightseq.tools.plan.command", "predicts memory and step time"),
    "recipes": Command("lightseq.tools.recipes", "lists recipes, which train --config finds by name, or prints one"),
    "evaluate": Command("lightseq.tools.evaluate.command", "measures loss by position, or retrieval", on_ranks=True),
    "generate": Command("lightseq.tools.generate", "continues prompts with a trained model"),
    "chat": Command("lightseq.tools.chat", "answers turns of a chat as they are typed"),
    "merge": Command("lightseq.tools.merge", "merges a LoRA adapter (trained with --lora_rank) into its model"),
    "gguf": Command("lightseq.tools.gguf", "converts a model into a GGUF file for llama.cpp, by its converter"),
    "schedule": Command("lightseq.tools.schedule", "validates an attention schedule and draws its table"),
}
REMOVED: Mapping[str, str] = {
    "rehearse": "plan predicts whether a run fits, and train --max_steps 2 --save_strategy no tries it",
}


class Folder(NamedTuple):
    name: str  # its __main__.py has a `main` that takes the rest of the command line
    about: str


FOLDERS: Mapping[str, Folder] = {
    "data": Folder("data_gen", "writes training data: synthetic tokens, or tokenized text"),
    "analyze": Folder("analysis", "draws and tabulates training runs and benchmarks"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command given by its name and flags. Returns its exit status."""
    set_up_process()
    words = sys.argv[1:] if argv is None else list(argv)
    if words and (command := COMMANDS.get(words[0])):
        program = f"lightseq {words[0]}"
        if command.details and print_help_if_asked(
            words[1:], partial(help_text, program, command.details, command.on_ranks)
        ):
            return 0
        try:
            check_transformers()
        except ImportError as error:
            return print_error(error) if is_main_process() else 2
        words = words[1:]
        if command.on_ranks and not {"-h", "--help"}.intersection(words):
            if argv is None:
                end_at_once_on_ctrl_c()
            try:
                started = start_ranks(words, launcher_flags_in_file(words))
            except ValueError as error:
                return print_error(error) if is_main_process() else 2
            if isinstance(started, int):
                return started
            words = started
        silence_loggers()
        with without_collection():
            module = import_module(command.module)
        return module.main(BOTH, words)
    if words and (folder := FOLDERS.get(words[0])):
        return run_folder(folder.name, words[1:])
    if print_help_if_asked(words, overview):
        return 0
    if words == ["--version"]:
        if is_main_process():
            print(f"lightseq {describe_source()}")
        return 0
    if not is_main_process():
        return 2
    if words and words[0] in REMOVED:
        return print_error(f"{words[0]} was removed; {REMOVED[words[0]]}")
    given = f"unknown command {words[0]!r}" if words else "no command given"
    return print_error(f"{given}; choose one of {', '.join([*COMMANDS, *FOLDERS])} (--help describes them)")


def run_folder(name: str, words: Sequence[str]) -> int:
    """Runs data_gen or analysis. They are inside lightseq in a wheel, and beside it in the repository."""
    package = f"lightseq.{name}"
    if find_spec(package) is None:
        package = name
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # before the user's own folder of that name
    return import_module(f"{package}.__main__").main(words)


def overview() -> str:
    """Returns the help that lists the commands."""
    about, _, *usages = (__doc__ or "").strip().splitlines()
    lines = ["usage: " + "\n       ".join(usages), "", about, ""]
    lines += [f"  {name:<10} {command.about}" for name, command in COMMANDS.items()]
    lines += [f"  {name:<10} {folder.about}" for name, folder in FOLDERS.items()]
    return "\n".join([*lines, "", "lightseq COMMAND --help lists its flags. lightseq --version prints the version."])
