"""Records of the benchmark of whole steps as a table and a picture."""

from pathlib import Path

import pytest
from analysis_files import axes_of, step_point, write_lines
from programs import refusal, shown

from analysis.__main__ import main
from analysis.step import BENCHMARK

# label, length: tokens per second, GiB; None where it ran out of memory
RATES: dict[tuple[str, int], tuple[float, float] | None] = {
    ("lightseq", 32768): (108_000.0, 11.5),
    ("lightseq (remat none)", 32768): (121_000.0, 24.0),
    ("plain", 32768): (102_000.0, 11.7),
    ("deepspeed", 32768): (39_500.0, 14.0),
    ("lightseq", 131072): (52_000.0, 14.9),
    ("lightseq (remat none)", 131072): None,
    ("plain", 131072): (50_800.0, 15.2),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "step.jsonl", [step_point(*key, measured) for key, measured in RATES.items()])


def test_the_table_has_the_fastest_of_every_length_first_and_its_ratio_to_the_plain_step(file: Path) -> None:
    assert shown(main, "step", file).splitlines() == [
        "llama3.2-1b, 16 layers, 4 × NVIDIA H200, bfloat16",
        "",
        "|                       | tokens | tokens/s | ÷ plain |   MFU | peak GiB |",
        "|-----------------------|-------:|---------:|--------:|------:|---------:|",
        "| lightseq (remat none) |    32K |  121,000 |    1.19 | 48.4% |     24.0 |",
        "| lightseq              |    32K |  108,000 |    1.06 | 43.2% |     11.5 |",
        "| plain                 |    32K |  102,000 |    1.00 | 40.8% |     11.7 |",
        "| deepspeed             |    32K |   39,500 |    0.39 | 15.8% |     14.0 |",
        "| lightseq              |   128K |   52,000 |    1.02 | 20.8% |     14.9 |",
        "| plain                 |   128K |   50,800 |    1.00 | 20.3% |     15.2 |",
        "| lightseq (remat none) |   128K |        – |         |       |          |",
        "",
        "Medians. Widest spread: 14.4% of the median (lightseq (remat none), 32K).",
        "Last losses at 32K: 11.8033 to 11.8033.",
        "Last losses at 128K: 11.8131 to 11.8131.",
        "– lightseq (remat none), 128K: out of memory",
        "",
        str(file.parent / "step.png"),
    ]


def test_bars_stand_by_length_beside_their_memory_and_missing_ones_say_why(file: Path) -> None:
    throughput, memory = axes_of(BENCHMARK, file)
    names = ["lightseq (remat none)", "lightseq", "plain", "deepspeed", "lightseq", "plain", "lightseq (remat none)"]
    assert [tick.get_text() for tick in throughput.get_yticklabels()] == names, "the fastest first"
    measured = [numbers for numbers in RATES.values() if numbers]
    for i, axes in enumerate((throughput, memory)):
        heights = [patch.get_width() for patch in axes.patches]
        shown = sorted(height for height in heights if height > 0)
        assert shown == pytest.approx(sorted(numbers[i] for numbers in measured))
    words = [text.get_text().strip() for text in throughput.texts]
    assert {"32K tokens", "128K tokens", "out of memory", "102k"} <= set(words)


def test_without_gpus_memory_is_left_out_and_tflops_replace_mfu(tmp_path: Path) -> None:
    changes = {"mfu": None, "peak_memory_allocated_bytes": None, "last_loss": None, "losses_finite": False}
    file = write_lines(tmp_path / "a.jsonl", [step_point("plain", 1024, (500.0, 1.0), **changes)])
    out = shown(main, "step", file)
    assert "model TFLOP/s per GPU" in out and "Not finite: losses of plain, 1K. Ignore its numbers." in out
    assert len(axes_of(BENCHMARK, file)) == 1


def test_a_wide_range_is_drawn_on_a_logarithmic_axis(tmp_path: Path) -> None:
    points = [step_point("plain", n, (rate, 1.0)) for n, rate in ((32768, 100_000.0), (1 << 20, 3_000.0))]
    assert axes_of(BENCHMARK, write_lines(tmp_path / "a.jsonl", points))[0].get_xscale() == "log"


def test_a_later_record_replaces_an_earlier_one_and_settings_stay_apart(tmp_path: Path, file: Path) -> None:
    again = step_point("plain", 32768, (90_000.0, 11.0))
    deeper = step_point("plain", 131072, (47_500.0, 24.3), model="llama3-8b", layers=8)
    other = write_lines(tmp_path / "b.jsonl", [again, deeper])
    out = shown(main, "step", file, other, "--output", tmp_path / "new")
    assert "| plain |   128K |   47,500 |    1.00 |" in out and "|   90,000 |" in out and "|  102,000 |" not in out
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["step-model-llama3-8b-layers-8.png", "step-model-llama3.2-1b-layers-16.png"]


def test_packed_rows_and_adapters_have_tables_of_their_own(tmp_path: Path, file: Path) -> None:
    packed = step_point("lightseq", 32768, (90_000.0, 11.0), packed_rows=8192, lora_rank=16)
    out = shown(main, "step", file, write_lines(tmp_path / "b.jsonl", [packed]), "--output", tmp_path)
    plain, own = out.split("bfloat16, packed documents of 8K, LoRA of rank 16\n")
    assert "| 108,000 |" in plain.replace("  ", " ") and "90,000" not in plain
    assert "90,000" in own and "108,000" not in own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"benchmark": "attention"}', "line 1 is not a record of benchmarks/step.py"),
        ('{"benchmark": "step"}', "line 1 has no 'model'"),
        ("", "run the benchmark first"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    assert message in refusal(main, "step", tmp_path / "a.jsonl")
