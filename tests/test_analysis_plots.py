"""Figures that a YAML file asks for: which runs are drawn, what a line is, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_files import about, record, write_run
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.__main__ import main
from analysis.metrics import METRICS
from analysis.plots import figure, find_runs
from analysis.plots_file import read_plots
from analysis.runs import median, read_run, short_commit

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "analysis" / "configs").glob("*.yaml"))
LENGTHS = (4096, 8192, 65536)
AT_8K = "where: {length: 8192}"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Runs of three lengths by two kernels, each with its own speed."""
    for i, kernel in enumerate(("fa4", "cudnn")):
        for length in LENGTHS:
            speed = {"tokens_per_second": float(length * (i + 1))}
            records = [record(step, gpu=True, **speed) for step in range(1, 13)]
            info = about(gpu=True, config={"model_max_length": length}, kernel=kernel, total_steps=12)
            write_run(tmp_path / "runs" / f"{kernel}-{length}", records, info)
    return tmp_path


def write_config(directory: Path, spec: str) -> Path:
    path = directory / "plots.yaml"
    path.write_text(f"runs: {directory / 'runs'}\nfigures:\n  one: {spec}\n")
    return path


def draw(results: Path, spec: str) -> Figure:
    """The figure of the runs below `results/runs`."""
    return figure(read_plots(write_config(results, spec)).plots[0], find_runs([results / "runs"], []))


def axes_of(results: Path, spec: str) -> Axes:
    (axes,) = draw(results, spec).axes
    return axes


def names_of(drawn: Figure) -> list[str]:
    """The names beside the lines, from the top down, or of the bars."""
    (axes,) = drawn.axes
    beside = sorted((text for text in axes.texts if text.get_text()), key=lambda text: -text.get_position()[1])
    return [text.get_text() for text in (axes.get_yticklabels() if axes.patches else beside)]


def numbered_lines(axes: Axes) -> list[list[list[float]]]:
    """The x and y of each line, without error bars."""
    return [
        [list(x) for x in line.get_data()]
        for line in axes.get_lines()
        if line.get_label()[:1] != "_" or len(line.get_xdata()) > 1
    ]


