"""Sweep files: a grid of training flags in YAML, and its cells. An error is one line that names file and key.

The trainer's own parser reads the flags of each cell, and refuses wrong ones.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from lightseq.config.command_line import parse
from lightseq.config.flag_names import OLDER_SPELLINGS
from lightseq.config.lengths import parse_tokens
from lightseq.config.parser import MOST_COUNT
from lightseq.config.train_config import TrainConfig
from lightseq.config.yaml_file import TextLoader, read_file

Settings = Mapping[str, str]
Axes = Mapping[str, tuple[str, ...]]

PROGRAM: Final = "launch/sweep.py"
# Short names of what most sweeps vary. `ranks` and `dtype` are not flags of training.
SHORT: Final[Mapping[str, str]] = {
    "model": "model_name_or_path",
    "length": "model_max_length",
    "batch": "per_device_train_batch_size",
}
LABELS: Final[Mapping[str, str]] = {flag: word for word, flag in SHORT.items()}
DTYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "bfloat16": ("--bf16", "True"),
    "float16": ("--fp16", "True"),
    "float32": (),
}
OURS: Final = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint")
PLAIN: Final = ("output_dir", "timeout_seconds", "gpus_per_node")
KEYS: Final = (*PLAIN, "description", "data", "fixed", "grid", "exclude", "include")
DATA_DEFAULTS: Final[Settings] = {"vocab_size": "512", "seed": "0"}
HOUR: Final = 3600.0


@dataclass(frozen=True)
class Sweep:
    """Contents of a sweep file. Settings have the names of training flags, and every value is the word as typed."""

    path: Path
    description: str
    output_dir: Path
    cell_seconds: float  # time limit
    gpus_per_node: int  # for jobs
    data: Settings | None  # flags of `data_gen synthetic`; its output is every cell's data
    fixed: Settings
    grid: Axes
    exclude: tuple[Axes, ...]
    include: tuple[Axes, ...]
    changed: Axes  # settings that --set replaces in every cell


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str
    settings: Settings  # all of them, fixed ones too
    ranks: int
    flags: tuple[str, ...]  # training flags, without the output directory
    output_dir: Path
    config: TrainConfig

    @property
    def words(self) -> tuple[str, ...]:
        """The training command line. A cell that runs again starts over."""
        return (*self.flags, "--output_dir", str(self.output_dir), "--overwrite_output_dir", "True")


def wrong(path: Path, key: str, problem: str) -> ValueError:
    return ValueError(f"{path}: {key}: {problem}")


# ---- the file -------------------------------------------------------------------------------------------------------


def read_sweep(path: Path, changes: Sequence[str] = ()) -> Sweep:
    """Reads a sweep file; `changes` are KEY=VALUE and override it. Errors are ValueErrors with file and key."""
    top = read_file(path, partial(yaml.load, Loader=TextLoader))
    if not isinstance(top, dict):
        raise ValueError(f"{path}: give `key: value` lines; keys are {', '.join(KEYS)}")
    top, changed = _with_changes(path, top, changes)
    for key in top:
        if key not in KEYS:
            raise wrong(path, key, f"unknown; keys are {', '.join(KEYS)}")
    data = top.get("data")
    if data is not None:
        if not isinstance(data, dict) or not isinstance(data.get("output"), str):
            raise wrong(path, "data", "give flags of data_gen synthetic, with output")
        data = {**DATA_DEFAULTS, **data, "length": in_tokens(str(data.get("length")))}
    return Sweep(
        path=path,
        description=str(top.get("description", path.stem)),
        output_dir=Path(str(top.get("output_dir", f"outputs/sweeps/{path.stem}"))),
        cell_seconds=_number(path, top, "timeout_seconds", HOUR),
        gpus_per_node=int(_number(path, top, "gpus_per_node", 4)),
        data=data,
        fixed={key: word for key, (word,) in _axes(path, "fixed", top.get("fixed", {}), single=True).items()},
        grid=_axes(path, "grid", top.get("grid", {})),
        exclude=_entries(path, top, "exclude"),
        include=_entries(path, top, "include"),
        changed=_axes(path, "--set", changed),
    )


def _with_changes(path: Path, top: Mapping[str, Any], changes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the file with the keys that changes replace, and the settings that every cell gets by the others.

    A `data_path` replaces the file's own data.
    """
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
            found = {word: old for word, old in found.items() if (key, word) != ("data_path", "data")}
        elif isinstance(found.get("data"), dict):
            found["data"] = {**found["data"], key.removeprefix("data."): value}
        else:
            raise ValueError(f"--set {change}: {path} has no data of its own; set data_path to data made with data_gen")
    return found, changed


def flag_of(word: str) -> str:
    """Returns the training flag of a setting."""
    return OLDER_SPELLINGS.get(SHORT.get(word, word), SHORT.get(word, word))


def in_tokens(text: str) -> str:
    """Returns 4K as 4096; any other text is left for the trainer to refuse."""
    try:
        return str(parse_tokens(text))
    except ValueError:
        return text


