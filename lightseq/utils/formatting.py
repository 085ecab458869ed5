"""How errors, counts and names are written in a line, and read from one."""

from collections.abc import Collection, Sequence


def first_line(error: BaseException) -> str:
    """Of what it says; of a file, its path and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def is_plain_name(name: object) -> bool:
    """Whether a name stays in the directory in which it is looked up."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def four_digits(value: float) -> str:
    """As many in every row of a table: 124.0 below 93.27."""
    return f"{value:#,.4g}".removesuffix(".")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Aligns the columns of a table: those in `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
