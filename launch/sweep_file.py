"""Sweep files: a grid of training flags in YAML, and its cells. An error is one line that names file and key.

The parsers of training and of data_gen read the flags, and refuse wrong ones.
"""

import itertools
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from analysis.plots_file import check_keys, setting, short_name
from data_gen.__main__ import parser as data_parser
from lightseq.config.command_line import parse
from lightseq.config.flag_names import OLDER_SPELLINGS
from lightseq.config.lengths import parse_tokens
from lightseq.config.parser import MOST_COUNT
from lightseq.config.train_config import TrainConfig
from lightseq.config.yaml_file import TextLoader, read_file

# Values as typed, by names in run.json. Those are training flags, except for `world_size` and `dtype`.
Settings = Mapping[str, str]
Axes = Mapping[str, tuple[str, ...]]

PROGRAM: Final = "launch/sweep.py"
DTYPES: Final[Mapping[str, Settings]] = {"bfloat16": {"bf16": "True"}, "float16": {"fp16": "True"}, "float32": {}}
OURS: Final = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint")
PLAIN: Final = ("output_dir", "timeout_seconds", "gpus_per_node")
KEYS: Final = (*PLAIN, "description", "data", "fixed", "grid", "exclude", "include")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str
    ranks: int
    flags: Settings  # training flags, without the output directory
    output_dir: Path
    config: TrainConfig

    @property
    def words(self) -> list[str]:
        """The flags on a command line. A cell that runs again starts over."""
        return as_words({**self.flags, "output_dir": str(self.output_dir), "overwrite_output_dir": "True"})


@dataclass(frozen=True)
class Sweep:
    """Contents of a sweep file."""

    description: str
    output_dir: Path
    cell_seconds: float  # time limit
    gpus_per_node: int  # for jobs
    data: Namespace | None  # arguments of `data_gen synthetic`; cells read its output unless they name another
    cells: tuple[Cell, ...]


def as_words(flags: Settings) -> list[str]:
    return [word for flag, value in flags.items() for word in (f"--{flag}", value)]


# ---- the file -------------------------------------------------------------------------------------------------------