def plots(results: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    """Status, names of the pictures, and notes of the command on the file that was written last."""
    status = main(["plots", "--config", str(results / "plots.yaml"), "--output", str(results), *words])
    out, err = capsys.readouterr()
    return status, [Path(line).name for line in out.splitlines()], err


# ---- points, lines and bars -----------------------------------------------------------------------------------------


def test_a_line_for_every_combination_of_the_series(results: Path) -> None:
    drawn = draw(results, "{metric: speed, x: length, series: [kernel, schedule]}")
    assert names_of(drawn) == ["kernel cudnn", "kernel fa4"]
    (axes,) = drawn.axes
    assert axes.get_xscale() == "log" and [t.get_text() for t in axes.get_xticklabels()] == ["4K", "8K", "64K"]
    for factor in (1.0, 2.0):
        assert [[*LENGTHS], [factor * n for n in LENGTHS]] in numbered_lines(axes)


@pytest.mark.parametrize(
    ("metric", "value"),
    [("memory", 3.0), ("mfu", 40.0), ("time", 10 + 11 * 0.5), ("grad_norm", 1.25)],  # the first step takes ten seconds
)
def test_bars_over_named_settings_show_the_value_of_each_run(results: Path, metric: str, value: float) -> None:
    axes = axes_of(results, f"{{metric: {metric}, x: kernel, {AT_8K}}}")
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([value, value])
    assert [t.get_text() for t in axes.get_yticklabels()] == ["kernel cudnn", "kernel fa4"]


def test_curves_over_steps_have_a_point_per_step(results: Path) -> None:
    axes = axes_of(results, "{metric: loss, x: step, series: kernel, where: {length: 4096}}")
    assert [len(line.get_xdata()) for line in axes.get_lines()] == [12, 12]


def test_weak_scaling_is_a_line_of_the_same_tokens_on_every_rank(tmp_path: Path) -> None:
    for length in (32768, 65536, 131072):
        for ranks in (1, 2, 4):
            info = about(config={"model_max_length": length}, world_size=ranks, sequence_ranks=ranks)
            records = [record(step, tokens_per_second=float(length + ranks)) for step in range(1, 13)]
            write_run(tmp_path / "runs" / f"{length}-{ranks}", records, info)
    axes = axes_of(tmp_path, "{metric: speed, x: ranks, series: [model], where: {tokens_per_rank: 32768}}")
    assert [[1, 2, 4], [32769.0, 65538.0, 131076.0]] in numbered_lines(axes)
    strong = draw(tmp_path, "{metric: speed, x: ranks, series: [length]}")
    assert names_of(strong) == ["128K tokens", "64K tokens", "32K tokens"]


@pytest.mark.parametrize(
    ("logged", "info", "steps"),
    [
        (range(1010, 1050, 10), {"first_step": 1006}, 35),
        (range(1010, 1050, 10), {}, 40),  # an older run.json
        (range(10, 50, 10), {"first_step": 31}, 40),  # it went on in its own directory
        (range(3, 4), {"first_step": 1}, 3),  # it ended before its first tenth step
        (range(3, 4), {}, 3),
    ],
)
def test_training_time_counts_the_steps_that_a_run_made_itself(
    tmp_path: Path, logged: range, info: dict[str, int], steps: int
) -> None:
    records = [record(step, step_seconds=0.5) for step in logged]
    info = {**info, "total_steps": logged[-1]}
    config = {"logging_steps": 10, "profile_steps": [900, 901]}
    run = read_run(write_run(tmp_path, records, about(config=config, **info)), "run")
    assert METRICS["time"].point(run, "").value == 0.5 * steps
    assert np.isfinite(run.unprofiled("step_seconds")).all(), "it traced none of them"


def test_a_run_that_stopped_early_is_finished(tmp_path: Path) -> None:
    for reason, finished in (("early_stopping", True), ("SIGTERM", False)):
        info = about(total_steps=9, ended={"reason": reason, "step": 2})
        assert read_run(write_run(tmp_path / reason, [record(1), record(2)], info), "run").is_finished == finished


def test_training_time_of_an_unfinished_run_is_not_drawn(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results / "runs" / "fa4-8192" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + "\n" + lines[4][:20])
    axes = axes_of(results, f"{{metric: time, x: kernel, {AT_8K}}}")
    assert [t.get_text() for t in axes.get_yticklabels()] == ["kernel cudnn"]
    err = plots(results, capsys)[2]
    assert "fa4-8192: only 4 of 12 steps exist; its training time is not drawn" in err
    assert "metrics.jsonl line 5 is cut off" in err
    write_config(results, f"{{metric: speed, x: kernel, {AT_8K}}}")
    err = plots(results, capsys)[2]
    assert "fa4-8192: only 4 of 12 steps exist" in err and "training time" not in err


@pytest.mark.parametrize(("every", "slowed"), [(1, {6, 7, 8, 9}), (3, {6, 9})])  # by records that cover steps 6 to 9
def test_profiled_steps_and_their_neighbours_do_not_count(tmp_path: Path, every: int, slowed: set[int]) -> None:
    records = [record(step, tokens_per_second=1.0 if step in slowed else 100.0) for step in range(every, 16, every)]
    run = read_run(write_run(tmp_path, records, about(config={"profile_steps": [7, 8]})), "run")
    assert set(run.column("step")[np.isnan(run.unprofiled("tokens_per_second"))]) == slowed
    assert median(run.unprofiled("tokens_per_second")) == 100.0
    spread = METRICS["speed"].point(run, "")
    assert (spread.low, spread.high) == (100.0, 100.0)


# ---- axes, titles and legends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "scale"),
    [
        ("{metric: speed, x: length, series: kernel}", "log"),  # 4096 to 131072
        ("{metric: speed, x: length, series: kernel, where: {length: [4096, 8192]}}", "linear"),
        ("{metric: speed, x: step, where: {kernel: fa4, length: 4096}}", "linear"),
        ("{metric: latency, x: length, series: kernel}", "linear"),
        ("{metric: speed, x: dtype, series: [kernel, length]}", "log"),  # of bars, with a foot below the lowest
    ],
)
def test_an_axis_is_logarithmic_if_values_spread_over_a_setting(results: Path, spec: str, scale: str) -> None:
    axes = axes_of(results, spec)
    low, _ = axes.get_xlim() if axes.patches else axes.get_ylim()
    assert (axes.get_xscale() if axes.patches else axes.get_yscale()) == scale and (low == 0) == (scale == "linear")
    if spec.endswith("length]}"):
        assert low == pytest.approx(4096 / 3)


