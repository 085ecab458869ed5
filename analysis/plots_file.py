"""YAML files that describe figures: runs, and metric, x axis and lines of each figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from lightseq.config.yaml_file import TextLoader, read_file

STEP: Final = "step"  # x axis of curves
KEYS: Final = ("runs", "figures")
FIGURE_KEYS: Final = ("metric", "x", "series", "where", "title")
# Short names of settings, also used in sweep files.
SHORT_NAMES: Final[Mapping[str, str]] = {
    "model": "model_name_or_path",
    "length": "model_max_length",
    "batch": "per_device_train_batch_size",
    "ranks": "world_size",
}


@dataclass(frozen=True)
class Plot:
    """One figure. Lines differ in the settings `series`; None means all differing settings except `x`."""

    name: str
    metric: str
    x: str
    series: tuple[str, ...] | None
    where: Mapping[str, tuple[str, ...]]
    title: str | None


@dataclass(frozen=True)
class PlotsFile:
    """The figures of a file and the directories to search for runs."""

    runs: tuple[Path, ...]
    plots: tuple[Plot, ...]


def read_plots(path: Path) -> PlotsFile:
    """Reads the figures of a file. Raises ValueError with file and key for invalid content."""
    top = _load(path)
    _check_keys(path, "", top, KEYS)
    figures = top.get("figures")
    if not isinstance(figures, dict) or not figures:
        raise ValueError(f"{path}: figures: give `name: {{metric: …, x: …}}` lines")
    runs = _words(path, "runs", top.get("runs"))
    return PlotsFile(tuple(map(Path, runs)), tuple(_plot(path, str(name), spec) for name, spec in figures.items()))


def setting(word: str) -> str:
    """Returns a setting's name in run.json."""
    return SHORT_NAMES.get(word, word)


def short_name(key: str) -> str:
    """Returns the short name of a setting."""
    return next((word for word, name in SHORT_NAMES.items() if name == key), key)


def _plot(path: Path, name: str, spec: Any) -> Plot:
    where = f"figures.{name}"
    if not isinstance(spec, dict):
        raise ValueError(f"{path}: {where}: give {{metric: …, x: …}}")
    _check_keys(path, where, spec, FIGURE_KEYS)
    for key in ("metric", "x"):
        if not isinstance(spec.get(key), str):
            raise ValueError(f"{path}: {where}.{key}: {'is missing' if key not in spec else 'give one word'}")
    only = spec.get("where", {})
    if not isinstance(only, dict):
        raise ValueError(f"{path}: {where}.where: give `setting: [value, …]` lines")
    series = _words(path, f"{where}.series", spec["series"]) if "series" in spec else None
    return Plot(
        name=name,
        metric=spec["metric"],
        x=setting(spec["x"]),
        series=None if series is None else tuple(map(setting, series)),
        where={setting(key): _words(path, f"{where}.where.{key}", values) for key, values in only.items()},
        title=spec.get("title"),
    )


def _words(path: Path, key: str, value: Any) -> tuple[str, ...]:
    """Returns one word or a list of words as a tuple."""
    words = value if isinstance(value, list) else [value]
    if not all(isinstance(word, str) for word in words) or not words:
        raise ValueError(f"{path}: {key}: give one word or a list of words")
    return tuple(words)


def _check_keys(path: Path, where: str, found: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in found:
        if key not in known:
            place = f"{where}.{key}".lstrip(".")
            raise ValueError(f"{path}: {place}: unknown; keys are {', '.join(known)}")


def _load(path: Path) -> Mapping[str, Any]:
    # 4096 and True stay strings, for comparison with run.json.
    top = read_file(path, partial(yaml.load, Loader=TextLoader))
    if not isinstance(top, dict):
        raise ValueError(f"{path}: give `key: value` lines; keys are {', '.join(KEYS)}")
    return top
