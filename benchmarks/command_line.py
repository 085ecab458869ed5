"""Command-line parser of the benchmarks, with one-line errors, and types of flags."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from lightseq.config.lengths import parse_tokens
from lightseq.config.parser import whole_number

NEEDED = ("--model_name_or_path=m", "--data_path=d", "--output_dir=o")  # required by lightseq's trainer


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows defaults and leaves the description as written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default in (None, []) or "(default:" in (action.help or "")
        return action.help if told else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Parser that raises ValueError for invalid flags instead of printing its usage on every rank."""

    def __init__(self, program: str, description: str | None, examples: str | None = None) -> None:
        super().__init__(program, None, description, examples, formatter_class=Formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.removeprefix('argument ')}; see --help")

    def add_output(self, path: str) -> None:
        """Adds --output and --commit."""
        self.add_argument("--output", type=Path, default=Path(path), metavar="FILE", help="JSONL file for the records")
        self.add_argument("--commit", metavar="HASH", help="commit in the records, if git is not available")


def check_output(flags: argparse.Namespace, logs_beside: bool = False) -> None:
    """Raises ValueError for an output that exists, or without the suffix that tells it from the folder of its logs."""
    if logs_beside and not flags.output.suffix:
        raise ValueError(
            f"--output {flags.output} has no suffix; write {flags.output}.jsonl, because logs go to {flags.output}/"
        )
    if flags.output.exists():
        raise ValueError(f"--output {flags.output} exists; give another file")


def length(text: str) -> int:
    """Converts `128K` to tokens."""
    try:
        return parse_tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    if (number := whole_number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; choose from {', '.join(names)}")
        return text

    return read


def listed(convert: Callable[[str], Any], every: Iterable[str] = ()) -> Callable[[str], list[Any]]:
    """Returns a parser of lists `a,b,c`. With `every`, `all` means every name and `none` means no name."""
    every = list(every)

    def read(text: str) -> list[Any]:
        if every and text == "none":
            return []
        words = [word for item in text.split(",") for word in (every if every and item == "all" else [item.strip()])]
        if not all(words):
            raise argparse.ArgumentTypeError(f"{text!r} has an empty item")
        return [convert(word) for word in dict.fromkeys(words)]

    return read