def test_keys_are_drawn_in_the_unit_that_they_end_in(results: Path) -> None:
    for path in results.rglob("metrics.jsonl"):
        lines = [json.dumps(json.loads(line) | {"comm_bytes": 5e9, "saving_seconds": 2.0}) for line in path.open()]
        path.write_text("\n".join(lines) + "\n")
    units = {"sent": "GB per step, all ranks", "comm_bytes": "GB", "saving_seconds": "seconds"}
    for word, unit in units.items():
        axes = axes_of(results, f"{{metric: {word}, x: kernel, {AT_8K}}}")
        assert axes.get_xlabel() == unit
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([2.0 if unit == "seconds" else 5.0] * 2)


def test_a_figure_names_the_hardware_and_versions_that_all_its_runs_share(results: Path) -> None:
    spec = "{metric: speed, x: length, series: kernel}"
    head = draw(results, spec).get_suptitle().splitlines()
    assert head == [
        "tiny-llama3, float32, 2 × NVIDIA H200, schedule zigzag, transport gloo",
        "torch 2.11.0, commit 0123abcd",
    ]
    write_run(results / "runs" / "b", [record(1)], about(world_size=4, commit=None, config={"model_max_length": 1024}))
    assert draw(results, spec).get_suptitle() == "tiny-llama3, float32, schedule zigzag, transport gloo\ntorch 2.11.0"
    only = draw(results, "{metric: speed, x: length, where: {length: 1024}}")
    assert only.get_suptitle().startswith("tiny-llama3, float32, CPU, 4 processes, schedule zigzag")
    records = [record(step, tokens_per_second=float(step)) for step in range(1, 20)]
    write_run(results / "runs" / "c", records, about(config={"model_max_length": 512}))
    noisy = draw(results, "{metric: speed, x: length, where: {length: 512}}")
    assert noisy.get_suptitle().endswith("\nMedians after the warm-up; whiskers from the lowest to the highest step")
    assert short_commit("0123456789abcdef") == "0123456789"
    assert short_commit("0123456789abcdef-changed") == "0123456789 (changed)"


def test_a_long_line_above_a_figure_is_never_cut_off(tmp_path: Path) -> None:
    versions = {"torch": "2.11.0", "cuda": "13.0", "transformers": "5.17.0", "flash-attn-4": "4.0.0b36"}
    info = about(gpu=True, versions=versions, commit="7cd6f80c9c0123-changed", total_steps=1)
    write_run(tmp_path / "runs" / "one", [record(1, gpu=True)], info)
    drawn = draw(tmp_path, "{metric: speed, x: length}")
    drawn.draw_without_rendering()
    (head,) = [text for text in drawn.texts if "flash-attn-4 4.0.0b36" in text.get_text()]
    assert "(changed)" in head.get_text() and head.get_window_extent().x1 < drawn.bbox.x1


def test_a_long_legend_leaves_room_for_the_axes_and_the_highest_point_is_below_the_edge(tmp_path: Path) -> None:
    for seed in range(12):
        config = {"seed": seed, "model_max_length": 64, "learning_rate": 0.001 + seed, "weight_decay": float(seed)}
        write_run(tmp_path / "runs" / str(seed), [record(1, mfu=0.4 + seed / 1e4)], about(config=config))
    many = draw(tmp_path, "{metric: mfu, x: length, series: [seed, learning_rate, weight_decay]}")
    many.draw_without_rendering()
    assert many.axes[0].get_window_extent().height / many.dpi > 2.5
    assert axes_of(tmp_path, "{metric: mfu, x: seed, series: fsdp}").get_ylim() == pytest.approx((0, 1.05 * 40.11))


