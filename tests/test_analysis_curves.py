"""Curves of training runs: files that are read or refused, the printed table, and the figures."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_files import record, write_run
from matplotlib.figure import Figure
from programs import refusal, shown

from analysis.__main__ import main
from analysis.curves import figures, loss_figure
from analysis.drawing import plain_ticks, save, spread
from analysis.runs import Run, describe, labels, median, read_run, read_runs, smooth, warmup_records
from analysis.style import looks

PICTURES = ["loss.png", "throughput.png", "memory.png", "mfu.png"]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the pictures, which take most of the time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _figure, path: None)


def make_run(directory: Path, steps: int = 40, gpu: bool = False, tail: str = "") -> Path:
    return write_run(directory, [record(step, gpu) for step in range(1, steps + 1)], tail=tail)


def runs_of(*directories: Path) -> list[Run]:
    return read_runs(directories, [])


def test_the_program_runs_without_torch(tmp_path: Path) -> None:
    code = "import sys, analysis.__main__ as a; sys.exit(a.main(sys.argv[1:]) or ('torch' in sys.modules))"
    words = [sys.executable, "-c", code, str(make_run(tmp_path / "run", steps=2))]
    done = subprocess.run(words, cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- files ----------------------------------------------------------------------------------------------------------


def test_pictures_of_one_run_are_beside_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert shown(main, run).splitlines()[-4:] == [str(run / name) for name in PICTURES]
    assert all((run / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)


@pytest.mark.parametrize("command", [[], pytest.param(["compare"], marks=pytest.mark.slow)])
def test_pictures_of_several_runs_are_in_a_folder_of_their_own(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [make_run(tmp_path / "first"), make_run(tmp_path / "second", gpu=True)]
    names = ["compare.png"] if command else PICTURES
    made = shown(main, *command, *runs).splitlines()[-len(names) :]
    folder = f"outputs/figures/{'-'.join([*(command or ['curves']), 'first', 'second'])}"
    assert made == [f"{folder}/{name}" for name in names] and all(Path(name).is_file() for name in made)
    assert not list(runs[0].glob("*.png")) and not list(runs[1].glob("*.png"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no metrics.jsonl"),
        ("", "is empty"),
        ('{"step": 1, "lo', "line 1 is cut off"),
        ('{"step": 1, "eval_loss": 2.0}\n', "no training step"),
        ('{"step": 1\n{"step": 2\n', "line 1 is not JSON"),
        ('{"loss": 1.0}\n', 'line 1 is not a record: it should be an object with a whole number "step"'),
        ("[1, 2]\n", "line 1 is not a record"),
        ('{"step": 1, "loss": "low"}\n', "line 1 has 'low' for \"loss\""),
    ],
)
def test_unreadable_metrics_are_one_line_and_exit_2(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    line = refusal(main, tmp_path)
    assert line.startswith("analysis: error: ") and message in line


@pytest.mark.usefixtures("undrawn")
def test_a_file_as_output_a_run_given_twice_and_a_broken_run_json_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert main([str(run)]) == 0, "a missing run.json is no fault"
    assert refusal(main, run, "--output", run / "metrics.jsonl")
    assert "is given twice; give each run once" in refusal(main, run, f"{run}/../run")
    (run / "run.json").write_text("{")
    assert "run.json is not JSON" in refusal(main, run)


@pytest.mark.usefixtures("undrawn")
def test_lines_that_are_no_records_are_one_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", steps=5)
    path = run / "metrics.jsonl"
    path.write_text("\x00" * 9 + "\n" + path.read_text() + '{"step": 2.5}\n{"step": 3, "loss": "low"}\n[1]\n')
    assert main([str(run)]) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(f"analysis: note: {path} lines 1, 7, 8 and 1 more are left out: line 1 is not")
    assert list(read_run(run, "run").column("step")) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "is nested too deep"),
        (f'{{"step": 6, "loss": {10**400}}}', "is too large"),
        ('{"step": true}', "is not a record"),
        ('{"step": 6, "lo', "is cut off, as when a run is killed while writing; it is left out"),
    ],
)
def test_a_line_that_is_no_record_is_left_out(tmp_path: Path, line: str, reason: str) -> None:
    run = read_run(make_run(tmp_path / "run", steps=5, tail=line), "run")
    assert list(run.column("step")) == [1, 2, 3, 4, 5]
    (note,) = run.notes
    assert "metrics.jsonl line 6 " in note and reason in note


def test_a_run_that_cannot_be_read_is_noted_and_the_others_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, started, whole = (make_run(tmp_path / name) for name in ("broken", "started", "whole"))
    (broken / "metrics.jsonl").write_text("no\nrecord\n")
    (started / "metrics.jsonl").write_text("")
    assert main([str(broken), str(started), str(whole)]) == 0
    out, err = capsys.readouterr()
    assert [line.split(": ")[2] for line in err.splitlines()] == ["left out", "left out"]
    assert "broken/metrics.jsonl line 1 is not JSON" in err and "started/metrics.jsonl is empty" in err
    assert str(whole / "loss.png") in out
    assert refusal(main, broken, started).endswith("(and 1 more like it)\n")


def test_steps_repeated_after_a_resume_count_once(tmp_path: Path) -> None:
    again = "\n".join(json.dumps(record(step, loss=1.0)) for step in (4, 5, 6)) + "\n"
    run = read_run(make_run(tmp_path / "run", steps=5, tail=again), "run")
    assert list(run.column("step")) == [1, 2, 3, 4, 5, 6] and list(run.column("loss")[3:]) == [1.0, 1.0, 1.0]
    assert run.notes == ("run: 2 steps were logged twice, as in a resumed run; the later records count",)


def test_runs_of_the_same_name_are_labelled_with_their_parents() -> None:
    paths = [Path("/runs/a/ring/seed1"), Path("/runs/b/ring/seed1"), Path("/runs/b/zigzag")]
    assert labels(paths) == ["a/ring/seed1", "b/ring/seed1", "zigzag"]


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_a_choice_that_the_run_made_counts_before_the_flag(tmp_path: Path) -> None:
    config = {"model_name_or_path": "tiny-llama3", "model_max_length": 4096, "schedule": "auto", "kernel": None}
    write_run(tmp_path, [record(1)], {"config": config, "schedule": "zigzag", "world_size": 2})
    assert describe([read_run(tmp_path, "run").info]) == "tiny-llama3, 4K tokens, 2 ranks, schedule zigzag"
    write_run(tmp_path, [record(1)], {"world_size": 1})
    assert describe([read_run(tmp_path, "run").info]) == "1 rank"


def test_medians_leave_the_warm_up_out_and_smoothing_skips_unknown_values() -> None:
    assert [warmup_records(count) for count in (1, 2, 10, 40, 1000)] == [0, 1, 1, 4, 10]
    assert median(np.array([30.0, 1.0, 3.0])) == 2.0
    assert median(np.array([30.0])) == 30.0
    assert np.isnan(median(np.array([np.nan])))
    line = np.arange(100.0)
    assert np.allclose(smooth(line)[5:-5], line[5:-5])
    assert np.allclose(smooth(np.array([1.0, np.nan, 1.0])), 1.0)


def test_tables_have_a_column_for_each_of_up_to_three_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "gpu", gpu=True), *(make_run(tmp_path / f"cpu{i}") for i in range(3))]
    output = tmp_path / "new" / "folder"
    out = shown(main, *runs, "--output", output).splitlines()
    assert out[-4:] == [str(output / name) for name in PICTURES] and {p.name for p in output.iterdir()} == {*PICTURES}
    assert not [line for line in out if line.endswith(" ")]
    lines = [line.split("  ") for line in out]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    first = {row[0]: row[1:] for row in reversed(rows) if len(row) == 4}
    assert first["steps"] == ["40"] * 3
    assert first["loss, first → last"][0] == "5.990 → 5.600"
    assert (first["step time, median"][0], first["tokens per second, median"][0]) == ("0.5 s", "8,192")
    assert first["peak memory"] == ["3.00 GiB GPU", "2.00 GiB host", "2.00 GiB host"]
    assert first["MFU, median"] == ["40.0 %", "-", "-"] and first["model TFLOP/s per GPU"][1] == "0.5"
    assert ["cpu2"] in rows


# ---- figures --------------------------------------------------------------------------------------------------------


def test_evaluations_are_diamonds_and_no_training_steps(tmp_path: Path) -> None:
    (run,) = runs_of(make_run(tmp_path / "run", steps=5, tail='{"step": 5, "eval_loss": 2.5}\n'))
    assert len(run.steps) == 5
    figure = figures([run])["loss"]
    (points,) = (line for line in figure.axes[0].lines if line.get_marker() == "D")
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([5.0], [2.5])
    assert figure.get_suptitle().endswith("Diamonds: held out (evaluation)")


def test_mfu_is_drawn_if_known_and_tflops_if_not(tmp_path: Path) -> None:
    gpu, cpu = runs_of(make_run(tmp_path / "gpu", gpu=True), make_run(tmp_path / "cpu"))

    def units(*runs: Run) -> list[str]:
        return [axes.get_ylabel().split()[0] for axes in figures(runs)["mfu"].axes]

    assert (units(gpu), units(cpu), units(gpu, cpu)) == (["%"], ["model"], ["%", "model"])
    (axes,) = figures([gpu])["mfu"].axes
    assert np.allclose(axes.lines[0].get_ydata(), 40.0)


def test_memory_of_the_gpu_is_drawn_if_there_is_one(tmp_path: Path) -> None:
    gpu, cpu = runs_of(make_run(tmp_path / "gpu", gpu=True), make_run(tmp_path / "cpu"))
    device, host = figures([gpu])["memory"].axes
    assert [line.get_ydata()[0] for line in device.lines] == [3.0, 4.0]
    assert [line.get_ydata()[0] for line in host.lines] == [2.0]
    (alone,) = figures([cpu])["memory"].axes
    assert alone.get_title(loc="left") == host.get_title(loc="left") == "Host memory"


def test_a_slow_first_step_does_not_flatten_the_others(tmp_path: Path) -> None:
    _, step_time = figures(runs_of(make_run(tmp_path / "run")))["throughput"].axes
    assert step_time.get_ylim() == (0.0, pytest.approx(0.625))
    assert step_time.get_title(loc="right") == "not shown: 1 higher point, up to 10"


def test_every_axis_has_a_title_and_every_run_is_in_the_legend(tmp_path: Path) -> None:
    runs = runs_of(make_run(tmp_path / "one", steps=1), make_run(tmp_path / "two", gpu=True))
    for figure in figures(runs).values():
        for axes in figure.axes:
            assert axes.get_title(loc="left") and axes.get_ylabel() and axes.get_xlabel() == "training step"
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]


def test_a_metric_that_no_run_logged_is_missing_on_the_picture(tmp_path: Path) -> None:
    drawn: dict[str, Any] = figures(runs_of(write_run(tmp_path, [{"step": 1, "loss": 2.0}])))
    for name in ("throughput", "memory", "mfu"):
        for axes in drawn[name].axes:
            assert [text.get_text() for text in axes.texts] == ["not recorded"]


def test_pictures_say_which_axes_are_logarithmic(tmp_path: Path) -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.set(yscale="log", ylabel="seconds", xlabel="step")
    for _ in range(2):
        save(figure, tmp_path, "picture")
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("seconds (log scale)", "step")


def test_series_share_colors_by_the_setting_with_most_values() -> None:
    series = [(kernel, size) for kernel in ("fa4", "cudnn") for size in "abcd"]
    drawn = looks(series)
    by_size = {
        size: {look["color"] for (_, own), look in zip(series, drawn, strict=True) if own == size} for size in "abcd"
    }
    assert [len(colors) for colors in by_size.values()] == [1] * 4 and len(set.union(*by_size.values())) == 4
    assert [look["linestyle"] for look in drawn] == ["-"] * 4 + ["--"] * 4


@pytest.mark.parametrize("count", [1, 7, 8, 20, 36])
def test_every_series_has_its_own_look(count: int) -> None:
    drawn = looks([[str(i)] for i in range(count)])
    assert len({tuple(look.values()) for look in drawn}) == count
    assert len({look["color"] for look in drawn}) == min(count, 7)


def test_runs_that_coincide_have_markers_on_different_steps(tmp_path: Path) -> None:
    runs = runs_of(*(make_run(tmp_path / f"run{i}", steps=90) for i in range(3)))
    for axes in (axes for figure in figures(runs).values() for axes in figure.axes):
        marked = [set(line.get_markevery()) for line in axes.lines if line.get_marker() != "None"]
        assert len(marked) == 3 and len(set.union(*marked)) == sum(map(len, marked)) >= 3 * 8


def test_names_beside_lines_do_not_overlap() -> None:
    assert spread([0.1, 0.11, 0.12, 0.9], 0.1) == pytest.approx([0.1, 0.2, 0.3, 0.9])
    assert spread([0.97, 0.98, 1.0], 0.1) == pytest.approx([0.8, 0.9, 1.0])


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (9.965, 10.035, ["9.98", "10", "10.02"]),
        (2, 40, ["2", "5", "10", "20"]),
        (90, 120_000, ["100", "1,000", "10,000", "100,000"]),
    ],
)
def test_logarithmic_axes_have_few_round_ticks(low: float, high: float, ticks: list[str]) -> None:
    axes = Figure().subplots()
    axes.set(yscale="log", ylim=(low, high))
    plain_ticks(axes.yaxis)
    places = [place for place in axes.yaxis.get_majorticklocs() if low <= place <= high]
    assert axes.yaxis.get_major_formatter().format_ticks(places) == ticks


@pytest.mark.parametrize(("first", "change"), [(10.448, 1e-6), (10.448, 0.0), (11.9, 9.0)])
def test_the_loss_axis_has_few_short_ticks(tmp_path: Path, first: float, change: float) -> None:
    records = [record(step, loss=first - change * step / 40) for step in range(1, 41)]
    figure = loss_figure(read_runs([write_run(tmp_path, records)], []))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert 3 <= len(labels) <= 9 and max(map(len, labels)) <= 6 and not axes.yaxis.get_offset_text().get_text()
    low, high = axes.get_ylim()
    assert low < first - change and high > first - change / 40
