"""Columns of rows that --ignore_columns leaves out and --columns reads under other names."""

from collections.abc import Collection, Mapping
from typing import Any


def split_columns(names: str | None) -> tuple[str, ...]:
    """Returns the columns of --ignore_columns. Raises ValueError for an empty name."""
    found = tuple(name.strip() for name in names.split(",")) if names is not None else ()
    if not all(found):
        raise ValueError(f"--ignore_columns {names!r} has an empty name; separate names by single commas")
    return found


def renamed_columns(pairs: str | None) -> dict[str, str]:
    """Returns the names that --columns `prompt=question,completion=answer` gives, by the columns of the rows.

    Raises ValueError for anything else than pairs, and for a name or column that stands twice.
    """
    found: dict[str, str] = {}
    for pair in pairs.split(",") if pairs is not None else ():
        name, equals, column = (part.strip() for part in pair.partition("="))
        if not name or not equals or not column:
            raise ValueError(f"--columns {pairs!r}: give pairs such as prompt=question,completion=answer")
        if column in found or name in found.values():
            raise ValueError(f"--columns {pairs!r} names {column if column in found else name!r} twice; give it once")
        found[column] = name
    return found


def select_columns(
    row: Mapping[str, Any], ignored: Collection[str], renamed: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Returns a row without the ignored columns, and with the renamed ones under their new names.

    Raises ValueError if another column has the new name already.
    """
    kept = {column: value for column, value in row.items() if column not in ignored}
    for column, name in renamed.items():
        if column in kept and name in kept and name not in renamed:
            raise ValueError(f"{where} has {name!r} beside {column!r}, which --columns reads as it; ignore one of them")
    return {renamed.get(column, column): value for column, value in kept.items()}


def check_renamed(row: Mapping[str, Any], renamed: Mapping[str, str], where: str) -> None:
    """Raises ValueError if a row, the first of a source, lacks a column that --columns reads under another name."""
    missing = next((column for column in renamed if column not in row), None)
    if missing is not None:
        has = ", ".join(row) or "none"
        turned = f"; --columns takes new name=column: {missing}={renamed[missing]}" if renamed[missing] in row else ""
        raise ValueError(
            f"{where} has no column {missing!r}, which --columns reads as {renamed[missing]!r}; it has: {has}{turned}"
        )
