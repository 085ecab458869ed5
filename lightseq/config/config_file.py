"""Flags in a file (--config): YAML or JSON, flat or by group, or the run.json of an earlier run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from lightseq.config.flag_names import OLDER_SPELLINGS, normalize_flag
from lightseq.config.flags import GROUPS
from lightseq.config.train_config import TrainConfig, flag_types
from lightseq.config.yaml_file import TextLoader, read_file
from lightseq.distributed.rank_launcher import LAUNCHER_FLAGS

LAUNCHER_NAMES: Final = tuple(name for name, _ in LAUNCHER_FLAGS)
PLAN: Final = "plan"  # a group of flags that `lightseq plan` alone reads
MAX_NESTING = 100  # levels of a value


class FlagLoader(TextLoader):
    """YAML loader that keeps scalars as text, except that empty values, `~` and `null` are None."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        return None if node.style is None and node.value in ("", "~", "null") else super().construct_scalar(node)


def arguments_in(path: Path) -> list[str]:
    """Returns the flags of a file as command-line arguments. Raises ValueError with the file and the key."""
    return [argument for name, argument in _arguments(path) if name not in LAUNCHER_NAMES]


def launcher_arguments_in(path: Path) -> list[str]:
    """Returns the flags of a file that `lightseq train` takes as a launcher: how many processes start, and restart."""
    return [argument for name, argument in _arguments(path) if name in LAUNCHER_NAMES]


def plan_arguments_in(path: Path) -> list[str]:
    """Returns the flags of a file's group `plan`: hardware, and flags of training that a plan replaces."""
    group = _read(path).get(PLAN) or {}
    if not isinstance(group, dict):
        raise ValueError(f"{path}: {PLAN}: give `flag: value` lines below it")
    return [f"--{name}={_argument(str(name), value, path)}" for name, value in group.items()]


def _read(path: Path) -> dict[Any, Any]:
    is_json = path.suffix == ".json"
    top = read_file(path, json.loads if is_json else partial(yaml.load, Loader=FlagLoader))
    if is_json and isinstance(top, dict) and "config" in top:
        top = top["config"]  # a run.json
    if not isinstance(top, dict):
        raise ValueError(f"{path}: give `flag: value` lines, alone or under {', '.join(GROUPS)}")
    return top


def _arguments(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the flags of a file: names, and command-line arguments."""
    top = {name: value for name, value in _read(path).items() if name != PLAN}
    unset = {*LAUNCHER_NAMES, *(field.name for field in fields(TrainConfig) if field.default is None)}
    for name, value in _ungrouped(top, path):
        if value is not None:
            yield name, f"--{name}={_argument(name, value, path)}"
        elif name not in unset:
            raise ValueError(f"{path}: {name} has no value; give one, or leave it out")


def _ungrouped(top: Mapping[Any, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Yields flag names and values. Raises ValueError for a flag that is given twice."""
    seen = set()
    for group, inside in top.items():
        if group in GROUPS and not isinstance(inside, dict | None):
            raise ValueError(f"{path}: {group}: give `flag: value` lines below it")
        for key, value in (inside or {}).items() if group in GROUPS else [(group, inside)]:
            name = normalize_flag(f"--{str(key).removeprefix('--')}").removeprefix("--")
            name = OLDER_SPELLINGS.get(name, name)
            if name in seen:
                raise ValueError(f"{path}: {name} is given twice; give it once")
            seen.add(name)
            yield name, value


def _argument(name: str, value: Any, path: Path) -> str:
    """Formats a value for the command line."""
    kind = flag_types().get(name)
    if isinstance(value, dict) and kind is dict:
        try:
            return json.dumps(_typed(value, MAX_NESTING))
        except RecursionError:
            raise ValueError(f"{path}: {name} is nested too deeply") from None
    if isinstance(value, list) and kind is tuple:
        return ":".join(map(str, value))
    if isinstance(value, dict | list) and name in flag_types():
        raise ValueError(f"{path}: {name}: {value!r:.80} is not a single value")
    return value if isinstance(value, str) else json.dumps(value)


def _typed(value: Any, levels: int) -> Any:
    """Parses the numbers and booleans in a nested value of strings. Raises RecursionError for more `levels`."""
    if isinstance(value, dict | list) and levels == 0:
        raise RecursionError
    if isinstance(value, dict):
        return {key: _typed(inside, levels - 1) for key, inside in value.items()}
    if isinstance(value, list):
        return [_typed(inside, levels - 1) for inside in value]
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
