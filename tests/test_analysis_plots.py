"""Figures that a YAML file asks for: which runs are where, what is a line, and what is wrong with a file."""

import json
from pathlib import Path

import numpy as np
import pytest
from analysis_files import about, record, write_run
from matplotlib.backends.backend_agg import FigureCanvasAgg

from analysis.__main__ import main
from analysis.flags import short_commit
from analysis.plot_metrics import METRICS
from analysis.plots import figure, found_runs, grouped, point
from analysis.plots_file import Plot, read_plots
from analysis.runs import read_run
from analysis.summary import summarize

CONFIGS = sorted((Path(__file__).parent.parent / "analysis" / "configs").glob("*.yaml"))
LENGTHS = (4096, 8192, 65536)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Three lengths by two kernels; each run's speed is its own."""
    for i, kernel in enumerate(("fa4", "cudnn")):
        for length in LENGTHS:
            speed = {"tokens_per_second": float(length * (i + 1))}
            records = [record(step, gpu=True, **speed) for step in range(1, 13)]
            facts = about(gpu=True, config={"model_max_length": length}, kernel=kernel, total_steps=12)
            write_run(tmp_path / "runs" / f"{kernel}-{length}", records, facts)
    return tmp_path


def plot(results: Path, spec: str) -> Plot:
    path = results / "plots.yaml"
    path.write_text(f"runs: {results / 'runs'}\nfigures:\n  one: {spec}\n")
    return read_plots(path).plots[0]


def test_a_line_for_every_combination_of_the_settings_that_differ(results: Path) -> None:
    runs = found_runs([results / "runs"], [])
    found = plot(results, "{metric: speed, x: length}")
    groups = grouped(found, runs)
    assert sorted(groups) == ["kernel cudnn", "kernel fa4"]
    points = [point(run, found, METRICS["speed"]) for run in groups["kernel cudnn"]]
    assert sorted((int(p.x), p.value, p.low, p.high) for p in points) == [
        (n, 2.0 * n, 2.0 * n, 2.0 * n) for n in LENGTHS
    ]
    (axes,) = figure(found, runs).axes
    assert axes.get_xscale() == "log" and [t.get_text() for t in axes.get_xticklabels()] == ["4K", "8K", "64K"]
    assert {tuple(line.get_ydata()) for line in axes.get_lines() if len(line.get_ydata()) == 3} >= {
        tuple(float(n) for n in LENGTHS), tuple(2.0 * n for n in LENGTHS)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "value"),
    [("memory", 3.0), ("mfu", 40.0), ("time", 10 + 11 * 0.5), ("grad_norm", 1.25)],  # the first step takes ten seconds
)
def test_each_metric_is_what_the_run_came_to(results: Path, metric: str, value: float) -> None:
    runs = found_runs([results / "runs"], [])
    found = plot(results, f"{{metric: {metric}, x: kernel, where: {{length: 8192}}}}")
    (axes,) = figure(found, runs).axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([value, value])
    assert [t.get_text() for t in axes.get_xticklabels()] == ["cudnn", "fa4"]


def test_weak_scaling_is_a_line_of_the_same_tokens_on_every_rank(tmp_path: Path) -> None:
    for length in (32768, 65536, 131072):
        for ranks in (1, 2, 4):
            facts = about(config={"model_max_length": length}, world_size=ranks, sequence_ranks=ranks)
            speed = float(length + ranks)
            records = [record(step, tokens_per_second=speed) for step in range(1, 13)]
            write_run(tmp_path / f"{length}-{ranks}", records, facts)
    runs = found_runs([tmp_path], [])
    weak = Plot("weak", "speed", "world_size", ("model_name_or_path",), {"tokens_per_rank": ("32768",)}, None)
    (axes,) = figure(weak, runs).axes
    assert [[1, 2, 4], [32769.0, 65538.0, 131076.0]] in [[[*x] for x in line.get_data()] for line in axes.get_lines()]
    strong = Plot("strong", "speed", "world_size", ("model_max_length",), {}, None)
    assert list(grouped(strong, runs)) == ["length 32K", "length 64K", "length 128K"]


