"""Baselines: what one cell of the benchmarks measured on each kind of GPU, a JSON file per cell in baselines/."""

import json
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "benchmarks" / "baselines"
VERSIONS: Final = ("torch", "transformers", "flash-attn-4")


class Unit(NamedTuple):
    more_is_better: bool
    digits: int


UNITS: Final[Mapping[str, Unit]] = {
    "tokens/s": Unit(more_is_better=True, digits=0),
    "TFLOP/s per GPU": Unit(more_is_better=True, digits=0),
    "s": Unit(more_is_better=False, digits=2),
}


class Measured(NamedTuple):
    """Median, lowest and highest of a cell, in its unit, and the peak memory per GPU."""

    median: float
    lowest: float
    highest: float
    gib_per_gpu: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in self._asdict().items()}


@dataclass(frozen=True)
class Cell:
    """One cell: a command whose record is chosen by `select`, and its baselines by device."""

    name: str
    about: str
    gpus: int
    command: str
    select: Mapping[str, Any]
    unit: str
    baselines: Mapping[str, Mapping[str, Any]]

    def words(self, output: Path) -> list[str]:
        """Returns the words of the command after `python3`, for any current directory, with its output."""
        words = shlex.split(self.command)[1:]
        return [
            *(relpath(ROOT / word) if word.startswith("benchmarks/") else word for word in words),
            "--output",
            str(output),
        ]

    def baseline(self, device: str) -> Measured | None:
        """Returns what was measured on GPUs of this name, or None."""
        found = self.baselines.get(device)
        return Measured(*(found[name] for name in Measured._fields)) if found else None

    def chosen(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the cell's record. Raises ValueError if there is none, or if it was skipped."""
        found = [r for r in records if all(r.get(name) == value for name, value in self.select.items())]
        if not found:
            raise ValueError("its command wrote no record")
        if reason := found[-1].get("skipped"):
            raise ValueError(reason)
        return found[-1]


def measured(record: Mapping[str, Any]) -> Measured:
    """Reads the numbers of a record of step.py, grpo.py, attention.py or shared_prefix.py."""
    peak = record.get("peak_memory_allocated_bytes") or record.get("peak_memory_bytes") or 0  # None on a CPU
    if "tokens_per_second" in record:
        names = ("tokens_per_second", "tokens_per_second_lowest", "tokens_per_second_highest")
        median, lowest, highest = (record[name] for name in names)
    elif "tflops_per_gpu" in record:
        median = record["tflops_per_gpu"]
        work = median * record["seconds_median"]
        lowest, highest = work / record["seconds_max"], work / record["seconds_min"]
    else:
        times = record["step_seconds"][record.get("warmup", 2) :]
        median, lowest, highest = statistics.median(times), min(times), max(times)
    return Measured(median, lowest, highest, peak / 2**30)


def read_cells(folder: Path = FOLDER) -> dict[str, Cell]:
    """Returns all cells by name."""
    return {path.stem: Cell(path.stem, **json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))}


def save_baseline(cell: Cell, record: Mapping[str, Any], about: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Writes a record as the cell's baseline on its device. `about` has commit, date, hardware and versions."""
    entry = {
        **measured(record).to_json(),
        "commit": about["commit"][:8],
        "date": about["date"][:10],
        "versions": {name: about["versions"][name] for name in VERSIONS if name in about["versions"]},
    }
    fields = {name: getattr(cell, name) for name in ("about", "gpus", "command", "select", "unit")}
    device = about["hardware"]["device"]
    text = json.dumps({**fields, "baselines": {**cell.baselines, device: entry}}, indent=2)
    (folder / f"{cell.name}.json").write_text(text + "\n")


def number(value: float, unit: str) -> str:
    return f"{value:,.{UNITS[unit].digits}f}"


def markdown(cells: Mapping[str, Cell]) -> str:
    """Returns the table of all baselines, as dev/RESULTS.md shows it."""
    rows = [("cell", "what", "GPUs", "median (lowest to highest)", "memory per GPU", "date")]
    for cell in cells.values():
        for device, found in cell.baselines.items():
            median, lowest, highest = (number(found[name], cell.unit) for name in ("median", "lowest", "highest"))
            spread = f" ({lowest} to {highest})" if lowest != highest else ""
            gpus = f"{cell.gpus} x {device.removeprefix('NVIDIA ').removesuffix(' 80GB HBM3')}"
            value = f"{median} {cell.unit}{spread}"
            rows.append((f"`{cell.name}`", cell.about, gpus, value, f"{found['gib_per_gpu']:.1f} GiB", found["date"]))
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---|---|---|---|---|---|", *body])
