"""Knows how a table is written as Markdown that can be read as it is."""

from collections.abc import Sequence


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first row is the head. Cells are padded: names, in the first column, on the right, numbers on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [text.rjust(width) for text, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join((cells[0].ljust(widths[0]), *padded))} |"

    rule = f"|{'|'.join(['-' * (widths[0] + 2), *('-' * (width + 1) + ':' for width in widths[1:])])}|"
    return [line(rows[0]), rule, *map(line, rows[1:])]
