"""Cells of a sweep: the combinations of its grid, each with a name, a command line and a directory."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launch.sweep_file import SHORT, Axes, Settings, Sweep
from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig

DTYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "bfloat16": ("--bf16", "True"),
    "float16": ("--fp16", "True"),
    "float32": (),
}
# Patterns of the model names of each family; other models need the setting `family`.
FAMILIES: Final[Mapping[str, str]] = {"llama3": r"llama-?3|^scaled", "llama2": r"llama-?2|code-?llama"}
LABELS: Final[Mapping[str, str]] = {flag: word for word, flag in SHORT.items()}


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str
    settings: Settings  # all of them, fixed ones too
    family: str
    ranks: int
    flags: tuple[str, ...]  # training flags, without the output directory
    output_dir: Path
    config: TrainConfig

    @property
    def words(self) -> tuple[str, ...]:
        """The training command line. A cell that runs again starts over."""
        return (*self.flags, "--output_dir", str(self.output_dir), "--overwrite_output_dir", "True")


def expand(sweep: Sweep) -> list[Cell]:
    """Returns every cell, in the order of the file. Raises ValueError for a cell that the trainer would refuse."""
    grid = list(combinations(sweep.fixed, sweep.grid)) if sweep.grid else []
    for place, entry in enumerate(sweep.exclude):
        kept = [settings for settings in grid if not matches(settings, entry)]
        if len(kept) == len(grid) and not sweep.changed:
            raise sweep.wrong(f"exclude[{place}]", "matches no cell that remains of the grid")
        grid = kept
    included = [settings for entry in sweep.include for settings in combinations(sweep.fixed, entry)]
    cells: dict[str, Cell] = {}
    for settings in [*grid, *included]:
        cell = make_cell(sweep, settings)
        other = cells.setdefault(cell.name, cell)
        if other.settings != cell.settings:
            keys = [k for k in cell.settings.keys() | other.settings if cell.settings.get(k) != other.settings.get(k)]
            raise sweep.wrong(cell.name, f"two cells have this name; they differ in {', '.join(sorted(keys))}")
    if not cells:
        raise sweep.wrong("grid", "no cell is left; give settings in grid or include")
    return list(cells.values())


def combinations(fixed: Settings, axes: Axes) -> Iterator[Settings]:
    for values in itertools.product(*axes.values()):
        yield {**fixed, **dict(zip(axes, values, strict=True))}


def matches(settings: Settings, entry: Axes) -> bool:
    return all(settings.get(key) in values for key, values in entry.items())


def make_cell(sweep: Sweep, settings: Settings) -> Cell:
    name = cell_name(sweep, settings)
    if sweep.data is not None:
        if "data_path" in settings:
            raise sweep.wrong("data", "data_path is given too; give one of them")
        settings = {**settings, "data_path": sweep.data["output"]}
    family, ranks = family_of(sweep, settings), settings.get("ranks", "1")
    if not re.fullmatch(r"[1-9][0-9]{0,5}", ranks):
        raise sweep.wrong("ranks", f"{ranks!r:.80} is not a number of processes")
    flags = tuple(flags_of(sweep, settings))
    output_dir = sweep.output_dir / name
    try:
        config = parse([*flags, "--output_dir", str(output_dir)], f"{family}/train.py")
    except ValueError as error:
        raise sweep.wrong(name, str(error)) from None
    return Cell(name, settings, family, int(ranks), flags, output_dir, config)


def flags_of(sweep: Sweep, settings: Settings) -> Iterator[str]:
    dtype = settings.get("dtype")
    if dtype is not None:
        if dtype not in DTYPES:
            raise sweep.wrong("dtype", f"{dtype!r} is unknown; choose from {', '.join(DTYPES)}")
        if {"bf16", "fp16"} & settings.keys():
            raise sweep.wrong("dtype", "bf16 or fp16 is given too; give one of them")
        yield from DTYPES[dtype]
    for key, value in settings.items():
        if key not in ("ranks", "dtype", "family"):
            yield from (f"--{key}", value)


def family_of(sweep: Sweep, settings: Settings) -> str:
    if "family" in settings:
        if settings["family"] not in FAMILIES:
            raise sweep.wrong("family", f"{settings['family']!r} is unknown; choose from {', '.join(FAMILIES)}")
        return settings["family"]
    model = settings.get("model_name_or_path", "")
    if not model:
        raise sweep.wrong("model", "is missing; give one in fixed, grid or every include")
    called = [family for family, pattern in FAMILIES.items() if re.search(pattern, model, re.IGNORECASE)]
    if len(called) != 1:
        raise sweep.wrong(
            "model", f"the name {model} does not tell the family; add `family: llama2` or `family: llama3`"
        )
    return called[0]


def cell_name(sweep: Sweep, settings: Settings) -> str:
    """Names a cell by all settings that the grid or an include names. It does not change as the grid grows."""
    named = list(dict.fromkeys(key for axes in (sweep.grid, *sweep.include) for key in axes))
    words = []
    for key in named:
        if key in sweep.grid or settings.get(key) != sweep.fixed.get(key):
            value = settings.get(key, "")
            text = re.sub(r"[^\w.+-]+", "-", value.rsplit("/", 1)[-1] if key == "model_name_or_path" else value)
            text = text.strip("-") or "none"
            words.append(text if key == "model_name_or_path" else f"{label(key)}-{text}")
    return "_".join(words) or "only"


def label(setting: str) -> str:
    """Returns the short name of a setting."""
    return LABELS.get(setting, setting)


def varying(cells: Sequence[Cell]) -> list[str]:
    """Returns the settings that differ between cells, in the order of the file."""
    keys = dict.fromkeys(key for cell in cells for key in cell.settings)
    return [key for key in keys if len({cell.settings.get(key) for cell in cells}) > 1]
