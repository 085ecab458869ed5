"""Knows what a page of results is made of: sections of tables, charts and details, and how they become safe JSON."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

POINTS = 1000  # of a line at most; a page of many long runs stays small
DIGITS = 6


@dataclass(frozen=True)
class Cell:
    """What a table shows, and the number it sorts by."""

    text: str
    value: float | None


@dataclass(frozen=True)
class Table:
    """Rows of strings and cells. `entries` gives each row the colour of an entry of the section's charts."""

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    notes: Sequence[str] = ()
    entries: Sequence[int] = ()


@dataclass(frozen=True)
class Entry:
    """A row of a legend: a line in every chart of its block, at these places."""

    name: str
    x: Sequence[float] = ()


@dataclass(frozen=True)
class Series:
    """An entry's values in one chart. Where there is `raw`, it is drawn faintly, and hovering shows it."""

    entry: int
    y: Sequence[float | None]
    raw: Sequence[float | None] = ()
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    marks: Sequence[tuple[float, float]] = ()  # single points beside the line: evaluations


@dataclass(frozen=True)
class Lines:
    """A chart of lines; its values begin at zero unless they live elsewhere, as losses do."""

    kind: ClassVar[str] = "lines"
    title: str
    unit: str
    x: str
    series: Sequence[Series]
    zero: bool = True
    warmup: int = 0  # first values that may be out of range
    ticks: Sequence[tuple[float, str]] = ()  # where the horizontal axis doubles: its places and their names


@dataclass(frozen=True)
class Bar:
    """A bar, or why there is none."""

    entry: int
    value: float | None
    low: float | None = None
    high: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars in groups, each under its heading."""

    kind: ClassVar[str] = "bars"
    title: str
    unit: str
    groups: Sequence[tuple[str, Sequence[Bar]]]


@dataclass(frozen=True)
class Charts:
    """Charts that share a legend."""

    kind: ClassVar[str] = "charts"
    title: str
    entries: Sequence[Entry]
    charts: Sequence[Lines | Bars]


@dataclass(frozen=True)
class Fact:
    name: str
    value: str
    named: bool = False  # by the command


@dataclass(frozen=True)
class Part:
    """A piece of the details: text as it was typed, or facts."""

    title: str
    facts: Sequence[Fact] = ()
    code: str = ""


@dataclass(frozen=True)
class Details:
    """What opens on a click."""

    kind: ClassVar[str] = "details"
    title: str
    parts: Sequence[Part]
    about: str = ""


Block = Table | Charts | Details


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: Sequence[Block]
    notes: Sequence[str] = ()


def number(text: str, value: float | None) -> Cell:
    """A cell that is empty where the number is not known."""
    known = value is not None and math.isfinite(value)
    return Cell(text if known else "", value if known else None)


def facts_of(values: Mapping[str, object]) -> list[Fact]:
    return [
        Fact(name, value if isinstance(value, str) else json.dumps(value))
        for name, value in values.items()
        if value is not None
    ]


def thinned(count: int) -> np.ndarray:
    """Which of so many points are drawn: all of few, else evenly many, the last one among them."""
    return np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int))


def plain(value: Any) -> Any:
    """As JSON has it: no NaN, no needless digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return named | ({"kind": value.kind} if hasattr(value, "kind") else {})
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray | list | tuple | range):
        return [plain(inner) for inner in value]
    if isinstance(value, float):  # numpy's too
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")
