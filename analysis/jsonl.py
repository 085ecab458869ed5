"""Reads files of one JSON object a line. What cannot be read is passed over and said, and does not stop the rest."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Value = Mapping[str, Any]
Made = TypeVar("Made")
Item = TypeVar("Item")

LEFT_OUT = "left out: "  # before a note on a whole file
NAMED = 3  # line numbers in a note; of more, how many there are


def read_lines(path: Path, make: Callable[[Value], Made | None], notes: list[str]) -> list[Made]:
    """What `make` has of each line: it may leave out a header with None, or refuse a line with a ValueError.

    A note says which lines were refused and why the first was. Raises ValueError, with that reason, where none is left.
    """
    made: list[Made] = []
    refused: list[tuple[int, str]] = []
    lines = text_of(path).split("\n")  # the last one is empty, or cut off
    for number, line in enumerate(lines, 1):
        try:
            if line.strip() and (value := make(json_object(line))) is not None:
                made.append(value)
        except json.JSONDecodeError as why:
            cut_off = number == len(lines)
            reason = "is cut off, as when a run is killed while writing" if cut_off else f"is not JSON ({why.msg})"
            refused.append((number, reason))
        except ValueError as why:
            refused.append((number, str(why)))
    if refused and not made:
        raise ValueError(f"{path} line {refused[0][0]} {refused[0][1]}")
    if refused:
        notes.append(f"{path} {told(refused)}")
    return made


def text_of(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; give the file that a run or a benchmark wrote")
    return path.read_text(encoding="utf-8", errors="replace")


def json_object(line: str) -> Value:
    try:
        value = json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deep for a record") from None
    if not isinstance(value, dict):
        raise ValueError("is not a record: it should be an object")
    return value


def told(refused: list[tuple[int, str]]) -> str:
    """One line, however many were refused."""
    number, why = refused[0]
    if len(refused) == 1:
        return f"line {number} {why}; it is left out"
    more = f" and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
    numbers = ", ".join(str(number) for number, _ in refused[:NAMED])
    return f"lines {numbers}{more} are left out: line {number} {why}"


def readable(items: Iterable[Item], read: Callable[[Item], Made], notes: list[str]) -> list[Made]:
    """What can be read of files or runs; a note names each other one. Raises ValueError where there is none.

    A path that is not there is nobody's damage but a slip of the pen: its FileNotFoundError goes through.
    """
    made: list[Made] = []
    refused: list[str] = []
    for item in items:
        try:
            made.append(read(item))
        except ValueError as why:
            refused.append(str(why))
    if refused and not made:
        more = f" (and {len(refused) - 1} more like it)" if len(refused) > 1 else ""
        raise ValueError(f"{refused[0]}{more}")
    notes += [f"{LEFT_OUT}{why}" for why in refused]
    return made


def is_left_out(path: Path, notes: Iterable[str]) -> bool:
    """Returns whether `readable` has noted that it could not read the file or directory."""
    return any(note.startswith((f"{LEFT_OUT}{path} ", f"{LEFT_OUT}{path}/")) for note in notes)


def say(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"analysis: note: {note}", file=sys.stderr)
