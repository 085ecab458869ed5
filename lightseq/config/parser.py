"""Argument parser and error handling of all commands: invalid input prints one line, `error: ...`, and exits with 2."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from lightseq.utils.formatting import first_line


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueError instead of printing its usage on every rank."""

    def error(self, message: str) -> NoReturn:
        hint = f"; {self.prog} --help lists the flags" if message.startswith("the following arguments") else ""
        raise ValueError(message.removeprefix("argument ") + hint)


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
