"""Experiment trackers: they get what metrics.jsonl gets, and their failures do not end a run that has begun."""

from pathlib import Path
from typing import Any

import accelerate.tracking
import pytest
from programs import alone
from small import words, write_inputs

from lightseq.training.metrics import read_records


class Recorded:
    """Stands for one of accelerate's trackers."""

    made: dict[str, Any]
    fails_in: tuple[str, ...] = ()

    def __init__(self, **arguments: Any) -> None:
        type(self).made = {"arguments": arguments, "records": []}

    def _called(self, name: str) -> None:
        if name in self.fails_in:
            raise RuntimeError(f"no answer to {name}")

    def start(self) -> None:
        self._called("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.made["flags"] = values

    def log(self, values: dict[str, Any], step: int) -> None:
        self._called("log")
        self.made["records"].append({"step": step, **values})

    def finish(self) -> None:
        self._called("finish")
        self.made["finished"] = True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("lightseq.training.setup_checks.version", lambda package: "1")
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", Recorded)
    monkeypatch.setattr(Recorded, "fails_in", ())
    monkeypatch.setenv("WANDB_PROJECT", "books")
    return write_inputs(tmp_path)


FLAGS = "--max_steps 2 --save_strategy no --report_to wandb"


def test_a_tracker_gets_the_flags_and_every_record(folder: Path) -> None:
    end = alone(words(folder, "out", FLAGS))
    assert end.status == 0, end.err
    made = Recorded.made
    assert made["arguments"] == {"run_name": "books", "name": "out", "dir": str(folder / "out")}
    assert made["flags"]["max_steps"] == 2 and made["finished"]
    written = read_records(folder / "out" / "metrics.jsonl")
    assert made["records"] == [{k: v for k, v in record.items() if v is not None} for record in written]


def test_a_tracker_that_fails_later_is_named_once_and_the_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "fails_in", ("log", "finish"))
    end = alone(words(folder, "out", FLAGS))
    assert end.status == 0 and len(read_records(folder / "out" / "metrics.jsonl")) == 2
    said = "warning: --report_to wandb failed (RuntimeError: no answer to log); metrics.jsonl has every record\n"
    assert end.err.count("--report_to") == 1 and said in end.err


def test_a_tracker_that_cannot_start_is_refused_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "fails_in", ("start",))
    end = alone(words(folder, "out", FLAGS))
    said = "error: --report_to wandb cannot start (RuntimeError: no answer to start); set it up, or leave it out\n"
    assert end.status == 2 and end.err.endswith(said)
    assert not (folder / "out" / "run.json").exists()
