"""Knows a run's files: `metrics.jsonl`, one object a logged step or evaluation, and `run.json`, what was run."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .jsonl import read_lines, readable

Record = Mapping[str, float | None]


@dataclass(frozen=True)
class Run:
    """One run: its logged training steps and evaluations, in order, and what its `run.json` says."""

    label: str
    directory: Path
    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    about: Mapping[str, object]
    notes: tuple[str, ...]
    profile: Mapping[str, Any] = field(default_factory=dict)  # the summary of rank 0's trace, where there is one

    def column(self, key: str) -> np.ndarray:
        """One number a logged step; NaN where the run knew none."""
        return column(self.steps, key)

    @property
    def steps_before(self) -> int:
        """Steps that the first record says nothing of: those before the checkpoint of another directory."""
        logged = int(self.steps[0]["step"] or 0)
        begin = self.about.get("first_step")
        if isinstance(begin, int) and begin <= logged:
            return begin - 1
        # An older run, or one that went on where it lay: its metrics begin before the steps that it made itself.
        config = self.about.get("config")
        every = config.get("logging_steps") if isinstance(config, dict) else None
        return max(0, logged - every) if isinstance(every, int) else 0

    def pace(self, key: str) -> np.ndarray:
        """The same without the steps that `--profile_steps` traced and those beside them, in which the profiler starts
        and writes: NaN."""
        config = self.about.get("config")
        span = config.get("profile_steps") if isinstance(config, dict) else None
        values = self.column(key)
        if not isinstance(span, list) or len(span) != 2:
            return values
        last = self.column("step")
        first = np.array([self.steps_before, *last[:-1]]) + 1  # a record speaks of all steps since the one before
        return np.where((last >= span[0] - 1) & (first <= span[1] + 1), np.nan, values)

    def knows(self, key: str) -> bool:
        return bool(np.isfinite(self.column(key)).any())


def column(records: Sequence[Record], key: str) -> np.ndarray:
    values = [record.get(key) for record in records]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def read_runs(directories: Sequence[Path], notes: list[str]) -> list[Run]:
    """Those that can be read, the others named in the notes; raises ValueError where there is none."""
    named = list(zip(directories, labels(directories), strict=True))
    return readable(named, lambda pair: read_run(*pair), notes)


def labels(directories: Sequence[Path]) -> list[str]:
    """Each directory's name, with as many of its parents as it takes to tell it from the others."""
    parts = [path.resolve().parts for path in directories]
    for path, own in zip(directories, parts, strict=True):
        if parts.count(own) > 1:
            raise ValueError(f"{path} is given twice; name each run once")

    def shortest(own: tuple[str, ...]) -> str:
        depths = range(1, len(own) + 1)
        return next("/".join(own[-n:]) for n in depths if sum(other[-n:] == own[-n:] for other in parts) == 1)

    return [shortest(own) for own in parts]


def read_run(directory: Path, label: str) -> Run:
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"no metrics.jsonl in {directory}; name the --output_dir of a training run")
    notes: list[str] = []
    records = read_lines(path, checked, notes)
    if not records:
        raise ValueError(f"{path} is empty; the run has logged no step")
    steps, repeated = latest([record for record in records if "eval_loss" not in record])
    evaluations, _ = latest([record for record in records if "eval_loss" in record])
    if not steps:
        raise ValueError(f"{path} has no training step yet; wait for the run's first logged step")
    if repeated:
        notes.append(f"{label}: {repeated} steps were logged twice, as a resumed run does; the later ones are drawn")
    about, profile = (read_about(directory / name) for name in ("run.json", "profile/summary-rank0.json"))
    return Run(label, directory, steps, evaluations, about, tuple(notes), profile)


def checked(value: Mapping[str, Any]) -> Record:
    if type(value.get("step")) is not int:
        raise ValueError('is not a record: it should be an object with a whole number "step"')
    for key, number in value.items():
        if number is not None and not isinstance(number, int | float):
            raise ValueError(f'has {number!r} for "{key}"; it should be a number or null')
        if isinstance(number, int) and abs(number) > sys.float_info.max:
            raise ValueError(f'has a number for "{key}" that is too large')
    return value


def latest(records: Sequence[Record]) -> tuple[tuple[Record, ...], int]:
    """The last written record of each step, in the order of the steps, and how many gave way to a later one."""
    by_step = {step: record for record in records if (step := record["step"]) is not None}
    return tuple(by_step[step] for step in sorted(by_step)), len(records) - len(by_step)


def read_about(path: Path) -> Mapping[str, Any]:
    """What was run, or traced; nothing where the run left no such file, since the metrics speak for themselves."""
    if not path.is_file():
        return {}
    try:
        about = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error.msg}, line {error.lineno}); remove it to draw without it"
        ) from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deep; remove it to draw without it") from None
    if not isinstance(about, dict):
        raise ValueError(f"{path} is not a JSON object; remove it to draw without it")
    return about


def described(run: Run) -> str:
    """One line on what was run, from what `run.json` holds of it: the choices made, else the configuration's own."""
    config = run.about.get("config")
    known = {**(config if isinstance(config, dict) else {}), **run.about}
    words = (
        ("model_name_or_path", "{}"),
        ("model_max_length", "{} tokens"),
        ("world_size", "{} rank{s}"),
        ("schedule", "schedule {}"),
        ("kernel", "kernel {}"),
        ("transport", "transport {}"),
    )
    found = [(form, known[key]) for key, form in words if isinstance(known.get(key), str | int)]
    return ", ".join(form.format(value, s="" if value == 1 else "s") for form, value in found)
