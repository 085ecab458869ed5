"""Knows how the records of the benchmark of whole steps become a table and a picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.step import figure, markdown, remarks
from analysis.step_points import read_comparisons

GIB = 2**30
# label, length: tokens per second, GiB; None where it ran out of memory
RATES: dict[tuple[str, int], tuple[float, float] | None] = {
    ("lightseq", 32768): (108_000.0, 11.5),
    ("lightseq (remat none)", 32768): (121_000.0, 24.0),
    ("plain", 32768): (102_000.0, 11.7),
    ("accelerate", 32768): (48_700.0, 16.4),
    ("deepspeed", 32768): (39_500.0, 14.0),
    ("lightseq", 131072): (52_000.0, 14.9),
    ("lightseq (remat none)", 131072): None,
    ("plain", 131072): (50_800.0, 15.2),
    ("accelerate", 131072): (34_200.0, 54.5),
    ("deepspeed", 131072): (25_100.0, 16.0),
}


def record(label: str, length: int, measured: tuple[float, float] | None, **changes: Any) -> dict[str, Any]:
    """A point whose slowest step took a tenth longer than the median, the fastest a twentieth less."""
    rate, gib = measured or (None, None)
    return {
        "benchmark": "step", "implementation": label.split()[0], "label": label, "model": "llama3.2-1b", "layers": 16,
        "length": length, "world": 4, "dtype": "bfloat16", "tokens_per_second": rate,
        "tokens_per_second_lowest": rate and rate / 1.1, "tokens_per_second_highest": rate and rate / 0.95,
        "step_seconds": rate and length / rate, "mfu": rate and rate / 250_000,
        "model_tflops_per_gpu": rate and rate / 250,
        "peak_memory_allocated_bytes": gib and int(gib * GIB), "peak_memory_reserved_bytes": gib and int(gib * GIB),
        "first_loss": rate and 11.9, "last_loss": rate and 11.8 + length / 1e7, "losses_finite": rate and True,
        "skipped": None if rate else "out of memory", "hardware": {"device": "NVIDIA H200"},
    } | changes  # fmt: skip


def write(path: Path, points: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(point) + "\n" for point in points))
    return path


@pytest.fixture
def points() -> list[dict[str, Any]]:
    return [record(*key, measured) for key, measured in RATES.items()]


@pytest.fixture
def file(tmp_path: Path, points: list[dict[str, Any]]) -> Path:
    return write(tmp_path / "step.jsonl", points)


def test_the_table_has_the_fastest_of_every_length_first_and_its_ratio_to_the_plain_step(file: Path) -> None:
    (comparison,) = read_comparisons([file], [])
    assert markdown(comparison)[:6] == [
        "llama3.2-1b, 16 layers, 4 × NVIDIA H200, bfloat16",
        "",
        "|                       | tokens | tokens/s | ÷ plain |   MFU | peak GiB |",
        "|-----------------------|-------:|---------:|--------:|------:|---------:|",
        "| lightseq (remat none) |    32K |  121,000 |    1.19 | 48.4% |     24.0 |",
        "| lightseq              |    32K |  108,000 |    1.06 | 43.2% |     11.5 |",
    ]
    assert markdown(comparison)[-1] == "| lightseq (remat none) |   128K |        – |         |       |          |"


def test_remarks_say_how_steady_it_was_whether_losses_agree_and_what_is_missing(file: Path) -> None:
    (comparison,) = read_comparisons([file], [])
    assert remarks(comparison) == [
        "Medians. Widest spread: 14.4% of the median (lightseq (remat none), 32K).",
        "Last losses at 32K: 11.8033 to 11.8033.",
        "Last losses at 128K: 11.8131 to 11.8131.",
        "– lightseq (remat none), 128K: out of memory",
    ]


def test_losses_that_are_not_finite_are_pointed_out(tmp_path: Path) -> None:
    broken = record("plain", 1024, (10.0, 1.0), last_loss=None, losses_finite=False)
    (comparison,) = read_comparisons([write(tmp_path / "a.jsonl", [broken])], [])
    assert "Not finite: losses of plain, 1K. Its numbers do not count." in remarks(comparison)


def test_bars_stand_by_length_beside_their_memory_and_what_is_missing_says_why(file: Path) -> None:
    (comparison,) = read_comparisons([file], [])
    throughput, memory = figure(comparison).axes
    assert [tick.get_text() for tick in throughput.get_xticklabels()] == ["32K", "128K"]
    assert len(throughput.patches) == len(memory.patches) == len(RATES)
    heights = {patch.get_height() for patch in throughput.patches}
    assert heights == {measured[0] if measured else 0.0 for measured in RATES.values()}
    assert "out of memory" in [text.get_text().strip() for text in throughput.texts]
    assert "102k" in [text.get_text() for text in throughput.texts]


def test_without_gpus_there_is_no_memory_and_tflops_take_the_place_of_mfu(tmp_path: Path) -> None:
    changes = {"mfu": None, "peak_memory_allocated_bytes": None, "dtype": "float32"}
    (comparison,) = read_comparisons([write(tmp_path / "a.jsonl", [record("plain", 256, (500.0, 1.0), **changes)])], [])
    assert len(figure(comparison).axes) == 1
    assert "TFLOP/s" in markdown(comparison)[2]


def test_a_wide_range_is_drawn_on_a_logarithmic_axis(tmp_path: Path) -> None:
    points = [record("plain", n, (rate, 1.0)) for n, rate in ((32768, 100_000.0), (1 << 20, 3_000.0))]
    (comparison,) = read_comparisons([write(tmp_path / "a.jsonl", points)], [])
    assert figure(comparison).axes[0].get_yscale() == "log"


def test_a_later_record_of_a_point_counts_and_settings_stay_apart(
    tmp_path: Path, points: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    again = record("plain", 32768, (90_000.0, 11.0))
    deeper = record("plain", 131072, (47_500.0, 24.3), model="llama3-8b", layers=8)
    files = [write(tmp_path / "a.jsonl", points), write(tmp_path / "b.jsonl", [again, deeper])]
    eight, one = read_comparisons(files, [])
    assert (eight.setting.layers, len(eight.steps)) == (8, 1)
    floor = one.at(32768, "plain")
    assert floor is not None and floor.tokens_per_second == 90_000.0
    assert main(["step", *map(str, files), "--output", str(tmp_path / "new")]) == 0
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["step-model-llama3-8b-layers-8.png", "step-model-llama3.2-1b-layers-16.png"]
    assert "| plain |   128K |   47,500 |    1.00 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"benchmark": "attention"}', "line 1 is not a record of benchmarks/step.py"),
        ('{"benchmark": "step"}', "line 1 has no 'model'"),
        ("", "the benchmark has measured nothing yet"),
    ],
)
def test_other_files_are_refused_in_one_line(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    assert main(["step", str(tmp_path / "a.jsonl")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
