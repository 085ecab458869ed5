"""Knows what the live view of a run must show, before, while and after it trains."""

import io
import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_files import GIB, about, record, write_run
from rich.console import Console

from analysis.__main__ import main
from analysis.progress import Follower, Progress, read_progress
from analysis.watch import BLOCKS, duration, frame, sparkline


def looked_at(directory: Path, later: float = 0.0) -> Progress:
    """The run as it is `later` seconds after it last wrote."""
    newest = max((path.stat().st_mtime for path in directory.glob("*.json*")), default=0.0)
    return read_progress(directory, Follower(directory / "metrics.jsonl"), newest + later)


def seen(progress: Progress, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(frame(progress))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def half_way(tmp_path: Path, gpu: bool = True, **facts: Any) -> Path:
    return write_run(tmp_path / "run", [record(step, gpu) for step in range(1, 21)], about(gpu, **facts))


@pytest.mark.parametrize("once", [["--once"], []])
@pytest.mark.parametrize(
    ("name", "said"), [("nowhere", "is no directory"), ("a-file", "is no directory"), ("empty", "holds no run")]
)
def test_where_there_is_no_run_a_pipe_gets_one_line_and_exit_2(
    tmp_path: Path, name: str, said: str, once: list[str], capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").write_text("")
    assert main(["watch", str(tmp_path / name), *once]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"analysis: error: {tmp_path / name} {said}") and err.count("\n") == 1


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.watch.Console", lambda **_: Console(highlight=False, force_terminal=True))


def test_a_terminal_waits_for_no_directory_that_is_not_there_and_prints_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert main(["watch", str(tmp_path), "--once"]) == 2


def test_a_pipe_ends_with_a_run_whose_process_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, child = half_way(tmp_path), subprocess.Popen(["true"])
    child.wait()
    (run / "lock").write_text(f"process {child.pid} on {socket.gethostname()}\n")
    long_ago = time.time() - 60
    for name in ("metrics.jsonl", "run.json"):
        os.utime(run / name, (long_ago, long_ago))
    assert main(["watch", str(run)]) == 1
    assert "The run has ended" in capsys.readouterr().out


def test_a_run_without_a_step_shows_what_it_is_and_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(about()))
    text = seen(looked_at(tmp_path, later=90))
    assert "tiny-llama3" in text and "2 (1 data × 2 sequence)" in text and "4K tokens" in text
    assert "Waiting for the first step since 1 min 30 s" in text


def test_a_frame_holds_the_last_numbers_and_the_time_left_in_80_columns(tmp_path: Path) -> None:
    run = half_way(tmp_path)
    (run / "checkpoint-10").mkdir()
    (run / "checkpoint-20.partial").mkdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "eval_loss": 2.5}) + "\n")
    text = seen(looked_at(run))
    assert max(map(len, text.splitlines())) <= 80
    for word in (
        *("step 20/40", "50 %", "10 s left", "5.8000", "8,192", "1.25", "0.001", "40.0 %", "3.00 GiB"),
        *("zigzag", "fa4", "gloo", "attention", "evaluation  loss 2.5000 at step 20", "checkpoint-10"),
        *("checkpoint-20 is being written", "NVIDIA H200", "0.5 s"),
    ):
        assert word in text.replace("\n", ""), word  # a long path folds


def test_without_a_gpu_memory_is_the_hosts_and_arithmetic_takes_the_place_of_mfu(tmp_path: Path) -> None:
    text = seen(looked_at(half_way(tmp_path, gpu=False)))
    assert "2.00 GiB" in text and "of a process" in text
    assert "model TFLOP/s" in text and "MFU" not in text


def test_a_run_that_logs_nothing_for_long_is_said_to_be_quiet(tmp_path: Path) -> None:
    run = half_way(tmp_path)
    assert "Last logged 5.0 s ago." in seen(looked_at(run, later=5))
    said = " ".join(seen(looked_at(run, later=300)).split())
    assert "Nothing was logged for 5 min, where 0.5 s is usual" in said