def test_curves_that_coincide_say_how_far_they_are_apart(tmp_path: Path) -> None:
    for i, kernel in enumerate(("fa4", "cudnn")):
        records = [record(step, loss=6.0 - 0.01 * step + 1e-5 * i) for step in range(1, 41)]
        write_run(tmp_path / "runs" / kernel, records, about(kernel=kernel))
    drawn = draw(tmp_path, "{metric: loss, x: step, series: kernel}")
    assert drawn.axes[0].get_title(loc="right") == "2 curves: at most 1e-05 apart"
    assert sorted(names_of(drawn)) == ["kernel cudnn", "kernel fa4"]


def test_close_values_of_a_setting_leave_out_tick_labels(tmp_path: Path) -> None:
    for rate in ("0.00316", "0.003162", "0.01"):
        write_run(tmp_path / "runs" / rate, [record(1)], about(config={"learning_rate": float(rate)}))
    axes = axes_of(tmp_path, "{metric: loss, x: learning_rate}")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.00316", "", "0.01"]
    assert axes.get_xlabel() == "learning rate"


def test_an_empty_fsdp_is_called_ddp(tmp_path: Path) -> None:
    for fsdp in ("", "full_shard"):
        write_run(tmp_path / "runs" / f"b-{fsdp}", [record(1)], about(config={"fsdp": fsdp}))
    drawn = draw(tmp_path, "{metric: speed, x: length, series: fsdp}")
    assert sorted(names_of(drawn)) == ["DDP", "FSDP"]


# ---- traced steps ---------------------------------------------------------------------------------------------------

SPENT = (
    *(("attention, forward", "forward", 8.0), ("collectives", "forward", 3.0)),
    *(("attention, backward", "backward", 20.0), ("host copies", "backward", 1.0)),
    ("attention's exchange", "backward", 2.0),
)
MOVED = (
    *(("all-gather, bfloat16, 2 ranks", 3e9, 0.02), ("copies from another GPU", 1e9, 0.005)),
    ("copies to the host", 9e9, 9.0),
)
PROFILE = {
    "spent": [{"kind": kind, "phase": phase, "ms": ms} for kind, phase, ms in SPENT],
    "moved": [{"kind": kind, "bytes": size, "seconds": seconds} for kind, size, seconds in MOVED],
}
TRACED = {"forward": 11.0, "backward": 23.0, "update": 0.0, "communication": 5.0, "bandwidth": 160.0}


