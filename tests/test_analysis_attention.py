"""Knows how the records of the attention benchmark become a table and a picture."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from analysis.__main__ import main
from analysis.attention import figure, markdown, remarks
from analysis.points import read_tables

RATES = {
    ("single-gpu", ""): (640.0, 595.0),
    ("ulysses-fa4", ""): (460.0, 590.0),
    ("lightseq", "prefix"): (480.0, 600.0),
    ("lightseq", "ring"): (240.0, None),
}
LENGTHS = (16384, 131072)


def record(implementation: str, request: str, length: int, tflops: float | None, **changes: Any) -> dict[str, Any]:
    """A point of which the slowest repeat took a tenth longer than the median, the fastest a twentieth less."""
    world = 1 if implementation == "single-gpu" else 4
    seconds = 3.5 * 4 * length**2 * 4096 / 2 / world / tflops / 1e12 if tflops else None
    times = {"min": 0.95, "median": 1.0, "max": 1.1}
    return {
        "length": length, "world": world, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "batch": 1,
        "implementation": implementation, "request": request, "kernel": "fa4", "transport": None,
        **{f"seconds_{which}": seconds and seconds * share for which, share in times.items()},
        "tflops_per_gpu": tflops, "peak_memory_bytes": 3 * 2**30 if tflops else None,
        "exposed_communication_seconds": None, "skipped": None if tflops else "out of memory",
    } | changes  # fmt: skip


def write(path: Path, points: list[dict[str, Any]], tail: str = "") -> Path:
    header = {"benchmark": "attention", "hardware": {"device": "NVIDIA H200"}}
    path.write_text("\n".join(map(json.dumps, [header, *points])) + "\n" + tail)
    return path


@pytest.fixture
def points() -> list[dict[str, Any]]:
    return [record(*key, n, rate) for key, rates in RATES.items() for n, rate in zip(LENGTHS, rates, strict=True)]


@pytest.fixture
def file(tmp_path: Path, points: list[dict[str, Any]]) -> Path:
    return write(tmp_path / "a.jsonl", points)


def test_the_table_puts_the_ceiling_first_and_the_fastest_at_the_longest_length_next(file: Path) -> None:
    (table,) = read_tables([file], [])
    assert markdown(table, "tflops") == [
        "TFLOP/s per GPU; 4 × NVIDIA H200, 32/8 heads of 128, bfloat16",
        "",
        "|                 | 16K | 128K |",
        "|-----------------|----:|-----:|",
        "| one GPU, fa4    | 640 |  595 |",
        "| lightseq prefix | 480 |  600 |",
        "| ulysses-fa4     | 460 |  590 |",
        "| lightseq ring   | 240 |    – |",
    ]
    assert remarks(table) == [
        "Medians. Widest spread: 15.0% of the median (one GPU, fa4, 16K).",
        "– lightseq ring, 128K: out of memory",
    ]


def test_other_values_fill_the_same_table(file: Path) -> None:
    (table,) = read_tables([file], [])
    assert markdown(table, "memory")[5] == "| lightseq prefix | 3.00 | 3.00 |"
    assert markdown(table, "milliseconds")[4].split("|")[2].strip() == "12.03"
    assert markdown(table, "exposed")[5].split() == ["|", "lightseq", "prefix", "|", "|", "|"]


def test_the_picture_has_a_line_an_implementation_and_a_dashed_ceiling(file: Path) -> None:
    (table,) = read_tables([file], [])
    out = figure(table)
    (axes,) = out.axes
    drawn = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert list(drawn) == ["one GPU, fa4", "lightseq prefix", "ulysses-fa4", "lightseq ring"]
    assert [label for label, line in drawn.items() if line.get_linestyle() == "--"] == ["one GPU, fa4"]
    assert list(drawn["lightseq prefix"].get_xdata()) == list(LENGTHS)
    assert list(drawn["lightseq prefix"].get_ydata()) == [480.0, 600.0]
    assert list(drawn["lightseq ring"].get_xdata()) == [LENGTHS[0]]
    assert len({(to_hex(line.get_color()), line.get_marker()) for line in drawn.values()}) == 4
    assert axes.get_xscale() == "log" and axes.get_ylim()[0] == 0
    assert [text.get_text() for text in axes.get_xticklabels()] == ["16K", "128K"]
    assert [text.get_text() for text in out.legends[0].get_texts()] == list(drawn)


def test_one_length_is_a_bar_an_implementation_with_the_ceiling_through_all(
    tmp_path: Path, points: list[dict[str, Any]]
) -> None:
    (table,) = read_tables([write(tmp_path / "one.jsonl", [p for p in points if p["length"] == LENGTHS[1]])], [])
    (axes,) = figure(table).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one GPU, fa4", "lightseq prefix", "ulysses-fa4"]
    assert [bar.get_width() for bar in axes.patches] == [595.0, 600.0, 590.0]
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [list(line.get_xdata()) for line in dashed] == [[595.0, 595.0]]


def test_lines_may_be_chosen_and_ordered(file: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["attention", str(file), "--only", "ulysses-fa4", "one GPU, fa4"]) == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert rows == ["ulysses-fa4", "one GPU, fa4"]
    assert main(["attention", str(file), "--only", "ulyses"]) == 2
    assert "--only 'ulyses' is none of: one GPU, fa4, " in capsys.readouterr().err


def test_packed_documents_and_whole_sequences_are_not_one_point(tmp_path: Path, points: list[dict[str, Any]]) -> None:
    packed = [point | {"documents": "lognormal:0"} for point in points]
    titles = [table.title for table in read_tables([write(tmp_path / "both.jsonl", points + packed)], [])]
    assert len(titles) == 2 and titles[1] == f"{titles[0]}, documents lognormal:0"


def test_bars_run_from_the_slowest_repeat_to_the_fastest(file: Path) -> None:
    prefix = next(line for line in read_tables([file], [])[0].lines if line.label == "lightseq prefix")
    assert prefix.measured[0].bounds == (pytest.approx(480 / 1.1), pytest.approx(480 / 0.95))


def test_the_program_prints_the_table_and_draws_beside_the_file(file: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["attention", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| lightseq prefix | 480 |  600 |" in lines
    assert lines[-1] == str(file.parent / "attention.png")
    assert (file.parent / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_files_together_are_drawn_into_a_folder_of_their_own(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again = write(tmp_path / "b.jsonl", [record("lightseq", "ring", LENGTHS[1], 333.0)])
    assert main(["attention", str(file), str(again)]) == 0
    assert list(tmp_path.rglob("*.png")) == [tmp_path / "outputs" / "compare" / "attention.png"]


def test_every_setting_has_its_own_table_and_shares_the_ceiling(
    tmp_path: Path, points: list[dict[str, Any]], capsys: pytest.CaptureFixture
) -> None:
    more = [
        record("lightseq", "prefix", 16384, 470.0, world=2),
        record("lightseq", "prefix", 16384, 450.0, kv_heads=32),
    ]
    file = write(tmp_path / "a.jsonl", [*points, *more])
    tables = read_tables([file], [])
    assert [(t.setting.kv_heads, t.setting.world, len(t.lines)) for t in tables] == [(8, 2, 2), (8, 4, 4), (32, 4, 1)]
    assert main(["attention", str(file), "--output", str(tmp_path / "new")]) == 0
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == [f"attention-kv_heads-{kv}-world-{world}.png" for kv, world in ((32, 4), (8, 2), (8, 4))]
    assert "2 × NVIDIA H200, 32/8 heads" in capsys.readouterr().out


def test_a_point_measured_again_counts_as_it_was_last(tmp_path: Path, file: Path) -> None:
    again = write(tmp_path / "b.jsonl", [record("lightseq", "ring", LENGTHS[1], 333.0)])
    ring = read_tables([file, again], [])[0].lines[-1]
    assert (ring.label, [point.tflops for point in ring.points]) == ("lightseq ring", [240.0, 333.0])


def test_kernels_and_transports_are_named_where_they_differ(tmp_path: Path) -> None:
    ways = (480.0, "fa4", "symmetric"), (400.0, "cudnn", "symmetric"), (440.0, "fa4", "nccl")
    both = [record("lightseq", "prefix", 16384, rate, kernel=k, transport=t) for rate, k, t in ways]
    (table,) = read_tables([write(tmp_path / "a.jsonl", both)], [])
    assert [line.label for line in table.lines] == [
        "lightseq prefix, fa4, symmetric",
        "lightseq prefix, fa4, nccl",
        "lightseq prefix, cudnn, symmetric",
    ]


def test_a_last_line_cut_off_is_left_out(tmp_path: Path, points: list[dict[str, Any]]) -> None:
    file = write(tmp_path / "a.jsonl", points, tail='{"length": 16')
    assert len(read_tables([file], [])[0].lines) == 4


def test_a_garbled_line_and_a_file_of_something_else_are_named_and_the_rest_is_drawn(
    tmp_path: Path, points: list[dict[str, Any]], capsys: pytest.CaptureFixture
) -> None:
    file, other = write(tmp_path / "a.jsonl", points), tmp_path / "b.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join((first, rest[0][:30] + "\n", '{"length": 16384}\n', *rest)))
    other.write_text('{"step": 1}\n')
    assert main(["attention", str(file), str(other)]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[0].startswith(f"analysis: note: {file} lines 2, 3 are left out: line 2 is not JSON")
    assert err.splitlines()[1].startswith(f"analysis: note: left out: {other} line 1 has no 'heads'")
    assert str(tmp_path / "attention.png") in out and len(read_tables([file], [])[0].lines) == 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"benchmark": "attention"}\n', "no points"),
        ('{"length": 1\n{"length": 2}\n', "line 1 is not JSON"),
        ("[1]\n", "line 1 is not a record"),
        ('{"step": 1, "loss": 2.0}\n', "line 1 has no 'heads'"),
    ],
)
def test_what_is_no_benchmark_is_one_line_and_exit_2(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    assert main(["attention", str(tmp_path / "a.jsonl")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("analysis: error: ") and said in line


def test_errors_are_not_taken_for_times(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    checked = {key: value for key, value in record("lightseq", "ring", 64, 1.0).items() if key != "tflops_per_gpu"}
    assert main(["attention", str(write(tmp_path / "a.jsonl", [checked]))]) == 2
    assert "without --check" in capsys.readouterr().err


def test_a_run_in_a_directory_called_attention_is_a_run_still(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.chdir(tmp_path)
    assert main(["attention"]) == 0
    assert (tmp_path / "attention" / "loss.png").exists()
    assert main(["attention", file.name]) == 0
    assert "lightseq prefix" in capsys.readouterr().out


def test_a_missing_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["attention", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl is not there" in capsys.readouterr().err
