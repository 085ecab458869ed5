"""The benchmark of retrieval: what it trains, what it records, and the picture of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from analysis_files import write_lines

from analysis.__main__ import main as draw
from analysis.needle import figure, group_runs, read_runs, remarks, retrieves_from
from benchmarks import needle
from benchmarks.processes import Failed

TWO_GPUS = {"commit": "c", "date": "d", "hardware": {"device": "NVIDIA H100"}, "versions": {"torch": "2"}}


def flags(tmp_path: Path, more: str = "") -> list[str]:
    words = "--length 128 --rows 40 --held_out 4 --hidden_size 64 --steps 4 --eval_steps 2 --nproc_per_node 2"
    return [*words.split(), "--output", str(tmp_path / "n.jsonl"), *more.split()]


def read(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "n.jsonl").read_text().splitlines()]


def run_of(world: int, seed: int, accuracies: list[float], **changes: Any) -> dict[str, Any]:
    points = [{"step": 20 * (i + 1), "accuracy": value, "loss": 1.0} for i, value in enumerate(accuracies)]
    return {
        "benchmark": "needle", "label": f"{world} GPU, seed {seed}", "world": world, "seed": seed, "length": 32768,
        "hidden_size": 256, "layers": 2, "held_out": 100, "chance": 0.01, "points": points,
        "tokens_per_second": 1e6, "skipped": None, **TWO_GPUS,
    } | changes  # fmt: skip


@pytest.mark.slow
def test_two_processes_learn_as_one_does(tmp_path: Path) -> None:
    assert needle.main(flags(tmp_path, "--timeout 120")) == 0
    one, other, both = read(tmp_path)
    assert [(run["world"], run["seed"], run["skipped"]) for run in (one, other, both)] == [
        (1, 1, None),
        (1, 2, None),
        (2, 1, None),
    ]
    losses = [[point["loss"] for point in run["points"]] for run in (one, other, both)]
    assert losses[2] == pytest.approx(losses[0], rel=1e-4) and losses[1] != pytest.approx(losses[0], rel=1e-4)
    assert draw(["needle", str(tmp_path / "n.jsonl")]) == 0 and (tmp_path / "needle.png").is_file()


def test_each_run_has_a_gpu_of_its_own_and_a_failure_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[str, dict[str, str]]] = []

    def fake(words: list[str], timeout: float, log: Path, environment: dict[str, str]) -> None:
        started.append((log.parent.name, environment))
        log.parent.mkdir(parents=True, exist_ok=True)
        lines = ['{"step": 2, "loss": 1.0, "tokens_per_second": 9.0}']
        lines.append('{"step": 2, "eval_loss": 0.5, "eval_perplexity": 1.6, "eval_accuracy": 0.75}')
        (log.parent / "metrics.jsonl").write_text("\n".join(lines))
        if log.parent.name == "2-seed-1":
            raise Failed("no end within 150 s")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(needle, "provenance", lambda commit: TWO_GPUS)
    monkeypatch.setattr(needle, "run", fake)
    assert needle.main(flags(tmp_path)) == 0
    assert sorted(started[:2]) == [
        ("1-seed-1", {"CUDA_VISIBLE_DEVICES": "0"}),
        ("1-seed-2", {"CUDA_VISIBLE_DEVICES": "1"}),
    ]
    assert started[2] == ("2-seed-1", {})
    assert [(run["label"], run["skipped"]) for run in read(tmp_path)] == [
        ("1 GPU, seed 1", None),
        ("1 GPU, seed 2", None),
        ("2 GPUs, seed 1", "no end within 150 s"),
    ]
    assert read(tmp_path)[2]["points"] == [{"step": 2, "accuracy": 0.75, "loss": 0.5}]
    assert "2 GPUs, seed 1: retrieves 75.0% after 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--hidden_size 100", "--hidden_size 100 is not a multiple of 64"),
        ("--eval_steps 9", "--eval_steps 9 exceeds --steps 4"),
        ("--output n", "--output n has no suffix"),
        ("--length 100 --shortest 64", "--length 100 is not --shortest 64 times a power of two"),
        ("--seeds=-1", "--seeds -1 is negative"),
        ("--learning_rate nan", "--learning_rate nan must be a positive number"),
    ],
)
def test_bad_flags_are_refused_in_one_line(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needle, "provenance", lambda commit: TWO_GPUS)
    assert needle.main(flags(tmp_path, words)) == 2
    assert said in capsys.readouterr().err


def test_the_picture_has_a_line_per_run_and_says_how_far_two_gpus_are_outside_the_band(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run_of(1, 1, [0.0, 0.5, 1.0]), run_of(1, 2, [0.1, 0.9, 1.0]), run_of(2, 1, [0.05, 0.45, 0.99])]
    path = write_lines(tmp_path / "n.jsonl", [*runs, run_of(2, 2, [], skipped="out of memory")])
    assert draw(["needle", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "2 GPU, seed 1: up to 5.0 points above or below the 2 runs on one rank, at step 40." in shown
    assert "– 2 GPU, seed 2: out of memory" in shown and f"| 1 GPU, seed 2 | {60:13} |" in shown
    (group,) = group_runs(read_runs(path, []))
    out = figure(group)
    assert out is not None
    (axes,) = out.axes
    assert axes.get_xlabel() == "optimizer steps" and axes.get_ylabel() == "retrieved, % of 100 held-out documents"
    assert [line.get_label() for line in axes.get_lines()] == [*(run["label"] for run in runs), "chance"]


def test_a_run_retrieves_from_the_step_after_which_it_always_does() -> None:
    assert retrieves_from(run_of(1, 1, [0.96, 0.5, 0.95, 1.0])) == 60
    assert retrieves_from(run_of(1, 1, [0.96, 0.5])) is None


def test_a_run_inside_the_band_is_not_outside() -> None:
    runs = [run_of(1, 1, [0.0, 1.0]), run_of(1, 2, [0.5, 1.0]), run_of(2, 1, [0.25, 1.0])]
    (group,) = group_runs(runs)
    assert "2 GPU, seed 1: always between the 2 runs on one rank." in remarks(group)
