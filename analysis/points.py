"""Knows the records of the attention benchmark: which points there are, and which of them make one line."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .jsonl import read_lines, readable

CEILING = "single-gpu"
OURS = "lightseq"
UNITS = {"M": 2**20, "K": 2**10}


@dataclass(frozen=True, order=True)
class Setting:
    """What must be equal for two points to stand in one table."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    batch: int
    world: int
    documents: str = ""  # how a sequence's documents were drawn; "": it is one


@dataclass(frozen=True)
class Point:
    """One implementation at one length; numbers are None where it was skipped."""

    setting: Setting
    implementation: str
    request: str
    kernel: str | None
    transport: str | None
    length: int
    tflops: float | None
    seconds: tuple[float, float, float] | None  # lowest, median, highest
    peak_memory_bytes: int | None
    exposed_seconds: float | None
    skipped: str | None

    @property
    def spread(self) -> float:
        """Highest less lowest, as a share of the median."""
        assert self.seconds is not None
        low, median, high = self.seconds
        return (high - low) / median

    @property
    def bounds(self) -> tuple[float, float]:
        """TFLOP/s of the slowest and the fastest repeat."""
        assert self.seconds is not None and self.tflops is not None
        low, median, high = self.seconds
        return self.tflops * median / high, self.tflops * median / low


@dataclass(frozen=True)
class Line:
    """The points of one implementation, by length."""

    label: str
    implementation: str
    points: tuple[Point, ...]

    @property
    def measured(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.tflops is not None)

    def at(self, length: int) -> Point | None:
        return next((point for point in self.points if point.length == length), None)


@dataclass(frozen=True)
class Table:
    """Lines that may be compared: the ceiling first, then the fastest at the longest length."""

    setting: Setting
    device: str
    lines: tuple[Line, ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({point.length for line in self.lines for point in line.points})

    @property
    def title(self) -> str:
        s = self.setting
        batch = f", batch {s.batch}" if s.batch > 1 else ""
        documents = f", documents {s.documents}" if s.documents else ""
        return f"{s.world} × {self.device}, {s.heads}/{s.kv_heads} heads of {s.head_dim}, {s.dtype}{batch}{documents}"


def shown(tokens: int) -> str:
    """A length as people write it: 131072 is 128K."""
    unit = next((unit for unit, size in UNITS.items() if tokens % size == 0), "")
    return f"{tokens // UNITS.get(unit, 1)}{unit}"


def read_tables(paths: Sequence[Path], notes: list[str]) -> list[Table]:
    """One table a setting. A point measured twice counts as it was measured last."""
    headers: list[Mapping[str, Any]] = []

    def point_or_header(value: Mapping[str, Any]) -> Point | None:
        if "benchmark" not in value:
            return point_of(value)
        headers.append(value)
        return None

    files = readable(paths, lambda path: read_lines(path, point_or_header, notes), notes)
    points = [point for file in files for point in file]
    if not points:
        raise ValueError(f"no points in {', '.join(map(str, paths))}; the benchmark has measured nothing yet")
    devices = dict.fromkeys(str(header.get("hardware", {}).get("device", "unknown device")) for header in headers)
    device = " and ".join(devices) or "unknown device"
    return [Table(setting, device, lines(mine)) for setting, mine in by_setting(points)]


def point_of(record: Mapping[str, Any]) -> Point:
    try:
        facts = {"documents": "", **{key: value for key, value in record.items() if value is not None}}
        setting = Setting(**{key: facts[key] for key in Setting.__dataclass_fields__})
        if "tflops_per_gpu" not in record:
            raise ValueError("holds errors, not times; give files written without --check")
        times = tuple(record[f"seconds_{which}"] for which in ("min", "median", "max"))
        return Point(
            setting=setting,
            implementation=record["implementation"],
            request=record["request"],
            kernel=record["kernel"],
            transport=record["transport"],
            length=record["length"],
            tflops=record["tflops_per_gpu"],
            seconds=None if None in times else times,  # type: ignore[arg-type]
            peak_memory_bytes=record["peak_memory_bytes"],
            exposed_seconds=record["exposed_communication_seconds"],
            skipped=record["skipped"],
        )
    except KeyError as error:
        raise ValueError(f"has no {error}; it should be a record of benchmarks/attention.py") from None


def by_setting(points: Sequence[Point]) -> list[tuple[Setting, list[Point]]]:
    """Points that may be compared. One GPU's kernel is the ceiling whatever the number of ranks."""
    shared = sorted({point.setting for point in points if point.implementation != CEILING})
    settings = shared or sorted({point.setting for point in points})

    def belongs(point: Point, setting: Setting) -> bool:
        own = asdict(point.setting) | ({"world": setting.world} if point.implementation == CEILING else {})
        return own == asdict(setting)

    return [(setting, [point for point in points if belongs(point, setting)]) for setting in settings]


def lines(points: Sequence[Point]) -> tuple[Line, ...]:
    """A kernel or transport is named only where lightseq, or the ceiling, ran with more than one."""
    names: dict[Point, str] = {}
    for own in (CEILING, OURS):
        mine = [point for point in points if point.implementation == own and not point.skipped]
        kernels, transports = ({getattr(p, key) for p in mine} for key in ("kernel", "transport"))
        for point in points:
            if point.implementation == own:
                parts = [point.kernel] * (own == CEILING or len(kernels) > 1) + [point.transport] * (
                    len(transports) > 1
                )
                head = "one GPU" if own == CEILING else f"{OURS} {point.request}"
                names[point] = ", ".join([head, *(part for part in parts if part)])
    grouped: dict[tuple[str, str], dict[int, Point]] = {}
    for point in points:
        key = (names.get(point, point.implementation), point.implementation)
        grouped.setdefault(key, {})[point.length] = point
    made = [
        Line(label, implementation, tuple(by_length[n] for n in sorted(by_length)))
        for (label, implementation), by_length in grouped.items()
    ]
    lengths = sorted({point.length for point in points}, reverse=True)

    def slowness(line: Line) -> tuple[bool, list[float]]:
        found = (line.at(length) for length in lengths)
        return line.implementation != CEILING, [-(p.tflops or 0.0) if p else 0.0 for p in found]

    return tuple(sorted(made, key=slowness))
