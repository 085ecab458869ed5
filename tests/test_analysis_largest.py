"""The largest models that fit, the next sizes beside them, and unfinished searches."""

from pathlib import Path

import pytest
from analysis_files import axes_of, limit, probe, write_lines
from programs import refusal, shown

from analysis.__main__ import main
from analysis.largest import BENCHMARK


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A search that ended, one that was cut off, and one of whole steps."""
    layers = {"strategy": "n_layers"}
    steps = {"what": "training", "tokens": 4096, "flags": "--remat full"}
    records = [probe(21, True), probe(22, False), limit(71_468_033_280, 82_426_353_152), probe(8, True, **layers)]
    return write_lines(tmp_path / "largest.jsonl", [*records, limit(9_000_000_000, 11_000_000_000, **steps)])


def test_the_table_and_the_picture_say_what_fits_and_what_is_too_large(file: Path) -> None:
    out = shown(main, "largest", file)
    assert "| weights only, all dimensions grow " in out and " 71,468,033,280 |       134.0 | 82,426,353,152 |" in out
    assert "| training steps, all dimensions grow, 4K tokens, --remat full |    1 |" in out
    assert "only layers grow, 1 GPU: search unfinished; scale 8 fits in 8.0 GiB per GPU so far." in out
    assert "Reasons for not fitting: out of memory." in out
    assert (file.parent / "largest.png").read_bytes().startswith(b"\x89PNG")


def test_bars_are_billions_of_parameters_with_whiskers_up_to_the_next_size(file: Path) -> None:
    (axes,) = axes_of(BENCHMARK, file)
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([71.46803328, 9.0])
    ends = [bars.get_segments()[0][1][0] for bars in axes.collections]
    assert ends == pytest.approx([82.426353152, 11.0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1 GPU, 134 GiB each"] * 2
    headings = [text.get_text().split(",")[0] for text in axes.texts if text.get_fontweight() == "bold"]
    assert headings == ["weights only", "training steps"]
    assert axes.figure.get_suptitle().splitlines()[:2] == ["1 × NVIDIA H200", "torch 2.11.0, commit 154d5c1"]


def test_a_repeated_search_counts_as_it_ended_last_and_devices_stay_apart(tmp_path: Path, file: Path) -> None:
    other = limit(10**10, None, hardware={"device": "NVIDIA H100"})
    again = write_lines(tmp_path / "again.jsonl", [limit(7 * 10**10, None), other])
    h200, h100 = shown(main, "largest", file, again, "--output", tmp_path / "new").split("NVIDIA H100\n")
    assert "| 70,000,000,000 |" in h200 and "71,468,033,280" not in h200 and "Reasons for not fitting" not in h100
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["largest-device-NVIDIA-H100.png", "largest-device-NVIDIA-H200.png"]


def test_another_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"benchmark": "step"}])
    assert "line 1 is not a record of benchmarks/largest.py" in refusal(main, "largest", path)
    write_lines(path, [{key: value for key, value in limit(1, 2).items() if key != "parameters"}])
    assert "line 1 has no 'parameters'" in refusal(main, "largest", path)
