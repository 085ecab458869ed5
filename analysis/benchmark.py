"""Plots and tables of benchmark results: `python3 -m analysis attention|step|largest FILE...`."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightseq.config.lengths import format_tokens

from .drawing import save
from .output import markdown_table, output_dir, print_lines
from .records import Record, print_notes, read_each, read_lines
from .style import BLUE, ORANGE, PALE

OURS = "lightseq"
BASELINE = "plain"  # of whole steps
CEILING = "single-gpu"  # the attention kernel on one GPU, an upper bound for every implementation


@dataclass(frozen=True)
class Measurements(ABC):
    """Records that fit in one table, because they share a setting such as the model and the device."""

    setting: Mapping[str, Any]
    records: Sequence[Record]

    @property
    @abstractmethod
    def title(self) -> str: ...

    @abstractmethod
    def table_rows(self) -> list[list[str]]:
        """Returns a header row and the rows of the table."""

    @abstractmethod
    def remarks(self) -> list[str]:
        """Returns sentences below the table, such as why numbers are missing."""

    @abstractmethod
    def figure(self) -> Figure | None:
        """Returns a picture, or None if nothing was measured."""


class LengthTable(Measurements):
    """Records with a `label` and a `length`. A skipped record has the reason in `skipped`."""

    @property
    def lengths(self) -> list[int]:
        return sorted({record["length"] for record in self.records})

    @property
    def measured(self) -> list[Record]:
        return [record for record in self.records if not record["skipped"]]

    def at(self, length: int, label: str) -> Record | None:
        return next((r for r in self.records if (r["length"], r["label"]) == (length, label)), None)

    @abstractmethod
    def spread(self, record: Record) -> float:
        """Returns the range of the repeats as a share of the median."""

    def remarks_on_losses(self) -> list[str]:
        """Returns sentences about the losses, if the benchmark has any."""
        return []

    def remarks(self) -> list[str]:
        """Returns the widest spread, remarks on losses, and the reasons for missing points."""
        out = []
        if self.measured:
            widest = max(self.measured, key=self.spread)
            out.append(f"Medians. Widest spread: {self.spread(widest):.1%} of the median ({place(widest)}).")
        out += self.remarks_on_losses()
        reasons: dict[tuple[str, str], list[int]] = {}
        for record in self.records:
            if record["skipped"]:
                reasons.setdefault((record["label"], record["skipped"]), []).append(record["length"])
        for (label, reason), lengths in reasons.items():
            is_everywhere = len(lengths) == len(self.lengths) > 1
            where = "everywhere" if is_everywhere else ", ".join(map(format_tokens, lengths))
            out.append(f"– {label}, {where}: {reason}")
        return out


def shades(records: Iterable[Record]) -> dict[str, str]:
    """Returns the color of each label's bars: lightseq, the reference that it is compared with, others."""
    colors = {OURS: BLUE, BASELINE: ORANGE, CEILING: ORANGE}
    return {r["label"]: colors.get(r["implementation"].removesuffix("-sft"), PALE) for r in records}


def place(record: Record) -> str:
    return f"{record['label']}, {format_tokens(record['length'])}"


@dataclass(frozen=True)
class Benchmark:
    """The records of one benchmark, and how they are grouped into tables.

    `keys` has the necessary keys by the `benchmark` that a record names. Records without necessary keys are headers.
    """

    name: str
    title: str
    program: str  # that writes the records
    keys: Mapping[str | None, Sequence[str]]
    group: Callable[[Iterable[Record]], Sequence[Measurements]]  # later records of a point replace earlier ones
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for keys that older records lack

    def read(self, path: Path, notes: list[str]) -> list[Record]:
        """Returns the records of a file, each with its device and the `header` that has its command and machine."""
        header: Record = {}

        def parse(record: Record) -> Record | None:
            nonlocal header
            kind = record.get("benchmark")
            if kind not in self.keys:
                raise ValueError(f"is not a record of {self.program}")
            header = record if "hardware" in record else header
            if not self.keys[kind]:
                return None
            device = dict(header.get("hardware") or {}).get("device", "unknown device")
            record = {**self.defaults, "device": device, "header": header, **record}
            if missing := [key for key in self.keys[kind] if key not in record]:
                raise ValueError(f"has no {missing[0]!r}; it should be a record of {self.program}")
            return record

        return [record for record in read_lines(path, parse, notes) if record]

    def main(self, arguments: argparse.Namespace) -> int:
        notes: list[str] = []
        files = read_each(arguments.files, lambda path: self.read(path, notes), notes)
        groups = self.group(chain(*files.values()))
        if not groups:
            names = ", ".join(map(str, arguments.files))
            raise ValueError(f"no measurements in {names}; run the benchmark first")
        alone = next(iter(files)) if len(files) == 1 else None
        output = output_dir(
            arguments.output, self.name, [alone.parent] if alone else [path.with_suffix("") for path in files]
        )
        pictures = self.save_each(groups, output, alone.stem if alone else self.name)
        print_notes(notes)
        for group in groups:
            print_lines([group.title, "", *markdown_table(group.table_rows()), "", *group.remarks(), ""])
        print_lines(pictures)
        return 0

    def save_each(self, groups: Sequence[Measurements], output: Path, name: str) -> list[Path]:
        """Writes a picture per group. File names have `name` and the settings that differ, without empty ones."""
        drawn = [(group.setting, figure) for group in groups if (figure := group.figure()) is not None]
        keys = drawn[0][0] if drawn else ()
        varying = [key for key in keys if len({setting[key] for setting, _ in drawn}) > 1]
        paths = []
        for setting, figure in drawn:
            settings = [f"{key}-{setting[key]}" for key in varying if setting[key]]
            paths.append(save(figure, output, "-".join([name, *settings]).replace("/", "-").replace(" ", "-")))
        return paths


def group_by(records: Iterable[Record], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Record]]:
    """Returns records by the values of their keys."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in keys), []).append(record)
    return found