def test_the_time_of_a_run_that_did_not_end_is_not_drawn_and_that_is_said(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = results / "runs" / "fa4-8192" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + "\n" + lines[4][:20])
    spec = "{metric: time, x: kernel, where: {length: 8192}}"
    found = plot(results, spec)
    (axes,) = figure(found, found_runs([results / "runs"], [])).axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["cudnn"]
    assert main(["plots", "--config", str(results / "plots.yaml"), "--output", str(results)]) == 0
    said = capsys.readouterr().err
    assert "fa4-8192: only 4 of 12 steps are there; its training time is not drawn" in said
    assert "metrics.jsonl line 5 is cut off" in said
    plot(results, "{metric: speed, x: kernel, where: {length: 8192}}")
    assert main(["plots", "--config", str(results / "plots.yaml"), "--output", str(results)]) == 0
    said = capsys.readouterr().err
    assert "fa4-8192: only 4 of 12 steps are there" in said and "training time" not in said


@pytest.mark.parametrize(
    ("logged", "facts", "steps"),
    [
        (range(1010, 1050, 10), {"first_step": 1006}, 35),
        (range(1010, 1050, 10), {}, 40),  # an older run.json
        (range(10, 50, 10), {"first_step": 31}, 40),  # it went on in its own directory
        (range(3, 4), {"first_step": 1}, 3),  # it ended before its first tenth step
        (range(3, 4), {}, 3),
    ],
)
def test_a_run_answers_for_the_steps_that_it_made_itself(
    tmp_path: Path, logged: range, facts: dict[str, int], steps: int
) -> None:
    records = [record(step, step_seconds=0.5) for step in logged]
    config = {"logging_steps": 10, "profile_steps": [900, 901]}
    run = read_run(write_run(tmp_path, records, about(config=config, **facts)), "run")
    assert point(run, Plot("one", "time", "kernel", None, {}, None), METRICS["time"]).value == 0.5 * steps
    assert np.isfinite(run.pace("step_seconds")).all(), "it traced none of them"


def test_where_a_run_began_is_no_line_of_its_own(tmp_path: Path) -> None:
    for length, begin in ((4096, 1), (8192, 6)):
        facts = about(config={"model_max_length": length}, first_step=begin)
        write_run(tmp_path / str(length), [record(step) for step in range(begin, 13)], facts)
    found = Plot("one", "speed", "model_max_length", None, {}, None)
    assert list(grouped(found, found_runs([tmp_path], []))) == ["all"]


@pytest.mark.parametrize(("every", "disturbed"), [(1, {6, 7, 8, 9}), (3, {6, 9})])  # by records that hold steps 6 to 9
def test_steps_that_were_traced_and_those_beside_them_say_nothing_of_the_pace(
    tmp_path: Path, every: int, disturbed: set[int]
) -> None:
    records = [record(step, tokens_per_second=1.0 if step in disturbed else 100.0) for step in range(every, 16, every)]
    write_run(tmp_path, records, about(config={"profile_steps": [7, 8]}))
    run = read_run(tmp_path, "run")
    assert set(run.column("step")[np.isnan(run.pace("tokens_per_second"))]) == disturbed
    assert summarize(run).tokens_per_second == 100.0
    found = Plot("one", "speed", "kernel", None, {}, None)
    spread = point(run, found, METRICS["speed"])
    assert (spread.low, spread.high) == (100.0, 100.0)


