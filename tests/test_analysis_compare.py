"""The comparison of two runs: numbers, warnings and the figure."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_files import GIB, about, record, write_run
from programs import refusal

from analysis.__main__ import main
from analysis.compare import figure, loss_difference
from analysis.runs import Run, read_runs

STEPS = range(1, 41)


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the picture, which takes most of the time, but for the test that looks at it."""
    if "drawn" not in request.node.name:
        monkeypatch.setattr("analysis.compare.save", lambda _figure, directory, name: directory / f"{name}.png")


def pair(tmp_path: Path, changes: dict[int, dict[str, Any]] | None = None, **other: Any) -> tuple[Run, Run]:
    """Two runs of forty steps; some steps of the second differ, and its run.json."""
    first = write_run(tmp_path / "a", [record(step) for step in STEPS], about())
    records = [record(step, **(changes or {}).get(step, {})) for step in other.pop("steps", STEPS)]
    facts = other.pop("facts") if "facts" in other else about(**other)
    one, two = read_runs([first, write_run(tmp_path / "b", records, facts)], [])
    return one, two


def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """Returns what the command prints of both runs, and its warnings."""
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "c")]) == 0
    out, err = capsys.readouterr()
    return out, [line.removeprefix("analysis: warning: ") for line in err.splitlines()]


def test_both_runs_are_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair(tmp_path, {20: {"loss": 5.8 - 0.01}, 30: {"loss": 5.7 + 0.002}}, config={"fsdp": ""}, commit="89ef")
    out, warnings = compared(tmp_path, capsys)
    assert "differs  fsdp: full_shard and off (DDP)\ndiffers  commit: 0123abcd and 89ef\n" in out
    assert "Largest loss difference: -0.01 (B − A) at step 20; " in out and not warnings
    assert (tmp_path / "c" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_equal_losses_are_said_to_be_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair(tmp_path, commit=None)  # which older versions did not note
    out, _ = compared(tmp_path, capsys)
    assert "The losses are equal to the last bit at all 40 steps." in out and "differs" not in out


def test_means_leave_the_warm_up_out_and_stand_beside_their_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = {step: {"tokens_per_second": 4096.0, "host_rss_bytes": GIB, "mfu": 0.4} for step in STEPS}
    pair(tmp_path, half)
    rows = [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in compared(tmp_path, capsys)[0].splitlines()
    ]
    assert ["tokens per second", "8,192.0", "4,096.0", "0.500"] in rows
    assert ["tokens with a target", "97.50 %", "97.50 %", "1.000"] in rows
    assert ["MFU", "-", "40.00 %", "-"] in rows
    assert ["model TFLOP/s per GPU", "0.5", "0.5", "1.000"] in rows
    assert ["peak memory, host", "2.00 GiB", "1.00 GiB", "0.500"] in rows


def test_one_flag_that_differs_is_no_reason_to_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair(tmp_path, config={"fsdp": "", "output_dir": "elsewhere", "save_steps": 5})
    assert compared(tmp_path, capsys)[1] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"fsdp": "", "remat": "full"}}, "several flags differ (fsdp, remat)"),
        ({"config": {"fsdp": ""}, "world_size": 4}, "several flags differ (fsdp, ranks)"),
        ({"config": {"seed": 1}}, "flags that change the losses differ (seed: 42 and 1)"),
        ({"versions": {"python": "3.12.3", "torch": "2.12.0"}}, "the machines differ (torch: 2.11.0 and 2.12.0)"),
        ({"hardware": {"device": "H100"}}, "the machines differ (device: cpu and H100)"),
        ({"steps": range(1, 39)}, "A logged 2 steps that B did not (in 39 to 40)"),
        ({"changes": {40: {"valid_tokens": 8192}}}, "a step has 3,994 targets in A and 8,192 in B"),
        ({"changes": {7: {"loss": math.nan}}}, "B's loss is not finite at 1 steps"),
        ({"facts": None}, "a run.json is missing"),
    ],
)
def test_a_doubtful_comparison_is_warned_of(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair(tmp_path, **changes)
    (warning,) = compared(tmp_path, capsys)[1]
    assert message in warning


def test_runs_without_a_common_step_are_refused(tmp_path: Path) -> None:
    pair(tmp_path, steps=range(50, 60))
    line = refusal(main, "compare", tmp_path / "a", tmp_path / "b")
    assert "no step has a known loss in both runs (they logged steps 1 to 40 and 50 to 59)" in line


def test_the_figure_has_losses_their_difference_and_throughput(tmp_path: Path) -> None:
    runs = pair(tmp_path, {20: {"loss": 5.81}})
    losses, apart, speed = figure(runs, loss_difference(runs)).axes
    assert [len(axes.lines) for axes in (losses, speed)] == [2, 2]
    assert np.nanmax(apart.lines[1].get_ydata()) == pytest.approx(0.01)
    assert apart.get_title(loc="right") == "largest +0.01 at step 20"


def test_equal_losses_need_no_panel_for_their_difference(tmp_path: Path) -> None:
    runs = pair(tmp_path)
    losses, _ = figure(runs, loss_difference(runs)).axes
    assert losses.get_title(loc="right") == "The losses are equal to the last bit at all 40 steps"
    assert [line.get_linestyle() for line in losses.lines] == ["-", "--"], "A shows through B"


def test_the_legend_names_both_runs_whole_below_the_axes(tmp_path: Path) -> None:
    names = ("scaling_factor-1_fused_attention-false_fsdp-full_shard", f"b_{'and_so_on_' * 12}end")
    directories = [write_run(tmp_path / name, [record(step) for step in STEPS], about()) for name in names]
    first, second = read_runs(directories, [])
    out = figure((first, second), loss_difference((first, second)))
    out.draw_without_rendering()
    (legend,) = out.legends
    shown = ["".join(text.get_text().split()) for text in legend.get_texts()]
    assert shown == [f"{letter}{name}" for letter, name in zip("AB", names, strict=True)]
    box = legend.get_window_extent()
    assert box.x1 <= out.bbox.x1 and box.y1 <= min(axes.bbox.y0 for axes in out.axes)
