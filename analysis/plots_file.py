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
    """One figure, with a line or bars for each combination of the settings in `series`."""

    name: str
    metric: str
    x: str
    series: tuple[str, ...]
    where: Mapping[str, tuple[str, ...]]
    title: str | None


@dataclass(frozen=True)
class PlotsFile:
    """The figures of a file and the directories to search for runs."""

    runs: tuple[Path, ...]
    plots: tuple[Plot, ...]


def read_plots(path: Path) -> PlotsFile:
    """Reads the figures of a file. Raises ValueError with file and key for invalid content."""
    top = read_file(path, partial(yaml.load, Loader=TextLoader))  # 4096 stays text, for comparison with run.json
    try:
        check_keys("", top, KEYS)
        figures = top.get("figures")
        if not isinstance(figures, dict) or not figures:
            raise ValueError("figures: give `name: {metric: …, x: …}` lines")
        runs = _words("runs", top.get("runs"))
        return PlotsFile(tuple(map(Path, runs)), tuple(_plot(name, spec) for name, spec in figures.items()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def setting(word: str) -> str:
    """Returns a setting's name in run.json."""
    return SHORT_NAMES.get(word, word)


def short_name(key: str) -> str:
    """Returns the short name of a setting."""
    return next((word for word, name in SHORT_NAMES.items() if name == key), key)


def _plot(name: str, spec: Any) -> Plot:
    place = f"figures.{name}"
    check_keys(place, spec, FIGURE_KEYS)
    for key in ("metric", "x"):
        if not isinstance(spec.get(key), str):
            raise ValueError(f"{place}.{key}: {'is missing' if key not in spec else 'give one word'}")
    where = spec.get("where", {})
    if not isinstance(where, dict):
        raise ValueError(f"{place}.where: give `setting: [value, …]` lines")
    return Plot(
        name=name,
        metric=spec["metric"],
        x=setting(spec["x"]),
        series=tuple(map(setting, _words(f"{place}.series", spec["series"]))) if "series" in spec else (),
        where={setting(key): _words(f"{place}.where.{key}", values) for key, values in where.items()},
        title=spec.get("title"),
    )


def _words(place: str, value: Any) -> tuple[str, ...]:
    """Returns one word or a list of words as a tuple."""
    words = value if isinstance(value, list) else [value]
    if not all(isinstance(word, str) for word in words) or not words:
        raise ValueError(f"{place}: give one word or a list of words")
    return tuple(words)


def check_keys(place: str, found: Any, known: Sequence[str]) -> None:
    """Raises ValueError, with the place in the file, for anything but a mapping with known keys."""
    if not isinstance(found, dict):
        raise ValueError(f"{place}: give `key: value` lines; keys are {', '.join(known)}".removeprefix(": "))
    for key in found:
        if key not in known:
            raise ValueError(f"{place}.{key}: unknown; keys are {', '.join(known)}".removeprefix("."))
