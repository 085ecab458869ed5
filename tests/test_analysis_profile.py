"""Tables of the profiled steps of a run."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from analysis_files import copy, event, two_steps
from programs import refusal, shown

from analysis.__main__ import main


def write(directory: Path, events: list[dict[str, Any]]) -> Path:
    path = directory / "profile" / "rank0.json.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_the_table_accounts_for_the_time(tmp_path: Path) -> None:
    trace = write(tmp_path, two_steps())
    out = shown(main, "profile", trace)
    assert "9.0 ms per step, mean of 2" in out
    row = next(line.split() for line in out.splitlines() if "collectives" in line)
    assert row == ["collectives", "2.0", "0.0", "2.0", "22.2", "1.0"]


def test_peak_memory_is_shown_by_purpose(tmp_path: Path) -> None:
    path, gib = write(tmp_path, two_steps()), 2**30
    parts = {"optimizer": 2 * gib, "stored_activations": 5 * gib}
    memory = {"parts": parts, "peak": 7 * gib, "own": 8 * gib, "all": 9 * gib}
    path.with_name("summary-rank0.json").write_text(json.dumps({"memory": memory}))
    said = shown(main, "profile", tmp_path).partition("GPU memory, GiB")[2]
    assert re.findall(r"([a-z][a-z ]+[a-z])  +(\d\.\d\d)", said) == [
        ("stored activations", "5.00"), ("optimizer", "2.00"), ("peak of tensors", "7.00"),
        ("held by this process", "8.00"), ("held by all processes", "9.00"),
    ]  # fmt: skip


def test_a_trace_of_a_cpu_is_told_by_phase(tmp_path: Path) -> None:
    """Each step: 6 ms of forward, 4 ms of update; what gloo notes does not count."""
    events = []
    for i, begin in enumerate((0.0, 20.0)):
        events += [
            event(f"step {i + 4}", begin, 11, "user_annotation"),
            event("forward", begin, 6, "user_annotation"),
            event("gloo:recv", begin + 1, 9, "user_annotation"),
            event("aten::mm", begin + 4.5, 1, "cpu_op"),
            event("update", begin + 6, 4, "user_annotation"),
        ]
    write(tmp_path, [{"tid": 1, **each} for each in events])
    out = shown(main, "profile", tmp_path)
    assert "11.0 ms per step, mean of 2" in out and "hidden" not in out
    assert ["host", "6.0", "4.0", "10.0", "90.9"] in [s.split() for s in out.splitlines()]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d, "does not exist; train with --profile_steps"),
        (lambda d: write(d, [event("aten::mm", 0, 1, "cpu_op")]), "the trace has no training step"),
        (lambda d: write(d, two_steps()).write_bytes(b"\x1f\x8bcut"), "is not a complete trace"),
    ],
)
def test_a_trace_that_cannot_be_used_is_one_clear_line(make: Any, words: str, tmp_path: Path) -> None:
    make(tmp_path)
    assert words in refusal(main, "profile", tmp_path)


def test_large_movements_have_rates(tmp_path: Path) -> None:
    write(tmp_path, [*two_steps(), *[copy("PtoP", 400 * 2**20, 1.0), copy("HtoD", 64, 1.0)] * 2])
    large, small = [line.split() for line in shown(main, "profile", tmp_path).splitlines() if "copies" in line]
    assert large[-5:] == ["1", "400", "400", "419", "419"] and small[-3:] == ["1", "0.00", "0.00"]
