"""Knows what the comparison of two runs must find, and what it must warn of."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_files import GIB, about, record, write_run

from analysis.__main__ import main, names_command
from analysis.compare import differences, figure, gap_of, means, sentence, warnings
from analysis.flags import named
from analysis.runs import read_runs

STEPS = range(1, 41)


def pair(tmp_path: Path, changes: dict[int, dict[str, Any]] | None = None, **other: Any) -> list[Any]:
    """Two runs of forty steps; of the second, some steps differ, and its run.json."""
    first = write_run(tmp_path / "a", [record(step) for step in STEPS], about())
    records = [record(step, **(changes or {}).get(step, {})) for step in other.pop("steps", STEPS)]
    return read_runs([first, write_run(tmp_path / "b", records, about(**other))], [])


def test_the_largest_difference_of_the_loss_is_found_with_its_step_and_sign(tmp_path: Path) -> None:
    gap = gap_of(tuple(pair(tmp_path, {20: {"loss": 5.8 - 0.01}, 30: {"loss": 5.7 + 0.002}})))
    assert (int(gap.steps[gap.worst]), gap.difference[gap.worst]) == (20, pytest.approx(-0.01))
    assert sentence(gap).startswith("Largest difference of the loss: -0.01 (B less A) at step 20; ")


def test_equal_losses_are_said_to_be_equal(tmp_path: Path) -> None:
    assert sentence(gap_of(tuple(pair(tmp_path)))) == "The losses are equal to the last bit at all 40 steps."


def test_means_leave_the_warm_up_out_and_stand_beside_their_ratio(tmp_path: Path) -> None:
    half = {step: {"tokens_per_second": 4096.0, "host_rss_bytes": GIB} for step in STEPS}
    rows = {row.name: row.cells for row in means(tuple(pair(tmp_path, half)))}
    assert rows == {
        "tokens per second": ("8,192.0", "4,096.0", "0.500"),
        "training tokens": ("97.50 %", "97.50 %", "1.000"),
        "model TFLOP/s": ("0.5", "0.5", "1.000"),
        "peak memory, host": ("2.00 GiB", "1.00 GiB", "0.500"),
    }


def test_what_one_run_alone_knows_has_no_ratio(tmp_path: Path) -> None:
    known = {step: {"mfu": 0.4} for step in STEPS}
    rows = {row.name: row.cells for row in means(tuple(pair(tmp_path, known)))}
    assert rows["MFU"] == ("-", "40.00 %", "-")


def test_another_commit_is_among_what_differs(tmp_path: Path) -> None:
    assert differences(tuple(pair(tmp_path / "new", commit="89ef"))) == ["differs  commit: 0123abcd and 89ef"]
    assert not differences(tuple(pair(tmp_path / "old", commit=None)))  # of a version that noted none


def test_one_flag_that_differs_is_no_reason_to_warn(tmp_path: Path) -> None:
    assert warnings(tuple(pair(tmp_path, config={"fsdp": "", "output_dir": "elsewhere", "save_steps": 5}))) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": {"fsdp": "", "remat": "full"}}, "more than one flag differs (fsdp, remat)"),
        ({"config": {"fsdp": ""}, "world_size": 4}, "more than one flag differs (fsdp, ranks)"),
        ({"config": {"seed": 1}}, "the losses may take different courses (seed: 42 and 1)"),
        ({"versions": {"python": "3.12.3", "torch": "2.12.0"}}, "the machines differ (torch: 2.11.0 and 2.12.0)"),
        ({"steps": range(1, 39)}, "A logged 2 steps that B did not (of 39 to 40)"),
        ({"changes": {40: {"valid_tokens": 8192}}}, "a step has 3,994 targets in A and 8,192 in B"),
        ({"changes": {7: {"loss": math.nan}}}, "B's loss is no number at 1 steps"),
    ],
)
def test_what_makes_a_comparison_doubtful_is_warned_of(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (warning,) = warnings(tuple(pair(tmp_path, **changes)))
    assert said in warning


def test_a_missing_run_json_is_the_one_thing_warned_of(tmp_path: Path) -> None:
    runs = pair(tmp_path)
    (tmp_path / "b" / "run.json").unlink()
    (warning,) = warnings(tuple(read_runs([run.directory for run in runs], [])))
    assert "a run.json is missing" in warning


def test_runs_without_a_common_step_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pair(tmp_path, steps=range(50, 60))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no step has a known loss in both runs (they logged steps 1 to 40 and 50 to 59)" in line


def test_the_figure_has_losses_their_difference_and_throughput(tmp_path: Path) -> None:
    runs = tuple(pair(tmp_path, {20: {"loss": 5.81}}))
    losses, apart, speed = figure(runs, gap_of(runs)).axes
    assert [len(axes.lines) for axes in (losses, speed)] == [2, 2]
    assert np.nanmax(apart.lines[1].get_ydata()) == pytest.approx(0.01)
    assert apart.get_title(loc="right") == "largest +0.01 at step 20"


def test_the_legend_names_both_runs_whole_above_the_axes(tmp_path: Path) -> None:
    names = ("scaling_factor-1_fused_attention-false_fsdp-full_shard", f"b_{'and_so_on_' * 12}end")
    directories = [write_run(tmp_path / name, [record(step) for step in STEPS], about()) for name in names]
    runs = tuple(read_runs(directories, []))
    out = figure(runs, gap_of(runs))
    out.draw_without_rendering()
    (legend,) = out.legends
    shown = ["".join(text.get_text().split()) for text in legend.get_texts()]
    assert shown == [f"{letter}{name}" for letter, name in zip("AB", names, strict=True)]
    box = legend.get_window_extent()
    assert box.x1 <= out.bbox.x1 and box.y0 >= max(axes.bbox.y1 for axes in out.axes)


def test_the_command_prints_both_runs_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pair(tmp_path, {20: {"loss": 5.81}}, config={"fsdp": "", "seed": 1})
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "c")]) == 0
    out, err = capsys.readouterr()
    assert "differs  fsdp: full_shard and off (DDP)" in out
    assert "at step 20" in out
    assert err.count("analysis: warning: ") == 2
    assert (tmp_path / "c" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_in_a_directory_called_compare_hides_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "compare", [record(1)])
    assert not names_command(["compare"], "compare")
    assert names_command(["compare", "a", "b"], "compare")


def test_the_flags_a_command_names_are_found_in_every_spelling() -> None:
    command = "llama3/train.py --max_steps=40 --learning-rate 1e-3 --bf16 --data_path 'a --b'"
    assert named({"command": command}) == {"max_steps", "learning_rate", "bf16", "data_path"}
    assert named({"command": "train.py --bf16 'unfinished"}) == {"bf16"}
    assert named({}) == set()