@pytest.mark.parametrize(("factor", "scale"), [(2.0, "linear"), (9.0, "log")])
def test_the_time_of_a_step_is_on_a_logarithmic_axis_where_it_spreads(
    tmp_path: Path, factor: float, scale: str
) -> None:
    for length, seconds in ((4096, 0.5), (8192, 0.5 * factor)):
        records = [record(step, step_seconds=seconds) for step in range(1, 13)]
        write_run(tmp_path / str(length), records, about(config={"model_max_length": length}))
    found = Plot("one", "latency", "model_max_length", None, {}, None)
    (axes,) = figure(found, found_runs([tmp_path], [])).axes
    assert axes.get_yscale() == scale and axes.get_ylabel() == "seconds"
    assert (axes.get_ylim()[0] == 0) == (scale == "linear")


@pytest.mark.parametrize(
    ("spec", "scale"),
    [
        ("{metric: speed, x: length}", "log"),  # 4096 to 131072
        ("{metric: speed, x: length, scale: linear}", "linear"),
        ("{metric: speed, x: length, where: {length: [4096, 8192]}}", "linear"),
        ("{metric: speed, x: step, where: {kernel: fa4, length: 4096}}", "linear"),
        ("{metric: speed, x: step, where: {kernel: fa4, length: 4096}, scale: log}", "log"),
        ("{metric: memory, x: length, scale: log}", "log"),
        ("{metric: speed, x: dtype, series: [kernel, length]}", "log"),  # of bars, with a foot below the lowest
    ],
)
def test_speed_is_on_a_logarithmic_axis_where_it_spreads_unless_the_file_says_otherwise(
    results: Path, spec: str, scale: str
) -> None:
    (axes,) = figure(plot(results, spec), found_runs([results / "runs"], [])).axes
    low, _ = axes.get_ylim()
    assert axes.get_yscale() == scale and (low == 0) == (scale == "linear")
    if spec.endswith("length]}"):
        assert low == pytest.approx(4096 / 3)


def test_bytes_are_drawn_in_gb_and_other_keys_in_the_unit_that_they_end_in(results: Path) -> None:
    for path in results.rglob("metrics.jsonl"):
        lines = [json.dumps(json.loads(line) | {"comm_bytes": 5e9, "saving_seconds": 2.0}) for line in path.open()]
        path.write_text("\n".join(lines) + "\n")
    runs = found_runs([results / "runs"], [])
    units = {"sent": "GB a step, all ranks together", "comm_bytes": "GB", "saving_seconds": "seconds"}
    for word, unit in units.items():
        (axes,) = figure(plot(results, f"{{metric: {word}, x: kernel, where: {{length: 8192}}}}"), runs).axes
        assert axes.get_ylabel() == unit
        assert [bar.get_height() for bar in axes.patches] == pytest.approx([2.0 if unit == "seconds" else 5.0] * 2)


def test_a_commit_is_shown_short_and_never_without_its_changes() -> None:
    assert short_commit("0123456789abcdef") == "0123456789"
    assert short_commit("0123456789abcdef-changed") == "0123456789 (changed)"


def test_a_figure_names_what_all_its_runs_stand_on(results: Path) -> None:
    found = plot(results, "{metric: speed, x: length}")
    runs = found_runs([results / "runs"], [])
    assert figure(found, runs).get_suptitle() == "2 × NVIDIA H200, torch 2.11.0, commit 0123abcd"
    write_run(results / "runs" / "b", [record(1)], about(world_size=4, commit=None, config={"model_max_length": 1024}))
    mixed = found_runs([results / "runs"], [])
    assert figure(found, mixed).get_suptitle() == "torch 2.11.0"
    only = plot(results, "{metric: speed, x: length, where: {length: 1024}}")
    assert figure(only, mixed).get_suptitle() == "CPU, 4 processes, torch 2.11.0"


def test_a_long_line_above_a_figure_is_never_cut_off(results: Path) -> None:
    versions = {"torch": "2.11.0", "cuda": "13.0", "transformers": "5.17.0", "flash-attn-4": "4.0.0b36"}
    facts = about(gpu=True, versions=versions, commit="7cd6f80c9c0123-changed", total_steps=1)
    write_run(results / "one", [record(1, gpu=True)], facts)
    drawn = figure(plot(results, "{metric: speed, x: length}"), found_runs([results / "one"], []))
    FigureCanvasAgg(drawn).draw()
    (head,) = [text for text in drawn.texts if "flash-attn-4 4.0.0b36" in text.get_text()]
    assert "(changed)" in head.get_text() and head.get_window_extent().x1 < drawn.bbox.x1