def _number(path: Path, top: Mapping[str, Any], key: str, default: float) -> float:
    try:
        value = float(top.get(key, default))
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value <= MOST_COUNT:
        raise wrong(path, key, f"{top[key]!r:.80} is not a number above 0 and up to {MOST_COUNT:,}")
    return value


def _entries(path: Path, top: Mapping[str, Any], key: str) -> tuple[Axes, ...]:
    value = top.get(key, [])
    if not isinstance(value, list):
        raise wrong(path, key, "give a list, with `-` before every entry")
    return tuple(_axes(path, f"{key}[{place}]", entry) for place, entry in enumerate(value))


def _axes(path: Path, where: str, value: object, single: bool = False) -> Axes:
    """Returns the values of each setting; a single word counts as a list of one."""
    if not isinstance(value, dict):
        raise wrong(path, where, "give `setting: value` lines")
    found: dict[str, tuple[str, ...]] = {}
    for key, given in value.items():
        name, words = flag_of(key), given if isinstance(given, list) and not single else [given]
        if key in OURS:
            raise wrong(path, f"{where}.{key}", "every cell gets its own; leave it out")
        if name in found:
            raise wrong(path, f"{where}.{key}", f"{name} is given twice")
        if not words or not all(isinstance(word, str) for word in words) or len({*words}) < len(words):
            remedy = "give one value" if single else "give one value, or a list without repeats"
            raise wrong(path, f"{where}.{key}", f"{remedy}; put JSON in quotes")
        found[name] = tuple(in_tokens(word) if name == "model_max_length" else word for word in words)
    return found


# ---- the cells ------------------------------------------------------------------------------------------------------


def expand(sweep: Sweep) -> list[Cell]:
    """Returns every cell, in the order of the file. Raises ValueError for a cell that the trainer would refuse."""
    grid = list(_combinations(sweep, sweep.grid)) if sweep.grid else []
    for place, entry in enumerate(sweep.exclude):
        kept = [each for each in grid if not all(each.get(key) in values for key, values in entry.items())]
        if len(kept) == len(grid) and not sweep.changed:
            raise wrong(sweep.path, f"exclude[{place}]", "matches no cell that remains of the grid")
        grid = kept
    included = [settings for entry in sweep.include for settings in _combinations(sweep, entry)]
    cells: dict[str, Cell] = {}
    for settings in [*grid, *included]:
        cell = make_cell(sweep, settings)
        if cells.setdefault(cell.name, cell).settings != cell.settings:
            raise wrong(sweep.path, cell.name, "two cells have this name; make their settings differ in more")
    if not cells:
        raise wrong(sweep.path, "grid", "no cell is left; give settings in grid or include")
    return list(cells.values())


def _combinations(sweep: Sweep, axes: Axes) -> Iterator[Settings]:
    axes = {**axes, **sweep.changed}
    for values in itertools.product(*axes.values()):
        yield {**sweep.fixed, **dict(zip(axes, values, strict=True))}


def make_cell(sweep: Sweep, settings: Settings) -> Cell:
    name = cell_name(sweep, settings)
    if sweep.data is not None:
        if "data_path" in settings:
            raise wrong(sweep.path, "data", "data_path is given too; give one of them")
        settings = {**settings, "data_path": sweep.data["output"]}
    ranks, dtype = settings.get("ranks", "1"), settings.get("dtype", "float32")
    if not re.fullmatch(r"[1-9][0-9]{0,5}", ranks):
        raise wrong(sweep.path, "ranks", f"{ranks!r:.80} is not a number of processes")
    if dtype not in DTYPES or ("dtype" in settings and {"bf16", "fp16"} & settings.keys()):
        raise wrong(sweep.path, "dtype", f"{dtype!r}: give one of {', '.join(DTYPES)}, without bf16 and fp16")
    flags = [word for key, value in settings.items() if key not in ("ranks", "dtype") for word in (f"--{key}", value)]
    output_dir = sweep.output_dir / name
    try:
        config = parse([*DTYPES[dtype], *flags, "--output_dir", str(output_dir)], PROGRAM)
    except ValueError as error:
        raise wrong(sweep.path, name, str(error)) from None
    return Cell(name, settings, int(ranks), (*DTYPES[dtype], *flags), output_dir, config)


def cell_name(sweep: Sweep, settings: Settings) -> str:
    """Names a cell by all settings that the grid or an include names. It does not change as the grid grows."""
    words = []
    several = {key: words for key, words in sweep.changed.items() if len(words) > 1}
    for key in dict.fromkeys(key for axes in (sweep.grid, *sweep.include, several) for key in axes):
        if key in sweep.grid or key in several or settings.get(key) != sweep.fixed.get(key):
            is_model, value = key == "model_name_or_path", settings.get(key, "")
            text = re.sub(r"[^\w.+-]+", "-", value.rsplit("/", 1)[-1] if is_model else value).strip("-") or "none"
            words.append(text if is_model else f"{LABELS.get(key, key)}-{text}")
    return "_".join(words) or "only"
