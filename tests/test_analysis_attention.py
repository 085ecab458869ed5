"""Records of the attention benchmark as a table and a picture."""

import json
from pathlib import Path
from typing import Any

import pytest
from analysis_files import attention_point, axes_of, write_lines
from matplotlib.colors import to_hex
from programs import refusal, shown

from analysis.__main__ import main
from analysis.attention import BENCHMARK

RATES = {
    ("single-gpu", ""): (640.0, 595.0),
    ("ulysses-fa4", ""): (460.0, 590.0),
    ("lightseq", "prefix"): (480.0, 600.0),
    ("lightseq", "ring"): (240.0, None),
}
LENGTHS = (16384, 131072)
HEADER = {"benchmark": "attention", "hardware": {"device": "NVIDIA H200"}}


POINTS = [
    attention_point(*key, n, rate) for key, rates in RATES.items() for n, rate in zip(LENGTHS, rates, strict=True)
]


def write(path: Path, points: list[dict[str, Any]]) -> Path:
    return write_lines(path, [HEADER, *points])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.jsonl", POINTS)


def test_the_ceiling_is_first_and_then_the_fastest_at_the_longest_length(file: Path) -> None:
    assert shown(main, "attention", file).splitlines() == [
        "4 × NVIDIA H200, 32/8 heads of 128, bfloat16",
        "",
        "| TFLOP/s per GPU | 16K | 128K |",
        "|-----------------|----:|-----:|",
        "| one GPU, fa4    | 640 |  595 |",
        "| lightseq prefix | 480 |  600 |",
        "| ulysses-fa4     | 460 |  590 |",
        "| lightseq ring   | 240 |    – |",
        "",
        "Medians. Widest spread: 15.0% of the median (one GPU, fa4, 16K).",
        "– lightseq ring, 128K: out of memory",
        "",
        str(file.with_suffix(".png")),
    ]
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_line_per_implementation_and_a_dashed_ceiling(file: Path) -> None:
    (axes,) = axes_of(BENCHMARK, file)
    drawn = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert list(drawn) == ["one GPU, fa4", "lightseq prefix", "ulysses-fa4", "lightseq ring"]
    assert [label for label, line in drawn.items() if line.get_linestyle() == "--"] == ["one GPU, fa4"]
    assert list(drawn["lightseq prefix"].get_xdata()) == list(LENGTHS)
    assert list(drawn["lightseq prefix"].get_ydata()) == [480.0, 600.0]
    assert list(drawn["lightseq ring"].get_xdata()) == [LENGTHS[0]]
    assert len({(to_hex(line.get_color()), line.get_marker()) for line in drawn.values()}) == 4
    assert axes.get_xscale() == "log" and axes.get_ylim()[0] == 0
    assert [text.get_text() for text in axes.get_xticklabels()] == ["16K", "128K"]
    bars = axes.collections[1].get_segments()  # of the second line, from the slowest repeat to the fastest
    assert [*bars[0][:, 1]] == [pytest.approx(480 / 1.1), pytest.approx(480 / 0.95)]


def test_one_length_is_a_bar_per_implementation_with_the_ceiling_through_all(tmp_path: Path) -> None:
    (axes,) = axes_of(
        BENCHMARK, write(tmp_path / "one.jsonl", [point for point in POINTS if point["length"] == LENGTHS[1]])
    )
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one GPU, fa4", "lightseq prefix", "ulysses-fa4"]
    assert [bar.get_width() for bar in axes.patches] == [595.0, 600.0, 590.0]
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [list(line.get_xdata()) for line in dashed] == [[595.0, 595.0]]


def test_every_setting_has_its_own_table_and_the_ceiling_is_in_all(tmp_path: Path) -> None:
    more = [
        attention_point("lightseq", "prefix", 16384, 470.0, world=2),
        attention_point("lightseq", "prefix", 16384, 450.0, kv_heads=32),
        attention_point("lightseq", "prefix", 16384, 440.0, documents="lognormal:0"),
        attention_point("lightseq", "prefix", 16384, 300.0, window=4096),
    ]
    lines = shown(
        main, "attention", write(tmp_path / "a.jsonl", [*POINTS, *more]), "--output", tmp_path / "new"
    ).splitlines()
    assert [line for line in lines if "NVIDIA H200" in line] == [
        "2 × NVIDIA H200, 32/8 heads of 128, bfloat16",
        "4 × NVIDIA H200, 32/8 heads of 128, bfloat16",
        "4 × NVIDIA H200, 32/8 heads of 128, bfloat16, window 4,096",
        "4 × NVIDIA H200, 32/8 heads of 128, bfloat16, documents lognormal:0",
        "4 × NVIDIA H200, 32/32 heads of 128, bfloat16",
    ]
    assert len([line for line in lines if line.startswith("| one GPU, fa4")]) == 2
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert "a-kv_heads-32-world-4.png" in names and len(names) == 5


def test_later_files_replace_points_and_several_are_drawn_into_a_shared_folder(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again = write(tmp_path / "b.jsonl", [attention_point("lightseq", "ring", LENGTHS[1], 333.0)])
    lines = shown(main, "attention", file, again).splitlines()
    assert "| lightseq ring   | 240 |  333 |" in lines and lines[-1] == "outputs/figures/attention-a-b/attention.png"
    assert list(tmp_path.rglob("*.png")) == [tmp_path / lines[-1]]


def test_kernels_and_transports_are_named_if_they_differ(tmp_path: Path) -> None:
    ways = (480.0, "fa4", "symmetric"), (400.0, "cudnn", "symmetric"), (440.0, "fa4", "nccl")
    both = [attention_point("lightseq", "prefix", 16384, rate, kernel=k, transport=t) for rate, k, t in ways]
    lines = shown(main, "attention", write(tmp_path / "a.jsonl", both)).splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| light")] == [
        "lightseq prefix, fa4, symmetric",
        "lightseq prefix, fa4, nccl",
        "lightseq prefix, cudnn, symmetric",
    ]


def test_unreadable_lines_and_files_are_noted_and_the_others_are_drawn(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = file.with_name("b.jsonl")
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join((first, rest[0][:30] + "\n", '{"length": 16384}\n', *rest)) + '{"length": 16')
    other.write_text('{"step": 1}\n')
    assert main(["attention", str(file), str(other)]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[0].startswith(f"analysis: note: {file} lines 2, 3, 12 are left out: line 2 is not JSON")
    assert err.splitlines()[1].startswith(f"analysis: note: left out: {other} line 1 has no 'heads'")
    assert out.splitlines()[-1] == str(file.with_suffix(".png")) and "| lightseq ring " in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(HEADER), "no measurements"),
        ("[1]\n", "line 1 is not a record"),
        ('{"step": 1, "loss": 2.0}\n', "line 1 has no 'heads'"),
        (json.dumps({key: POINTS[0][key] for key in POINTS[0] if "seconds" not in key}), "without --check"),
        (None, "a.jsonl does not exist"),
    ],
)
def test_other_files_are_one_line_and_exit_2(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    line = refusal(main, "attention", tmp_path / "a.jsonl")
    assert line.startswith("analysis: error: ") and message in line