def test_a_long_legend_leaves_the_axes_their_room_and_the_highest_point_is_below_the_edge(results: Path) -> None:
    for seed in range(12):
        config = {"seed": seed, "model_max_length": 64, "learning_rate": 0.001 + seed, "weight_decay": float(seed)}
        write_run(results / "many" / str(seed), [record(1, mfu=0.4 + seed / 1e4)], about(config=config))
    spec = "{metric: mfu, x: length, series: [seed, learning_rate, weight_decay]}"
    many = figure(plot(results, spec), found_runs([results / "many"], []))
    FigureCanvasAgg(many).draw()
    (axes,) = many.axes
    assert axes.get_window_extent().height / many.dpi > 2.5
    close = figure(plot(results, "{metric: mfu, x: seed, series: fsdp}"), found_runs([results / "many"], []))
    (axes,) = close.axes
    assert axes.get_ylim() == pytest.approx((0, 1.05 * 40.11))


def test_parameters_that_are_copied_are_called_so(results: Path) -> None:
    for fsdp in ("", "full_shard"):
        write_run(results / "runs" / f"b-{fsdp}", [record(1)], about(config={"fsdp": fsdp, "model_max_length": 64}))
    found = plot(results, "{metric: speed, x: length, series: fsdp, where: {length: 64}}")
    assert list(grouped(found, found_runs([results / "runs"], [])[:2])) == ["fsdp off (DDP)", "fsdp full_shard"]


