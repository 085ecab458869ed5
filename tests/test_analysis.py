"""Knows what the analysis of runs must read, refuse, draw and say."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis.__main__ import COMMANDS, main
from analysis.figures import COLORS, FIGURES, colors, loss_figure, mfu_panels, panel_figure
from analysis.runs import described, labels, read_run, read_runs
from analysis.summary import GIB, cells, median, smoothed, summarize, tables, warmup_records

NAMES = ["loss.png", "throughput.png", "memory.png", "mfu.png"]
MakeRun = Callable[..., Path]


def record(step: int, gpu: bool = False, **changes: float | None) -> dict[str, float | None]:
    """One logged step; the first takes twenty times as long, as one that compiles does."""
    seconds = 10.0 if step == 1 else 0.5
    values: dict[str, float | None] = {
        "step": step,
        "loss": 6.0 - 0.01 * step,
        "step_seconds": seconds,
        "tokens_per_second": 4096 / seconds,
        "model_tflops_per_gpu": 0.5,
        "mfu": 0.4 if gpu else None,
        "peak_memory_allocated_bytes": 3 * GIB if gpu else None,
        "peak_memory_reserved_bytes": 4 * GIB if gpu else None,
        "host_rss_bytes": 2 * GIB,
    }
    return values | changes


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str = "run", steps: int = 40, gpu: bool = False, tail: str = "") -> Path:
        directory = tmp_path / name
        directory.mkdir(parents=True)
        lines = [json.dumps(record(step, gpu)) for step in range(1, steps + 1)]
        (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n" + tail)
        return directory

    return make


def test_help_names_every_command_on_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], *([name] for name in COMMANDS)):
        with pytest.raises(SystemExit) as end:
            main([*words, "--help"])
        shown = capsys.readouterr().out
        assert end.value.code == 0 and shown.startswith("usage: python3 -m analysis " + " ".join(words))
        if not words:
            lines = shown.splitlines()
            assert max(map(len, lines)) <= 80
            assert [line.split()[0] for line in lines[-len(COMMANDS) :]] == list(COMMANDS)


def test_four_figures_are_drawn_into_the_run_and_named(make_run: MakeRun, capsys: pytest.CaptureFixture) -> None:
    run = make_run()
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [str(run / name) for name in NAMES]
    assert all((run / name).read_bytes().startswith(b"\x89PNG") for name in NAMES)


@pytest.mark.parametrize("command", [[], ["compare"]])
def test_runs_together_are_drawn_into_a_folder_of_their_own(
    make_run: MakeRun,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [make_run("first"), make_run("second", gpu=True)]
    before = {path: path.read_bytes() for run in runs for path in run.iterdir()}
    assert main([*command, *map(str, runs)]) == 0
    names = ["compare.png"] if command else NAMES
    shown = capsys.readouterr().out.splitlines()[-len(names) :]
    assert shown == [f"outputs/compare/{name}" for name in names] and all(Path(name).is_file() for name in shown)
    assert {path: path.read_bytes() for run in runs for path in run.iterdir()} == before


def test_figures_go_where_output_says(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    assert main([str(run), "--output", str(tmp_path / "new" / "folder")]) == 0
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(NAMES)
    assert not (run / "loss.png").exists()


@pytest.mark.parametrize(("form", "endings"), [("svg", (".svg",)), ("both", (".png", ".svg"))])
def test_figures_are_written_as_svg_where_asked(
    form: str, endings: tuple[str, ...], make_run: MakeRun, capsys: pytest.CaptureFixture
) -> None:
    run = make_run(steps=3)
    assert main([str(run), "--format", form]) == 0
    paths = [run / (Path(name).stem + ending) for name in NAMES for ending in endings]
    assert capsys.readouterr().out.splitlines()[-len(paths) :] == [str(path) for path in paths]
    assert sorted(run.glob("*.[ps][nv]g")) == sorted(paths)
    assert "<svg" in (run / "loss.svg").read_text()


@pytest.mark.parametrize(
    ("content", "said"),
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
def test_unreadable_metrics_are_one_line_and_exit_2(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("analysis: error: ")
    assert said in lines[0]


def test_an_output_that_is_a_file_is_one_line_and_exit_2(make_run: MakeRun, capsys: pytest.CaptureFixture) -> None:
    run = make_run()
    assert main([str(run), "--output", str(run / "metrics.jsonl")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_broken_run_json_is_refused_and_a_missing_one_is_not(
    make_run: MakeRun, capsys: pytest.CaptureFixture
) -> None:
    run = make_run()
    assert described(read_run(run, "run")) == ""
    (run / "run.json").write_text("{")
    assert main([str(run)]) == 2
    assert "run.json is not JSON" in capsys.readouterr().err


def test_a_run_is_described_by_what_was_chosen_over_what_was_asked(make_run: MakeRun) -> None:
    run = make_run()
    config = {"model_name_or_path": "tiny-llama3", "model_max_length": 4096, "schedule": "auto", "kernel": None}
    (run / "run.json").write_text(json.dumps({"config": config, "schedule": "zigzag", "world_size": 2}))
    assert described(read_run(run, "run")) == "tiny-llama3, 4096 tokens, 2 ranks, schedule zigzag"
    (run / "run.json").write_text(json.dumps({"world_size": 1}))
    assert described(read_run(run, "run")) == "1 rank"


def test_a_last_line_cut_off_is_left_out_and_said(make_run: MakeRun, capsys: pytest.CaptureFixture) -> None:
    run = make_run(steps=5, tail='{"step": 6, "lo')
    assert main([str(run)]) == 0
    assert "line 6 is cut off, as when a run is killed while writing; it is left out" in capsys.readouterr().err
    assert list(read_run(run, "run").column("step")) == [1, 2, 3, 4, 5]


def test_lines_that_are_no_records_are_said_in_one_line_and_the_others_drawn(
    make_run: MakeRun, capsys: pytest.CaptureFixture
) -> None:
    run = make_run(steps=5)
    garbled = ["\x00" * 9, '{"step": 2.5}', '{"step": 3, "loss": "low"}', "[1]"]
    (run / "metrics.jsonl").write_text(
        "\n".join((garbled[0], (run / "metrics.jsonl").read_text(), *garbled[1:])) + "\n"
    )
    assert main([str(run)]) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(f"analysis: note: {run}/metrics.jsonl lines 1, 8, 9 and 1 more are left out: line 1 is not")
    assert list(read_run(run, "run").column("step")) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("line", ["[" * 100_000, f'{{"step": 6, "loss": {10**400}}}', '{"step": true}'])
@pytest.mark.parametrize("command", [[], ["watch", "--once"], ["report"]])
def test_a_line_that_no_program_should_write_is_left_out(make_run: MakeRun, command: list[str], line: str) -> None:
    run = make_run(steps=5, tail=line + "\n")
    assert main([*command, str(run)]) == 0
    assert list(read_run(run, "run").column("step")) == [1, 2, 3, 4, 5]


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_drawn(
    make_run: MakeRun, capsys: pytest.CaptureFixture
) -> None:
    broken, started, whole = make_run("broken"), make_run("started"), make_run("whole")
    (broken / "metrics.jsonl").write_text("no\nrecord\n")
    (started / "metrics.jsonl").write_text("")
    assert main([str(broken), str(started), str(whole)]) == 0
    out, err = capsys.readouterr()
    assert [line.split(": ")[2] for line in err.splitlines()] == ["left out", "left out"]
    assert "broken/metrics.jsonl line 1 is not JSON" in err and "started/metrics.jsonl is empty" in err
    assert str(whole / "loss.png") in out
    assert main([str(broken), str(started)]) == 2
    assert capsys.readouterr().err.endswith("(and 1 more like it)\n")


def test_steps_done_again_after_a_resume_count_once(make_run: MakeRun) -> None:
    run = read_run(make_run(steps=5, tail="\n".join(json.dumps(record(s, loss=1.0)) for s in (4, 5, 6))), "run")
    assert list(run.column("step")) == [1, 2, 3, 4, 5, 6]
    assert list(run.column("loss")[3:]) == [1.0, 1.0, 1.0]
    assert "2 steps were logged twice" in run.notes[0]


def test_evaluations_are_markers_and_not_training_steps(make_run: MakeRun) -> None:
    run = read_run(make_run(steps=5, tail='{"step": 5, "eval_loss": 2.5}\n'), "run")
    assert len(run.steps) == 5
    figure = loss_figure([run])
    (points,) = (line for line in figure.axes[0].lines if line.get_marker() == "D")
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([5.0], [2.5])
    assert "evaluation" in {text.get_text() for legend in figure.legends for text in legend.get_texts()}


def test_repeated_names_take_as_many_parents_as_they_need() -> None:
    paths = [Path("/runs/a/ring/seed1"), Path("/runs/b/ring/seed1"), Path("/runs/b/zigzag")]
    assert labels(paths) == ["a/ring/seed1", "b/ring/seed1", "zigzag"]


def test_a_run_given_twice_is_refused(make_run: MakeRun, capsys: pytest.CaptureFixture) -> None:
    run = make_run()
    assert main([str(run), f"{run}/../run"]) == 2
    assert "is given twice" in capsys.readouterr().err


def test_medians_leave_the_warm_up_out() -> None:
    assert [warmup_records(count) for count in (1, 2, 10, 40, 1000)] == [0, 1, 1, 4, 10]
    assert median(np.array([30.0, 1.0, 3.0])) == 2.0
    assert median(np.array([30.0])) == 30.0
    assert np.isnan(median(np.array([np.nan])))


def test_smoothing_keeps_a_straight_line_in_place_and_skips_what_is_unknown() -> None:
    line = np.arange(100.0)
    assert np.allclose(smoothed(line)[5:-5], line[5:-5])
    assert np.allclose(smoothed(np.array([1.0, np.nan, 1.0])), 1.0)


def test_the_table_holds_what_the_run_did(make_run: MakeRun) -> None:
    gpu = cells(summarize(read_run(make_run("gpu", gpu=True), "gpu")))
    assert gpu["steps"] == "40"
    assert gpu["loss, first → last"] == "5.990 → 5.600"
    assert (gpu["step time, median"], gpu["tokens per second, median"]) == ("0.5 s", "8,192")
    assert (gpu["peak memory"], gpu["MFU, median"]) == ("3.00 GiB GPU", "40.0 %")
    cpu = cells(summarize(read_run(make_run("cpu"), "cpu")))
    assert (cpu["peak memory"], cpu["MFU, median"], cpu["model TFLOP/s, median"]) == ("2.00 GiB host", "-", "0.5")


def test_every_run_is_in_one_table(make_run: MakeRun) -> None:
    summaries = [summarize(run) for run in read_runs([make_run(f"run{i}", steps=2) for i in range(4)], [])]
    assert [len(table.columns) - 1 for table in tables(summaries)] == [3, 1]


def test_mfu_is_drawn_where_known_and_arithmetic_where_not(make_run: MakeRun) -> None:
    gpu, cpu = read_runs([make_run("gpu", gpu=True), make_run("cpu")], [])
    drawn = {
        name: [panel.curves[0].key for panel in mfu_panels(runs)]
        for name, runs in {"gpu": [gpu], "cpu": [cpu], "both": [gpu, cpu]}.items()
    }
    assert drawn == {"gpu": ["mfu"], "cpu": ["model_tflops_per_gpu"], "both": ["mfu", "model_tflops_per_gpu"]}
    (axes,) = panel_figure([gpu], mfu_panels([gpu])).axes
    assert np.allclose(axes.lines[0].get_ydata(), 40.0)


def test_memory_shows_the_device_only_where_there_is_one(make_run: MakeRun) -> None:
    gpu, cpu = read_runs([make_run("gpu", gpu=True), make_run("cpu")], [])
    device, host = panel_figure([gpu], FIGURES["memory"]([gpu])).axes
    assert [line.get_ydata()[0] for line in device.lines] == [3.0, 4.0]
    assert [line.get_ydata()[0] for line in host.lines] == [2.0]
    (alone,) = panel_figure([cpu], FIGURES["memory"]([cpu])).axes
    assert alone.get_title(loc="left") == host.get_title(loc="left") == "Host memory"


def test_a_slow_first_step_does_not_flatten_the_others(make_run: MakeRun) -> None:
    run = read_run(make_run(), "run")
    _, step_time = panel_figure([run], FIGURES["throughput"]([run])).axes
    assert step_time.get_ylim() == (0.0, pytest.approx(0.625))
    assert step_time.get_title(loc="right") == "not shown: 1 higher point, up to 10"


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_axis_is_titled_and_every_run_is_in_the_legend(name: str, make_run: MakeRun) -> None:
    runs = read_runs([make_run("one", steps=1), make_run("two", gpu=True)], [])
    figure = panel_figure(runs, FIGURES[name](runs))
    for axes in figure.axes:
        assert axes.get_title(loc="left") and axes.get_ylabel() and axes.get_xlabel() == "training step"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]


def test_a_metric_nobody_logged_is_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    run = read_run(tmp_path, "run")
    for panels in FIGURES.values():
        for axes in panel_figure([run], panels([run])).axes:
            assert [text.get_text() for text in axes.texts] == ["not recorded"]


def test_every_run_has_its_own_colour() -> None:
    assert colors(3) == list(COLORS[:3])
    assert len(set(colors(20))) == 20


def test_the_program_runs_without_torch(make_run: MakeRun) -> None:
    code = "import sys, analysis.__main__ as a; sys.exit(a.main(sys.argv[1:]) or ('torch' in sys.modules))"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code, str(make_run(steps=2))], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_runs_that_coincide_show_beneath_each_other_and_none_is_a_band(make_run: MakeRun) -> None:
    runs = [read_run(make_run(f"run-{i}"), f"run-{i}") for i in range(9)]
    (host,) = panel_figure(runs, FIGURES["memory"](runs)).axes
    widths = [line.get_linewidth() for line in host.get_lines()]
    assert widths == sorted(set(widths), reverse=True) and len(widths) == 9 and widths[0] < 6
