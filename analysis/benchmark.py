"""Plots and tables of benchmark results: `python3 -m analysis attention|step|largest FILE...`."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from matplotlib.figure import Figure

from .drawing import add_output_flag, markdown_table, output_dir, print_lines, save
from .records import Record, print_notes, read_each


class Comparable(Protocol):
    """Measurements that fit in one table."""

    @property
    def setting(self) -> Mapping[str, Any]:
        """Returns the settings that all measurements share, such as the model and the device."""
        ...

    @property
    def title(self) -> str: ...


G = TypeVar("G", bound=Comparable)


@dataclass(frozen=True)
class Benchmark(Generic[G]):
    """Functions that read, group, plot and tabulate the records of one benchmark."""

    name: str
    title: str
    description: str
    read: Callable[[Path, list[str]], list[Record]]
    group: Callable[[Iterable[Record]], list[G]]  # later records of a point replace earlier ones
    figure: Callable[[G], Figure | None]  # None if nothing was measured
    table_rows: Callable[[G], list[list[str]]]
    remarks: Callable[[G], list[str]]

    def main(self, argv: Sequence[str]) -> int:
        parser = argparse.ArgumentParser(
            prog=f"analysis {self.name}",
            usage=f"python3 -m analysis {self.name} FILE... [--output DIR]",
            description=f"{self.description} from records of benchmarks/{self.name}.py and prints a Markdown table.",
        )
        parser.add_argument(
            "files",
            metavar="FILE",
            nargs="+",
            type=Path,
            help="JSONL records; later files replace earlier ones point by point",
        )
        add_output_flag(parser, "beside FILE")
        arguments = parser.parse_args(argv)
        notes: list[str] = []
        files = read_each(arguments.files, lambda path: self.read(path, notes), notes)
        groups = self.group(chain(*files.values()))
        if not groups:
            names = ", ".join(map(str, arguments.files))
            raise ValueError(f"no measurements in {names}; run the benchmark first")
        output = output_dir(arguments.output, [path.parent for path in files])
        pictures = self.save_each(groups, output)
        print_notes(notes)
        for group in groups:
            print_lines([group.title, "", *markdown_table(self.table_rows(group)), "", *self.remarks(group), ""])
        print_lines(pictures)
        return 0

    def save_each(self, groups: Sequence[G], output: Path) -> list[Path]:
        """Writes a picture per group. File names have the settings that differ, without empty ones."""
        drawn = [(group.setting, figure) for group in groups if (figure := self.figure(group)) is not None]
        keys = drawn[0][0] if drawn else ()
        varying = [key for key in keys if len({setting[key] for setting, _ in drawn}) > 1]
        paths = []
        for setting, figure in drawn:
            settings = [f"{key}-{setting[key]}" for key in varying if setting[key]]
            name = "-".join([self.name, *settings])
            paths.append(save(figure, output, name.replace("/", "-").replace(" ", "-")))
        return paths
