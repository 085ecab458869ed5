"""Readers of tables: Parquet, Arrow and CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lightseq.utils.formatting import first_line

MAX_ROW_BYTES: Final = 1 << 30  # largest line or cell
Row = dict[str, Any]
NamedRow = tuple[str, Row]  # file and number, and the columns


def import_optional(module: str, source: str | Path) -> Any:
    """Imports a module of an optional package. Raises ValueError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"reading {source} needs {package}; pip install {package}") from error


def read_parquet(path: Path) -> Iterator[NamedRow]:
    """Yields the rows of a Parquet file."""
    pq = import_optional("pyarrow.parquet", path)

    def batches() -> Iterator[Any]:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=256)

    yield from _rows_of_batches(path, "Parquet", batches())


def read_arrow(path: Path) -> Iterator[NamedRow]:
    """Yields the rows of an Arrow file, in the format for files or for streams."""
    pa = import_optional("pyarrow", path)

    def batches() -> Iterator[Any]:
        with pa.memory_map(str(path)) as file:
            try:
                opened = pa.ipc.open_file(file)
            except pa.ArrowInvalid:
                file.seek(0)
                yield from pa.ipc.open_stream(file)
            else:
                yield from map(opened.get_batch, range(opened.num_record_batches))

    yield from _rows_of_batches(path, "Arrow", batches())


def _rows_of_batches(path: Path, kind: str, batches: Iterator[Any]) -> Iterator[NamedRow]:
    """Yields the rows of Arrow's record batches. Raises ValueError with the number of rows before a damaged one."""
    number = 0
    try:
        for batch in batches:
            _check_names(batch.schema.names)
            for value in batch.to_pylist(maps_as_pydicts="strict"):
                yield f"{path} row {number}", value
                number += 1
    except (OSError, import_optional("pyarrow", path).ArrowException, ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be read as {kind} past row {number}: {first_line(error)}") from error


def read_csv(path: Path) -> Iterator[NamedRow]:
    """Yields the rows of a CSV file whose first line names the columns. Every value is text."""
    csv.field_size_limit(MAX_ROW_BYTES)  # 128 KiB otherwise
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            _check_names(rows.fieldnames or ())
            for value in rows:
                if None in value:
                    raise ValueError("it has more cells than columns; quote cells that hold commas")
                yield f"{path} row {number}", value
                number += 1
    except (csv.Error, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as CSV past row {number}: {first_line(error)}; separate cells by commas"
        ) from error


def _check_names(columns: Sequence[str]) -> None:
    """Raises ValueError for two columns of the same name, because one would be lost."""
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise ValueError(f"it has two columns {twice[0]!r}; rename or remove one")
