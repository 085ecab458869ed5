"""Formatting of errors, counts, tables and differences, and a check of file names."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


def first_line(error: BaseException) -> str:
    """Returns the first line of an error message, and the next after a colon.

    Of file errors it is `path: reason`, and of text that is not UTF-8 the wrong byte.
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start:,} is 0x{error.object[error.start]:02x})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return said.rstrip(".")


def check_names(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises TypeError for the first name that a function does not know, with the nearest that it does."""
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(known)}"
            raise TypeError(f"{function} has no option {name}; {remedy}")


def is_plain_name(name: object) -> bool:
    """Returns whether a file name stays inside its directory: no separators, no `..`."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def four_significant_digits(value: float) -> str:
    """Formats a number with four significant digits and trailing zeros, such as 124.0 and 93.27."""
    return f"{value:#,.4g}".removesuffix(".")


def alternatives(names: Sequence[str]) -> str:
    """Returns the names as `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun, in the plural unless the count is 1."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def divisors(count: int) -> str:
    """Returns the divisors of a count as a choice, such as `1, 2 or 4`."""
    return alternatives([str(n) for n in range(1, count + 1) if count % n == 0])


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Aligns the columns of a table: columns in `left` to the left, others to the right. Returns its lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describes entries that differ from rank 0's, with the ranks."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for name in sorted({*theirs, *everyone[0]}):
            a, b = theirs.get(name, "none"), everyone[0].get(name, "none")
            if a != b:
                found.setdefault((name, str(a), str(b)), []).append(rank)
    return [
        f"{name} is {a} on rank {', '.join(map(str, ranks))} and {b} on rank 0" for (name, a, b), ranks in found.items()
    ]
