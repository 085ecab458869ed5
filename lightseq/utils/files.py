"""Reading of files that a user names or others wrote: regular files only, of bounded size, in UTF-8."""

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from lightseq.utils.formatting import first_line

CONFIG_BYTES: Final = 1 << 20  # files that a user writes
JSON_BYTES: Final = 64 << 20  # files that programs write, such as an index of weights
RECORDS_BYTES: Final = 8 << 30  # files with a line per step or benchmark


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a regular file for reading. Raises OSError for a pipe or device, which may block or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def open_output(path: Path, appends: bool = False) -> io.TextIOWrapper:
    """Opens a file that a user named for writing. Raises OSError for a pipe that nobody reads, instead of waiting."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_APPEND if appends else os.O_TRUNC)
    descriptor = os.open(path, flags, 0o666)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "w", encoding="utf-8")


def read_bytes(path: Path, limit: int = JSON_BYTES) -> bytes:
    """Returns the content of a regular file. Raises OSError if it has more than `limit` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"more than {limit:,} bytes", str(path))
    return content


def read_text(path: Path, limit: int = JSON_BYTES) -> str:
    """Returns the text of a regular file. Raises OSError, or ValueError if it is not UTF-8."""
    return read_bytes(path, limit).decode()


def record_lines(path: Path, limit: int = RECORDS_BYTES) -> list[str]:
    """Returns the lines of a file of records, with a mark for each byte that is not UTF-8. Raises OSError."""
    return read_bytes(path, limit).decode(errors="replace").split("\n")


def parse_json(text: str | bytes, unique_keys: bool = False) -> Any:
    """Parses JSON. Raises ValueError for any invalid text.

    `unique_keys` refuses objects that repeat a key, because one value would be lost.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats if unique_keys else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """Returns the value in a JSON file. Raises OSError, or ValueError for invalid text."""
    return parse_json(read_text(path, limit))


def read_json_object(path: Path, remedy: str = "copy it again") -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ValueError naming the file and the remedy if it holds none."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)}); {remedy}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object; {remedy}")
    return found
