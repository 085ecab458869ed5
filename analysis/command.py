"""What the commands that draw files have in common: they read, draw, say what was left out, and print."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from .jsonl import say

Found = TypeVar("Found")


def run(
    read: Callable[[list[str]], Found],
    draw: Callable[[Found], Iterable[Path]],
    tell: Callable[[Found], Iterable[str]] = lambda found: (),
) -> int:
    """The exit status. `read` gets the list that its notes go to; what `tell` gives are the lines of tables."""
    notes: list[str] = []
    try:
        found = read(notes)
        pictures = draw(found)
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2
    say(notes)
    for line in (*tell(found), *pictures):
        print(line)
    return 0
