"""Argument parser and exit status shared by all commands: refused input is one line, `error: ...`, and status 2."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from lightseq.utils.formatting import first_line


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueError instead of printing its usage on every rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def refused(reason: object) -> int:
    """Prints why a command refuses its input. Returns its exit status."""
    print(f"error: {first_line(reason) if isinstance(reason, OSError) else reason}", file=sys.stderr)
    return 2


def answered(work: Callable[[], None]) -> int:
    """Runs a command that reads and writes files. Returns its exit status."""
    try:
        work()
    except (ValueError, OSError) as error:
        return refused(error)
    return 0
