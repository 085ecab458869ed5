"""What every command has in common: what it cannot take is one line that begins with `error:`, and status 2."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from lightseq.utils.formatting import first_line


class Parser(argparse.ArgumentParser):
    """Raises ValueError for words that it cannot take, instead of printing its usage on every rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def refused(reason: object) -> int:
    """Says what a command cannot take, and is its exit status."""
    print(f"error: {first_line(reason) if isinstance(reason, OSError) else reason}", file=sys.stderr)
    return 2


def answered(work: Callable[[], None]) -> int:
    """The exit status of a command that reads and writes files."""
    try:
        work()
    except (ValueError, OSError) as error:
        return refused(error)
    return 0
