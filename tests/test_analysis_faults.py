"""Records of `make faults` as a table."""

import json
from pathlib import Path

import pytest

from analysis.__main__ import main

RECORDS = [
    {"kind": "header", "commit": "abc"},
    {"kind": "fault", "fault": "SIGKILL", "saving": True, "steps_lost": 4},
    {"kind": "fault", "fault": "SIGKILL", "saving": False, "steps_lost": 1},
    {"kind": "survived", "fault": "SIGKILL", "count": 2},
    {"kind": "skipped", "fault": "network cut", "why": "no root"},
    {"kind": "fault", "fault": "flags", "count": 500, "statuses": {"status 2": 400, "status 0": 100}},
    {"kind": "fault", "fault": "files", "count": 7, "taken": 2, "refused": 5},
    {"kind": "failed", "fault": "files", "why": "a hang\nthere"},
]


def test_every_fault_is_a_row_with_how_often_and_what_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "faults.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    assert main(["faults", str(tmp_path / "faults.jsonl")]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[2:] == [
        ["SIGKILL", "2", "2", "4", "1 during a save"],
        ["network cut", "0", "-", "-", "not tried: no root"],
        ["flags", "500", "500", "-", "400 refused, 100 run, 0 ended by an error of ours"],
        ["files", "8", "7", "-", "5 refused, 2 taken; FAILED: a hang there"],
    ]


def test_another_file_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert main(["faults", str(tmp_path / "other.jsonl")]) == 2
    assert "other.jsonl line 1 is no record of a fault" in capsys.readouterr().err