def write_profile(run: Path, summary: dict[str, Any]) -> None:
    (run / "profile").mkdir()
    (run / "profile" / "summary-rank0.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(("word", "value"), TRACED.items())
def test_numbers_of_traced_steps_are_drawn_over_a_setting(
    results: Path, word: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    for length in LENGTHS[:2]:
        write_profile(results / "runs" / f"fa4-{length}", PROFILE)
    axes = axes_of(results, f"{{metric: {word}, x: length, series: kernel}}")
    assert [[*LENGTHS[:2]], pytest.approx([value, value])] in numbered_lines(axes)
    others = f"{{metric: {word}, x: length, where: {{kernel: cudnn}}}}"
    write_config(results, f"{others}\n  two: {{metric: memory, x: kernel, where: {{length: 4096}}}}")
    status, names, err = plots(results, capsys)
    assert (status, names) == (0, ["two.png"])
    assert f"left out, figure one: no run has {word}" in err


@pytest.mark.parametrize("word", ["communication", "bandwidth"])
def test_a_trace_of_a_cpu_tells_no_communication(results: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = {"spent": [{"kind": "host", "phase": "forward", "ms": 3.0}], "moved": []}
    write_profile(results / "runs" / "fa4-4096", cpu)
    write_config(results, f"{{metric: {word}, x: length}}")
    status, _, err = plots(results, capsys)
    assert status == 2 and f"no run has {word}" in err


def test_runs_that_asked_for_auto_have_a_line_of_their_own(tmp_path: Path) -> None:
    for asked in ("zigzag", "prefix", "auto"):
        for length in LENGTHS:
            info = about(config={"model_max_length": length, "schedule": asked}, total_steps=12)
            taken = "zigzag" if asked == "auto" else asked
            records = [record(step) for step in range(1, 13)]
            write_run(tmp_path / "runs" / f"{asked}-{length}", records, {**info, "schedule": taken})
    spec = "{metric: speed, x: length, series: [schedule, kernel]}"
    assert sorted(names_of(draw(tmp_path, spec))) == ["schedule auto", "schedule prefix", "schedule zigzag"]
    for length in LENGTHS:
        shutil.rmtree(tmp_path / "runs" / f"zigzag-{length}")
    assert sorted(names_of(draw(tmp_path, spec))) == ["schedule auto", "schedule prefix"]


# ---- the command and its files --------------------------------------------------------------------------------------


def test_the_command_writes_every_figure_and_notes_unreadable_runs(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(results / "runs" / "broken", [], about())
    write_run(results / "runs" / "torn", [record(1)]).joinpath("run.json").write_text("{")
    path = results / "runs" / "fa4-8192" / "metrics.jsonl"
    path.write_text("garbled\n" + path.read_text())
    write_config(
        results, "{metric: speed, x: length, series: kernel}\n  two: {metric: memory, x: kernel, where: {length: 4096}}"
    )
    status, names, err = plots(results, capsys)
    assert (status, names) == (0, ["one.png", "two.png"])
    assert all((results / name).stat().st_size for name in names)
    notes = err.splitlines()
    assert len(notes) == 3 and "broken/metrics.jsonl is empty" in notes[0] and "torn/run.json is not JSON" in notes[1]
    assert "fa4-8192/metrics.jsonl line 1 is not JSON" in notes[2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{metric: speed, x: kernel, series: seed}", "figure one: 3 runs of seed 42 have kernel"),
        ("{metric: speed, x: length, where: {kernel: fa2}}", "figure one: no run has kernel fa2; train some"),
        ("{metric: speed, x: length, where: {kernel: [fa2, fa3], length: 9}}", "has kernel fa2 or fa3, length 9;"),
        ("{metric: sped, x: length}", "figure one: no run has sped; choose another metric"),
        ("{metric: forward, x: step}", "forward covers all traced steps together; set x to a setting"),
        ("{metric: speed, x: lenght}", "figure one: x: no run has a setting lenght; did you mean length?"),
        ("{metric: speed, x: length, series: [qqq]}", "figure one: series: no run has a setting qqq; give a key"),
        ("{x: length}", "figures.one.metric: is missing"),
        ("{metric: speed, x: length, serie: kernel}", "figures.one.serie: unknown; keys are metric, x, series"),
        ("speed", "figures.one: give `key: value` lines; keys are metric, x, series"),
    ],
)
def test_a_wrong_figure_is_one_line_and_exit_2(
    results: Path, spec: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(results, spec)
    status, _, err = plots(results, capsys)
    assert status == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_files_of_this_repository_name_a_sweep_and_its_settings(path: Path) -> None:
    from launch.sweep_file import read_sweep

    file = read_plots(path)
    sweep = read_sweep(ROOT / "launch" / "sweeps" / f"{path.stem}.yaml")
    assert file.runs == (sweep.output_dir,)
    known = {"world_size", "step", "tokens_per_rank"} | {key for cell in sweep.cells for key in cell.flags}
    for each in file.plots:
        assert {each.x, *(each.series or ()), *each.where} <= known, each.name
    sizes = {"model_name_or_path", "model_max_length", "tokens_per_rank"}
    assert sum(not sizes & each.where.keys() for each in file.plots) >= 2, "figures of small models and lengths, too"


def test_every_sweep_has_its_figures() -> None:
    assert {path.stem for path in CONFIGS} == {path.stem for path in (ROOT / "launch" / "sweeps").glob("*.yaml")}
