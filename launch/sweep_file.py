"""Reader of sweep files: grids of training flags in YAML. An error is one line that names file and key."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from lightseq.config.flag_names import OLDER_SPELLINGS
from lightseq.config.lengths import parse_tokens
from lightseq.config.parser import MOST_COUNT
from lightseq.config.train_config import TrainConfig
from lightseq.config.yaml_file import TextLoader, read_file

Settings = Mapping[str, str]
Axes = Mapping[str, tuple[str, ...]]

# Short names of what most sweeps vary. `ranks`, `dtype` and `family` are not flags: the launcher uses them.
SHORT: Final[Mapping[str, str]] = {
    "model": "model_name_or_path",
    "length": "model_max_length",
    "batch": "per_device_train_batch_size",
}
LAUNCHER: Final = ("ranks", "dtype", "family")
OURS: Final = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint")
FLAGS: Final = tuple(field.name for field in fields(TrainConfig))
SETTINGS: Final = (*SHORT, *LAUNCHER, *(flag for flag in FLAGS if flag not in OURS), *OLDER_SPELLINGS)
KEYS: Final = (
    *("description", "output_dir", "timeout_seconds", "gpus_per_node", "data"),
    *("fixed", "grid", "exclude", "include"),
)
PLAIN: Final = ("output_dir", "timeout_seconds", "gpus_per_node")
SYNTHETIC: Final = ("kind", "documents", "length", "vocab_size", "seed", "output")
DATA_DEFAULTS: Final[Settings] = {"vocab_size": "512", "seed": "0"}
HOUR: Final = 3600.0


@dataclass(frozen=True)
class Sweep:
    """Contents of a sweep file. Settings have the names of training flags, and every value is the word as typed."""

    path: Path
    description: str
    output_dir: Path
    timeout_seconds: float  # of a cell
    gpus_per_node: int  # for jobs
    data: Settings | None  # flags of `data_gen synthetic`; its output is every cell's data
    fixed: Settings
    grid: Axes
    exclude: tuple[Axes, ...]
    include: tuple[Axes, ...]
    changed: bool = False  # by --set: an exclude entry may then match nothing

    def wrong(self, key: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {key}: {problem}")


def read_sweep(path: Path, changes: Sequence[str] = ()) -> Sweep:
    """Reads a sweep file; `changes` are KEY=VALUE and override it. Errors are ValueErrors with file and key."""
    top = _load(path)
    for change in changes:
        top = changed(path, top, change)
    raw = Raw(path, top)
    return Sweep(
        path=path,
        description=raw.word("description", path.stem),
        output_dir=Path(raw.word("output_dir", f"outputs/sweeps/{path.stem}")),
        timeout_seconds=raw.number("timeout_seconds", HOUR),
        gpus_per_node=int(raw.number("gpus_per_node", 4)),
        data=raw.data(),
        fixed={key: values[0] for key, values in raw.axes("fixed", raw.top.get("fixed", {}), single=True).items()},
        grid=raw.axes("grid", raw.top.get("grid", {})),
        exclude=raw.entries("exclude"),
        changed=bool(changes),
        include=raw.entries("include"),
    )


def changed(path: Path, top: Mapping[str, Any], change: str) -> dict[str, Any]:
    """Returns the file with one setting replaced everywhere, so that every cell has it: `ranks=2`, `length=[4K,8K]`.

    A `data_path` replaces the file's own data.
    """
    key, given, text = change.partition("=")
    known = (*SETTINGS, *PLAIN, *(f"data.{flag}" for flag in SYNTHETIC))
    if not given or not key:
        raise ValueError(f"--set {change}: give KEY=VALUE{nearest(key, known)}")
    if key in OURS and key not in PLAIN:
        raise ValueError(f"--set {change}: every cell gets its own {key}; leave it out")
    if key not in known:
        others = f"; there are {', '.join((*SHORT, *LAUNCHER, *PLAIN))}, data.KEY and the flags of llama3/train.py"
        raise ValueError(f"--set {change}: {key} is not a setting{nearest(key, known) or others}")
    try:
        value = yaml.load(text, Loader=TextLoader) if text else ""
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError(f"--set {change}: the value is neither a word nor a [list, of, words]") from None
    if key in PLAIN:
        return {**top, key: value}
    if key.startswith("data."):
        if "data" not in top:
            raise ValueError(f"--set {change}: {path} has no data of its own; set data_path to data made with data_gen")
        data = top["data"]
        return {**top, "data": {**(data if isinstance(data, dict) else {}), key.removeprefix("data."): value}}
    if key == "data_path":
        top = {word: old for word, old in top.items() if word != "data"}
    names = {word for word in SETTINGS if flag_of(word) == flag_of(key)}

    def replaced(place: Mapping[str, Any], anyway: bool) -> dict[str, Any]:
        new = {word: value if word in names else old for word, old in place.items()}
        return new if names & place.keys() or not anyway else {**new, key: value}

    fixed, grid, include = top.get("fixed", {}), top.get("grid", {}), top.get("include", [])
    if not (isinstance(fixed, dict) and isinstance(grid, dict) and isinstance(include, list)):
        return {**top}  # refused later, as without the change
    axis = isinstance(value, list)
    rest = {word: old for word, old in fixed.items() if word not in names}
    return {
        **top,
        "fixed": rest if axis else {**rest, key: value},
        "grid": replaced(grid, axis and bool(grid)),
        "include": [replaced(entry, axis) if isinstance(entry, dict) else entry for entry in include],
    }


def flag_of(word: str) -> str:
    """Returns the training flag of a setting."""
    return OLDER_SPELLINGS.get(SHORT.get(word, word), SHORT.get(word, word))


def in_tokens(text: str) -> str:
    """Returns 4K as 4096; any other text is left for the trainer to refuse."""
    try:
        return str(parse_tokens(text))
    except ValueError:
        return text


@dataclass(frozen=True)
class Raw:
    """Parsed YAML of a sweep file, and the checks of its values."""

    path: Path
    top: Mapping[str, Any]

    def wrong(self, key: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {key}: {problem}")

    def word(self, key: str, default: str) -> str:
        value = self.top.get(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "give one word")
        return value

    def number(self, key: str, default: float) -> float:
        try:
            value = float(self.word(key, str(default)))
        except ValueError:
            value = math.nan
        if not 0 < value <= MOST_COUNT:
            raise self.wrong(key, f"{self.top[key]!r:.80} is not a number above 0 and up to {MOST_COUNT:,}")
        return value

    def data(self) -> Settings | None:
        """Returns the flags of `python3 -m data_gen synthetic` under `data`, None without it."""
        value = self.top.get("data")
        if value is None:
            return None
        if not isinstance(value, dict) or not all(isinstance(word, str) for word in value.values()):
            raise self.wrong("data", f"give flags of data_gen synthetic: {', '.join(SYNTHETIC)}")
        for key in value:
            if key not in SYNTHETIC:
                raise self.wrong(f"data.{key}", f"unknown{nearest(key, SYNTHETIC)}; choose from {', '.join(SYNTHETIC)}")
        missing = [key for key in ("kind", "documents", "length", "output") if key not in value]
        if missing:
            raise self.wrong("data", f"{missing[0]} is missing")
        return {**DATA_DEFAULTS, **{key: in_tokens(word) if key == "length" else word for key, word in value.items()}}

    def entries(self, key: str) -> tuple[Axes, ...]:
        value = self.top.get(key, [])
        if not isinstance(value, list):
            raise self.wrong(key, "give a list, with `-` before every entry")
        return tuple(self.axes(f"{key}[{place}]", entry) for place, entry in enumerate(value))

    def axes(self, where: str, value: object, single: bool = False) -> Axes:
        """Returns the values of each setting; a single word counts as a list of one."""
        if not isinstance(value, dict):
            raise self.wrong(where, "give `setting: value` lines")
        found: dict[str, tuple[str, ...]] = {}
        for key, words in value.items():
            place = f"{where}.{key}"
            if key in OURS:
                raise self.wrong(place, "every cell gets its own; leave it out")
            if key not in SETTINGS:
                raise self.wrong(place, f"unknown setting{nearest(key, SETTINGS)}")
            name = flag_of(key)
            if name in found:
                raise self.wrong(place, f"{name} is given twice")
            found[name] = tuple(self._values(place, name, words, single))
        return found

    def _values(self, place: str, name: str, value: Any, single: bool) -> Sequence[str]:
        words: list[Any] = value if isinstance(value, list) else [value]
        if single and isinstance(value, list):
            raise self.wrong(place, "is the same in every cell, so give one value; lists belong in grid")
        if not words:
            raise self.wrong(place, "give at least one value")
        for word in words:
            if not isinstance(word, str):
                raise self.wrong(place, f"{word} is not a single value; put JSON in quotes")
        if len(set(words)) < len(words):
            raise self.wrong(place, f"{next(word for word in words if words.count(word) > 1)} is listed twice")
        return [in_tokens(word) if name == "model_max_length" else word for word in words]


def nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _load(path: Path) -> Mapping[str, Any]:
    top = read_file(path, partial(yaml.load, Loader=TextLoader))
    if not isinstance(top, dict):
        raise ValueError(f"{path}: give `key: value` lines; keys are {', '.join(KEYS)}")
    for key in top:
        if key not in KEYS:
            raise ValueError(f"{path}: {key}: unknown{nearest(key, KEYS)}; keys are {', '.join(KEYS)}")
    return top