def read_sweep(path: Path, changes: Sequence[str] = ()) -> Sweep:
    """Reads a sweep file; `changes` are KEY=VALUE and override it. Errors are ValueErrors with file and key."""
    top = read_file(path, partial(yaml.load, Loader=TextLoader))
    try:
        check_keys("", top, KEYS)
        top, changed = _with_changes(top, changes)
        output_dir = top.get("output_dir", f"outputs/sweeps/{path.stem}")
        if not isinstance(output_dir, str) or not output_dir:
            raise ValueError(f"output_dir: {output_dir!r:.80} is not a directory")
        fixed = {key: word for key, (word,) in _axes("fixed", top.get("fixed", {}), most=1).items()}
        data = None
        if "data" in top:
            flags = {short_name(key): word for key, (word,) in _axes("data", top["data"], most=1).items()}
            data = data_parser().parse_args(["synthetic", *as_words(flags)])
            fixed = {"data_path": str(data.output), **fixed}
        return Sweep(
            description=str(top.get("description", path.stem)),
            output_dir=Path(output_dir),
            cell_seconds=_number(top, "timeout_seconds", 3600),
            gpus_per_node=int(_number(top, "gpus_per_node", 4, is_whole=True)),
            data=data,
            cells=_cells(top, fixed, _axes("--set", changed), Path(output_dir)),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _with_changes(top: Mapping[str, Any], changes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the file with the keys that changes replace, and the settings that every cell gets by the others."""
    found, changed = dict(top), dict[str, Any]()
    for change in changes:
        key, given, text = change.partition("=")
        if not given or not key:
            raise ValueError(f"--set {change}: give KEY=VALUE")
        try:
            value = yaml.load(text, Loader=TextLoader) if text else ""
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ValueError(f"--set {change}: the value is neither a word nor a [list, of, words]") from None
        if key in PLAIN:
            found[key] = value
        elif not key.startswith("data."):
            changed[key] = value
        elif isinstance(found.get("data"), dict):
            found["data"] = {**found["data"], key.removeprefix("data."): value}
        else:
            raise ValueError(f"--set {change}: the file has no data; set data_path to data made with data_gen")
    return found, changed


def _number(top: Mapping[str, Any], key: str, default: float, is_whole: bool = False) -> float:
    try:
        value = float(top.get(key, default))
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value <= MOST_COUNT or (is_whole and not value.is_integer()):
        kind = "a whole number" if is_whole else "a number"
        raise ValueError(f"{key}: {top[key]!r:.80} is not {kind} above 0 and up to {MOST_COUNT:,}")
    return value


def _axes(where: str, value: object, most: int = MOST_COUNT) -> Axes:
    """Returns up to `most` values of each setting; a single word counts as a list of one."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: give `setting: value` lines")
    found: dict[str, tuple[str, ...]] = {}
    for key, given in value.items():
        name, words = setting(OLDER_SPELLINGS.get(key, key)), given if isinstance(given, list) else [given]
        if key in OURS:
            raise ValueError(f"{where}.{key}: every cell gets its own; leave it out")
        if name in found:
            raise ValueError(f"{where}.{key}: {name} is given twice")
        if not 0 < len(words) <= most or not all(isinstance(word, str) for word in words):
            remedy = "give one value" if most == 1 else "give one value or a list"
            raise ValueError(f"{where}.{key}: {remedy}; put JSON in quotes")
        if name == "model_max_length":
            words = [str(parse_tokens(word, f"{where}.{key}")) for word in words]
        found[name] = tuple(words)
    return found


# ---- the cells ------------------------------------------------------------------------------------------------------


def _cells(top: Mapping[str, Any], fixed: Settings, changed: Axes, output_dir: Path) -> tuple[Cell, ...]:
    """Returns the cells: the grid without exclude, then include. `changed` replaces settings in all of them.

    A name consists of all settings that the grid or an include names. It does not change as the grid grows.
    """
    grid = _axes("grid", top.get("grid", {}))
    include = [_axes(f"include[{place}]", entry) for place, entry in enumerate(top.get("include", []))]
    several = {key: words for key, words in changed.items() if len(words) > 1}

    def combinations(axes: Axes) -> list[Settings]:
        axes = {**axes, **changed}
        return [{**fixed, **dict(zip(axes, words, strict=True))} for words in itertools.product(*axes.values())]

    found = combinations(grid) if grid else []
    for place, entry in enumerate(top.get("exclude", [])):
        axes = _axes(f"exclude[{place}]", entry)
        kept = [each for each in found if not all(each.get(key) in words for key, words in axes.items())]
        if len(kept) == len(found) and not changed:
            raise ValueError(f"exclude[{place}]: matches no cell that remains of the grid")
        found = kept
    named = dict.fromkeys(key for axes in (grid, *include, several) for key in axes)
    cells: dict[str, Cell] = {}
    for settings in [*found, *itertools.chain.from_iterable(map(combinations, include))]:
        own = [key for key in named if key in grid or key in several or settings.get(key) != fixed.get(key)]
        name = "_".join(_part_of_name(key, settings.get(key, "")) for key in own) or "only"
        cell = _cell(name, settings, output_dir / name)
        if cells.setdefault(name, cell) != cell:
            raise ValueError(f"{name}: two cells have this name; make their settings differ in more")
    if not cells:
        raise ValueError("grid: no cell is left; give settings in grid or include")
    return tuple(cells.values())


def _part_of_name(key: str, value: str) -> str:
    """Returns a setting as a part of a cell's name: `length-4096`, but a model without its folder or owner."""
    is_model = key == "model_name_or_path"
    text = re.sub(r"[^\w.+-]+", "-", Path(value).name if is_model else value).strip("-")
    return (text.strip(".") or "none") if is_model else f"{short_name(key)}-{text or 'none'}"


def _cell(name: str, settings: Settings, output_dir: Path) -> Cell:
    """Returns a cell. Raises ValueError if the trainer would refuse it."""
    ranks, dtype = settings.get("world_size", "1"), settings.get("dtype", "float32")
    if not re.fullmatch(r"[1-9][0-9]{0,5}", ranks):
        raise ValueError(f"ranks: {ranks!r:.80} is not a number of processes")
    if dtype not in DTYPES or ("dtype" in settings and {"bf16", "fp16"} & settings.keys()):
        raise ValueError(f"dtype: {dtype!r}: give one of {', '.join(DTYPES)}, without bf16 and fp16")
    flags = {**DTYPES[dtype], **{key: word for key, word in settings.items() if key not in ("world_size", "dtype")}}
    try:
        config = parse([*as_words(flags), "--output_dir", str(output_dir)], PROGRAM)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return Cell(name, int(ranks), flags, output_dir, config)