SPENT = (
    *(
        ("attention, forward", "forward", 8.0),
        ("collectives", "forward", 3.0),
        ("attention, backward", "backward", 20.0),
    ),
    *(("host copies", "backward", 1.0), ("attention's exchange", "backward", 2.0)),
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


@pytest.mark.parametrize(("word", "value"), TRACED.items())
def test_what_was_traced_is_drawn_over_a_setting(
    results: Path, word: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    for length in LENGTHS[:2]:
        folder = results / "runs" / f"fa4-{length}" / "profile"
        folder.mkdir()
        (folder / "summary-rank0.json").write_text(json.dumps(PROFILE))
    found = plot(results, f"{{metric: {word}, x: length}}")
    (axes,) = figure(found, found_runs([results / "runs"], [])).axes
    lines = [line for line in axes.get_lines() if [*line.get_xdata()] == [*LENGTHS[:2]]]
    assert all([*line.get_ydata()] == pytest.approx([value, value]) for line in lines) and lines

    others = f"{{metric: {word}, x: length, where: {{kernel: cudnn}}}}"
    plot(results, f"{others}\n  two: {{metric: memory, x: kernel, where: {{length: 4096}}}}")
    assert main(["plots", "--config", str(results / "plots.yaml"), "--output", str(results)]) == 0
    said = capsys.readouterr()
    assert (
        said.out.splitlines() == [str(results / "two.png")]
        and f"left out, figure one: no run has traced steps that tell {word}" in said.err
    )


@pytest.mark.parametrize("word", ["communication", "bandwidth"])
def test_a_trace_of_a_cpu_draws_no_communication(results: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not tell, which is not the same as none."""
    folder = results / "runs" / "fa4-4096" / "profile"
    folder.mkdir()
    of_cpu = {"spent": [{"kind": "host", "phase": "forward", "ms": 3.0}], "moved": []}
    (folder / "summary-rank0.json").write_text(json.dumps(of_cpu))
    plot(results, f"{{metric: {word}, x: length}}")
    assert main(["plots", "--config", str(results / "plots.yaml"), "--output", str(results)]) == 2
    assert f"no run has traced steps that tell {word}" in capsys.readouterr().err


def test_curves_over_steps_have_a_point_a_step(results: Path) -> None:
    found = plot(results, "{metric: loss, x: step, series: kernel, where: {length: 4096}}")
    (axes,) = figure(found, found_runs([results / "runs"], [])).axes
    assert [len(line.get_xdata()) for line in axes.get_lines()] == [12, 12]


def test_the_command_writes_every_figure_and_says_where(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot(results, "{metric: speed, x: length}\n  two: {metric: memory, x: kernel, where: {length: 4096}}")
    assert main(["plots", "--config", str(results / "plots.yaml"), "--output", str(results), "--format", "both"]) == 0
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert names == ["one.png", "one.svg", "two.png", "two.svg"] and all(
        (results / name).stat().st_size for name in names
    )


def test_a_run_of_a_garbled_file_is_named_and_the_others_are_drawn(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(results / "runs" / "broken", [], about())
    write_run(results / "runs" / "torn", [record(1)]).joinpath("run.json").write_text("{")
    path = results / "runs" / "fa4-8192" / "metrics.jsonl"
    path.write_text("garbled\n" + path.read_text())
    plot(results, "{metric: speed, x: length}")
    assert main(["plots", "--config", str(results / "plots.yaml")]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 3 and "broken/metrics.jsonl is empty" in notes[0] and "torn/run.json is not JSON" in notes[1]
    assert "fa4-8192/metrics.jsonl line 1 is not JSON" in notes[2]


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("{metric: speed, x: kernel, series: seed}", "figure one: 3 runs of seed 42 have kernel"),
        ("{metric: speed, x: length, where: {kernel: fa2}}", "figure one: no run has kernel fa2; make some"),
        (
            "{metric: speed, x: length, where: {kernel: [fa2, fa3], length: 9}}",
            "no run has kernel fa2 or fa3, length 9;",
        ),
        ("{metric: sped, x: length}", "figure one: no run knows sped; choose another metric"),
        ("{metric: speed, x: lenght}", "figure one: x: no run has a setting lenght; did you mean length?"),
        ("{metric: speed, x: length, series: [qqq]}", "figure one: series: no run has a setting qqq; give a key"),
        ("{x: length}", "figures.one.metric: is missing"),
        ("{metric: speed, x: length, serie: kernel}", "figures.one.serie: unknown; keys are metric, x, series"),
        (
            "{metric: speed, x: length, scale: logarithmic}",
            "figures.one.scale: logarithmic is no scale; give linear or",
        ),
        ("speed", "figures.one: give {metric: …, x: …}"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    results: Path, spec: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = results / "plots.yaml"
    path.write_text(f"runs: {results / 'runs'}\nfigures:\n  one: {spec}\n")
    assert main(["plots", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_files_that_come_along_name_a_sweep_and_its_settings(path: Path) -> None:
    from launch.sweep_cells import expand
    from launch.sweep_file import read_sweep

    file = read_plots(path)
    sweep = read_sweep(path.parent.parent.parent / "launch" / "sweeps" / f"{path.stem}.yaml")
    assert file.runs == (sweep.output_dir,)
    known = {"world_size", "step", "tokens_per_rank"} | {key for cell in expand(sweep) for key in cell.settings}
    for each in file.plots:
        assert {each.x, *(each.series or ()), *each.where} <= known, each.name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_sweep_of_a_small_model_and_short_lengths_has_figures_too(path: Path) -> None:
    sizes = {"model_name_or_path", "model_max_length", "tokens_per_rank"}
    assert sum(not sizes & each.where.keys() for each in read_plots(path).plots) >= 2


def test_every_sweep_has_its_figures() -> None:
    sweeps = CONFIGS[0].parent.parent.parent / "launch" / "sweeps"
    assert {path.stem for path in CONFIGS} == {path.stem for path in sweeps.glob("*.yaml")}
