"""Tables on the terminal, and the directory of the plots."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

GIB = 2.0**30
SHARED_OUTPUT = Path("outputs/figures")  # for plots of several results
LONGEST_NAME = 80  # letters


def output_dir(asked: Path | None, command: str, results: Sequence[Path]) -> Path:
    """Returns the directory for plots: a single result's own, or for several one with the names of all."""
    if asked is not None:
        return asked
    if len(results) == 1:
        return results[0]
    names = "-".join([command, *(path.name for path in results)])
    if len(names) > LONGEST_NAME:
        names = f"{names[:LONGEST_NAME]}-{len(results)}-{crc32(repr(results).encode()):08x}"
    output = SHARED_OUTPUT / names
    print(f"analysis: note: drawing {len(results)} results into {output}; --output DIR names another", file=sys.stderr)
    return output


def print_lines(lines: Iterable[object]) -> None:
    for line in lines:
        print(line)


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table with aligned columns. The first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        numbers = [text.rjust(width) for text, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join((cells[0].ljust(widths[0]), *numbers))} |"

    rule = f"|{'|'.join(['-' * (widths[0] + 2), *('-' * (width + 1) + ':' for width in widths[1:])])}|"
    return [line(rows[0]), rule, *map(line, rows[1:])]


def number_table(headings: Sequence[str], **options: object) -> Table:
    """Returns an empty table for the terminal: a column of names, and a column of numbers per heading."""
    out = Table(box=box.SIMPLE_HEAD, caption_justify="left", **options)  # type: ignore[arg-type]
    out.add_column("", no_wrap=True)
    for heading in headings:
        out.add_column(Text(heading), justify="right", overflow="fold")
    return out


def print_tables(*tables: RenderableType) -> None:
    """Prints tables as wide as the terminal, without trailing spaces."""
    console = Console(highlight=False)
    with console.capture() as capture:
        console.print(*tables)
    print_lines(line.rstrip() for line in capture.get().splitlines())


def format_number(form: str, value: float) -> str:
    return form.format(value) if np.isfinite(value) else "-"
