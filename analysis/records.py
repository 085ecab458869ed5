"""JSONL files. Unreadable lines and files are skipped and reported in notes."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightseq.utils.files import record_lines

Record = Mapping[str, Any]
T = TypeVar("T")
Source = TypeVar("Source")

NAMED = 3  # line numbers in a note


def read_lines(path: Path, parse: Callable[[Record], T], notes: list[str]) -> list[T]:
    """Returns the parsed lines. Notes lines that are not JSON objects or that `parse` rejects with ValueError.

    Raises ValueError if every line is rejected.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a file that a run or a benchmark wrote")
    parsed: list[T] = []
    refused: list[tuple[int, str]] = []
    lines = record_lines(path)  # the last line is empty or cut off
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                parsed.append(parse(json_object(line)))
        except json.JSONDecodeError as error:
            cut_off = number == len(lines)
            reason = "is cut off, as when a run is killed while writing" if cut_off else f"is not JSON ({error.msg})"
            refused.append((number, reason))
        except ValueError as error:
            refused.append((number, str(error)))
    if refused and not parsed:
        raise ValueError(f"{path} line {refused[0][0]} {refused[0][1]}")
    if refused:
        notes.append(f"{path} {refusal(refused)}")
    return parsed


def json_object(line: str) -> Record:
    """Returns the object on a line; raises ValueError for anything else."""
    try:
        value = json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deep for a record") from None
    if not isinstance(value, dict):
        raise ValueError("is not a record: it should be an object")
    return value


def check_cell(record: Record) -> Record:
    """Returns a record of sweep.jsonl. Raises ValueError for any other record."""
    if not isinstance(record.get("name"), str) or not isinstance(record.get("flags"), dict):
        raise ValueError("is not a cell of a sweep")
    return record


def refusal(refused: list[tuple[int, str]]) -> str:
    """Returns one line with the numbers of the rejected lines and the reason for the first."""
    number, reason = refused[0]
    if len(refused) == 1:
        return f"line {number} {reason}; it is left out"
    more = f" and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
    numbers = ", ".join(str(number) for number, _ in refused[:NAMED])
    return f"lines {numbers}{more} are left out: line {number} {reason}"


def read_each(sources: Iterable[Source], read: Callable[[Source], T], notes: list[str]) -> dict[Source, T]:
    """Reads each source. Notes sources that `read` rejects with ValueError.

    Raises ValueError if every source is rejected, and FileNotFoundError for a file that does not exist.
    """
    made: dict[Source, T] = {}
    refused: list[str] = []
    for source in sources:
        try:
            made[source] = read(source)
        except ValueError as error:
            refused.append(str(error))
    if refused and not made:
        more = f" (and {len(refused) - 1} more like it)" if len(refused) > 1 else ""
        raise ValueError(f"{refused[0]}{more}")
    notes += [f"left out: {reason}" for reason in refused]
    return made


def print_notes(notes: Iterable[str], program: str = "analysis") -> None:
    for note in notes:
        print(f"{program}: note: {note}", file=sys.stderr)