def test_a_run_whose_process_is_gone_is_said_to_have_ended(tmp_path: Path) -> None:
    run, child = half_way(tmp_path), subprocess.Popen(["true"])
    child.wait()
    (run / "lock").write_text(f"process {child.pid} on {socket.gethostname()}\n1 a\n")
    said = " ".join(seen(looked_at(run, later=5)).split())
    assert f"The run has ended (process {child.pid} on" in said and "--resume_from_checkpoint auto" in said
    for alive in (f"process {os.getpid()} on {socket.gethostname()}\n", f"process {child.pid} on elsewhere\n", ""):
        (run / "lock").write_text(alive)
        assert "Last logged 5.0 s ago." in seen(looked_at(run, later=5)), alive


def test_logging_now_and_then_is_not_being_quiet(tmp_path: Path) -> None:
    run = half_way(tmp_path, config={"logging_steps": 200})
    assert not looked_at(run, later=300).quiet
    assert looked_at(run, later=600).quiet


def test_the_last_step_ends_the_view(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = write_run(tmp_path / "run", [record(step) for step in range(1, 41)], about())
    assert not looked_at(run, later=9999).quiet
    assert main(["watch", str(run)]) == 0
    assert "The last step is done." in capsys.readouterr().out


def test_a_run_is_followed_from_before_it_begins_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    on_a_terminal(monkeypatch)

    def train() -> None:
        for last in (None, 1, 39, 40):
            time.sleep(0.15)
            write_run(tmp_path / "run", [record(step) for step in range(1, 1 + (last or 0))], about())

    thread = threading.Thread(target=train)
    thread.start()
    assert main(["watch", str(tmp_path / "run"), "--every", "0.05"]) == 0
    thread.join()
    out = capsys.readouterr().out
    assert "Waiting: " in out and "step 40/40" in out


def test_ctrl_c_ends_the_view_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("analysis.watch.time.sleep", interrupt)
    assert main(["watch", str(half_way(tmp_path))]) == 0
    out, err = capsys.readouterr()
    assert "step 20/40" in out and not err


def test_a_line_that_is_still_being_written_waits_for_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record(1)], tail='{"step": 2, "lo')
    follower = Follower(run / "metrics.jsonl")
    assert [r["step"] for r in follower.records()] == [1]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 5.0}\n')
    assert [r["step"] for r in follower.records()] == [1, 2]


def test_a_file_written_anew_by_a_resumed_run_is_read_anew(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [record(step) for step in range(1, 9)])
    follower = Follower(run / "metrics.jsonl")
    assert len(follower.records()) == 8
    write_run(tmp_path / "run", [record(step) for step in range(1, 5)])
    assert len(follower.records()) == 4
    # Longer than before by now, so that reading goes on in the middle of a line.
    write_run(tmp_path / "run", [record(step, loss=5.123456789) for step in range(1, 7)])
    assert [r["step"] for r in read_progress(run, follower, 0.0).steps] == [1, 2, 3, 4, 5, 6]


def test_a_file_of_something_else_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text("hello\n")
    assert main(["watch", str(tmp_path), "--once"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds a line that is no record" in line


def test_a_garbled_line_is_counted_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = write_run(tmp_path / "run", [record(1)], tail="garbled\n")
    follower = Follower(run / "metrics.jsonl")
    assert [r["step"] for r in follower.records()] == [1]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[2]\n{"step": 3}\n')
    assert [r["step"] for r in follower.records()] == [1, 3] and follower.left_out == 2
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4}\n')
    assert [r["step"] for r in follower.records()] == [1, 3, 4] and follower.left_out == 2
    assert main(["watch", str(run), "--once"]) == 0
    assert "2 lines of metrics.jsonl are no records and left out" in capsys.readouterr().out


def test_a_sparkline_goes_from_the_lowest_to_the_highest_and_is_never_wider_than_asked() -> None:
    assert sparkline(np.arange(8.0), 8) == BLOCKS
    assert len(sparkline(np.arange(1000.0), 30)) == 30
    assert sparkline(np.full(3, 2.0)) == BLOCKS[4] * 3
    assert sparkline(np.array([])) == ""


def test_durations_have_two_units_at_most() -> None:
    said = [duration(s) for s in (0.44, 59, 61, 3600, 3600 * 26 + 120, float("nan"))]
    assert said == ["0.4 s", "59 s", "1 min 1 s", "1 h", "1 d 2 h", "unknown time"]


def test_numbers_that_are_missing_are_dashes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 3, "loss": None, "host_rss_bytes": GIB}])
    text = seen(looked_at(run))
    assert "step 3" in text and "loss" in text and "-" in text
