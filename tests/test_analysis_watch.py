"""The live view of a run before, while and after it trains."""

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

from analysis import watch
from analysis.__main__ import main
from analysis.watch import BLOCKS, duration, sparkline


def half_way(tmp_path: Path, gpu: bool = True, **facts: Any) -> Path:
    return write_run(tmp_path / "run", [record(step, gpu) for step in range(1, 21)], about(gpu, **facts))


def set_age(run: Path, seconds: float) -> None:
    """Lets the run have written its files that long ago."""
    for path in run.glob("*.json*"):
        os.utime(path, (time.time() - seconds,) * 2)


def view(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what `watch --once` prints, in one line."""
    assert main(["watch", str(run), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return " ".join(" ".join(lines).split())


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.watch.Console", lambda **_: Console(highlight=False, force_terminal=True))


def ended_process() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


@pytest.mark.parametrize("once", [["--once"], []])
@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "is not a directory"), ("a-file", "is not a directory"), ("empty", "has no run")]
)
def test_without_a_run_a_pipe_gets_one_line_and_exit_2(
    tmp_path: Path, name: str, message: str, once: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").write_text("")
    assert main(["watch", str(tmp_path / name), *once]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"analysis: error: {tmp_path / name} {message}") and err.count("\n") == 1


def test_a_terminal_waits_only_in_a_directory_and_without_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert main(["watch", str(tmp_path), "--once"]) == 2


def test_a_run_without_a_step_shows_its_settings_and_that_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(about()))
    set_age(tmp_path, 90)
    text = view(tmp_path, capsys)
    assert "tiny-llama3" in text and "2 (1 data × 2 sequence)" in text and "4K tokens" in text
    assert "Waiting 1 min 30 s for the first step" in text


def test_a_frame_holds_the_last_numbers_and_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = half_way(Path())
    (run / "checkpoint-10").mkdir()
    (run / "checkpoint-20.partial").mkdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "eval_loss": 2.5}) + "\n")
    text = view(run, capsys)
    for word in (
        *("step 20/40", "50 %", "10 s left", "5.8000", "8,192", "1.25", "0.001", "40.0 %", "3.00 GiB"),
        *("zigzag", "fa4", "gloo", "attention", "evaluation loss 2.5000 at step 20", "run/checkpoint-10"),
        *("checkpoint-20 is being written", "NVIDIA H200", "0.5 s"),
    ):
        assert word in text, word


def test_without_a_gpu_memory_is_the_hosts_and_tflops_take_the_place_of_mfu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = view(half_way(tmp_path, gpu=False), capsys)
    assert "2.00 GiB per process" in text and "model TFLOP/s" in text and "MFU" not in text


def test_missing_numbers_are_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = view(write_run(tmp_path / "run", [{"step": 3, "loss": None, "host_rss_bytes": GIB}]), capsys)
    assert "step 3 total steps unknown" in text and "loss -" in text


@pytest.mark.parametrize(
    ("every", "age", "message"),
    [
        (1, 5, "Last logged 5.0 s ago."),
        (1, 300, "Nothing logged for 5 min (usual: 0.5 s)"),
        (200, 300, "Last logged 5 min ago."),
        (200, 600, "Nothing logged for 10 min (usual: 1 min 40 s)"),
    ],
)
def test_a_run_is_quiet_when_nothing_came_for_much_longer_than_usual(
    every: int, age: float, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = half_way(tmp_path, config={"logging_steps": every})
    set_age(run, age)
    assert message in view(run, capsys)


def test_a_run_whose_process_is_gone_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, host, gone = half_way(tmp_path), socket.gethostname(), ended_process()
    (run / "lock").write_text(f"process {gone} on {host}\n1 a\n")
    text = view(run, capsys)
    assert f"The run has ended (process {gone} on" in text and "--resume_from_checkpoint auto" in text
    for alive in (f"process {os.getpid()} on {host}\n", f"process {gone} on elsewhere\n", ""):
        (run / "lock").write_text(alive)
        assert "Last logged" in view(run, capsys), alive


def test_a_pipe_ends_with_a_run_whose_process_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = half_way(tmp_path)
    (run / "lock").write_text(f"process {ended_process()} on {socket.gethostname()}\n")
    set_age(run, 60)
    assert main(["watch", str(run)]) == 1
    assert "The run has ended" in capsys.readouterr().out


def test_the_last_step_ends_the_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [record(step) for step in range(1, 41)], about())
    set_age(run, 9999)
    assert main(["watch", str(run)]) == 0
    assert "Training is complete." in capsys.readouterr().out


def test_a_run_is_followed_from_before_it_begins_through_a_resume_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    on_a_terminal(monkeypatch)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)

    def train() -> None:
        for last in (0, 1, 39, 20, 40):
            time.sleep(0.15)
            write_run(
                run, [record(step) for step in range(1, 1 + last)], about(), tail='{"step": 9' if last < 40 else ""
            )

    thread = threading.Thread(target=train)
    thread.start()
    assert main(["watch", str(run)]) == 0
    thread.join()
    out = capsys.readouterr().out
    assert all(words in out for words in ("Waiting: ", "step 1/40", "step 20/40", "step 40/40"))


def test_ctrl_c_ends_the_view_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("analysis.watch.time.sleep", interrupt)
    assert main(["watch", str(half_way(tmp_path))]) == 0
    out, err = capsys.readouterr()
    assert "step 20/40" in out and not err


def test_a_file_of_something_else_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("hello\n")
    assert main(["watch", str(tmp_path), "--once"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has a line that is not a record" in line


def test_garbled_lines_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [record(1)], tail='garbled\n[2]\n{"step": 4}\n')
    assert "step 4" in view(run, capsys)


def test_a_sparkline_goes_from_the_lowest_to_the_highest_and_is_never_wider_than_asked() -> None:
    assert sparkline(np.arange(8.0), 8) == BLOCKS
    assert len(sparkline(np.arange(1000.0), 30)) == 30
    assert sparkline(np.full(3, 2.0)) == BLOCKS[4] * 3
    assert sparkline(np.array([])) == ""


def test_durations_have_two_units_at_most() -> None:
    said = [duration(s) for s in (0.44, 59, 61, 3600, 3600 * 26 + 120, float("nan"))]
    assert said == ["0.4 s", "59 s", "1 min 1 s", "1 h", "1 d 2 h", "unknown time"]
