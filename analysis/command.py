"""What the commands that draw files have in common: they read, draw, say what was left out, and print."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from .jsonl import is_left_out, say

Found = TypeVar("Found")


def run(
    paths: Sequence[Path],
    read: Callable[[list[str]], Found],
    draw: Callable[[Found, Sequence[Path]], Iterable[Path]],
    tell: Callable[[Found], Iterable[str]] = lambda found: (),
) -> int:
    """The exit status. `read` gets the list that its notes go to; what `tell` gives are the lines of tables.

    `draw` gets the folders of those `paths` that could be read, too.
    """
    notes: list[str] = []
    try:
        found = read(notes)
        pictures = draw(found, [path for path in paths if not is_left_out(path, notes)])
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2
    say(notes)
    for line in (*tell(found), *pictures):
        print(line)
    return 0
