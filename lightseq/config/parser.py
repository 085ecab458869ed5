"""Argument parser and error handling of all commands: invalid input prints one line, `error: ...`, and exits with 2."""

import argparse
import sys
from collections.abc import Callable
from typing import Final, NoReturn

from lightseq.utils.formatting import first_line

MOST: Final = 2**63 - 1
MOST_COUNT: Final = 2**20


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueError instead of printing its usage on every rank."""

    def error(self, message: str) -> NoReturn:
        hint = f"; {self.prog} --help lists the flags" if message.startswith("the following arguments") else ""
        raise ValueError(message.removeprefix("argument ") + hint)


def whole_number(text: str, most: int = MOST) -> int:
    """Parses a whole number of at most `most` for argparse."""
    try:
        number = int(text)
    except ValueError:  # also for more than 4,300 digits
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number") from None
    if abs(number) > most:
        raise argparse.ArgumentTypeError(f"{text:.80} is too large; give at most {most:,}")
    return number


def count_flag(text: str) -> int:
    """Parses a number of GPUs, processes, heads or the like for argparse."""
    return whole_number(text, MOST_COUNT)


def print_error(reason: object) -> int:
    """Prints an error line. Returns exit status 2."""
    print(f"error: {first_line(reason) if isinstance(reason, OSError) else reason}", file=sys.stderr)
    return 2


def run_command(command: Callable[[], None]) -> int:
    """Runs a command and reports its ValueError or OSError in one line. Returns the exit status."""
    try:
        command()
    except (ValueError, OSError) as error:
        return print_error(error)
    return 0
