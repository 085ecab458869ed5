"""Baselines of the benchmarks: they are of records, the page shows them, and compare.py repeats and judges cells."""

import json
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT
from programs import refusal

from benchmarks import compare
from benchmarks.baseline_files import Cell, Measured, markdown, measured, read_cells
from benchmarks.records import read_lines

RECORDS = ROOT / "benchmarks" / "results"


def test_every_baseline_is_of_a_record() -> None:
    known = {tuple(measured(record).to_json().values()) for file in RECORDS.glob("*.jsonl") for record in timed(file)}
    cells = read_cells()
    assert len(cells) > 30
    for cell in cells.values():
        for device, baseline in cell.baselines.items():
            assert tuple(baseline[name] for name in Measured._fields) in known, (cell.name, device)


def timed(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a file that have a spread."""
    spread = ("tokens_per_second_lowest", "tflops_per_gpu")
    return [r for r in read_lines(file) if any(map(r.get, spread)) or isinstance(r.get("step_seconds"), list)]


def test_the_page_shows_the_baselines() -> None:
    shown = (ROOT / "dev" / "RESULTS.md").read_text().split("compare.py --table -->\n")[1].split("\n<!-- end")[0]
    assert shown == markdown(read_cells())


def test_every_cell_names_its_gpus_and_flags_that_its_benchmark_takes() -> None:
    from benchmarks import attention_flags, grpo, shared_prefix, step

    parsers = {"step.py": step.parse, "grpo.py": grpo.parse, "shared_prefix.py": shared_prefix.parse}
    for cell in read_cells().values():
        words = cell.command.split()
        assert f"nproc_per_node={cell.gpus}" in cell.command.replace("nproc_per_node ", "nproc_per_node="), cell.name
        program = next(word for word in words if word.startswith("benchmarks/")).removeprefix("benchmarks/")
        output = Path("none") / "none.jsonl"
        given = cell.words(output)
        given = given[next(i for i, word in enumerate(given) if word.endswith(program)) + 1 :]
        (attention_flags.parse if program == "attention.py" else parsers[program])(given)


def cell(unit: str = "tokens/s") -> Cell:
    return Cell("x", "about", 1, "python3 benchmarks/step.py", {}, unit, {})


@pytest.mark.parametrize(
    ("here", "unit", "slower"),
    [
        (94.0, "tokens/s", True),
        (96.0, "tokens/s", False),
        (106.0, "tokens/s", False),
        (106.0, "s", True),
        (94.0, "s", False),
    ],
)
def test_a_cell_is_slower_beyond_the_tolerance_and_outside_the_range(here: float, unit: str, slower: bool) -> None:
    base = Measured(100.0, 99.0, 101.0, 1.0)
    assert compare.is_slower(Measured(here, here, here, 1.0), base, cell(unit), 0.05) == slower
    assert not compare.is_slower(Measured(here, here, here, 1.0), Measured(100.0, 90.0, 110.0, 1.0), cell(unit), 0.05)


WRITER = """import json, sys
record = {"label": "lightseq", "skipped": None, "peak_memory_allocated_bytes": 2**30, "tokens_per_second": SPEED,
          "tokens_per_second_lowest": SPEED, "tokens_per_second_highest": SPEED}
open(sys.argv[sys.argv.index("--output") + 1], "w").write(json.dumps(record) + "\\n")
"""


def test_a_repeated_cell_is_judged_by_the_saved_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, program = tmp_path / "baselines", tmp_path / "writer.py"
    folder.mkdir()
    fields = {"about": "a", "gpus": 0, "select": {"label": "lightseq"}, "unit": "tokens/s", "baselines": {}}
    (folder / "tiny.json").write_text(json.dumps({**fields, "command": f"python3 {program}"}))

    def run(speed: float, *words: str) -> tuple[int, str]:
        program.write_text(WRITER.replace("SPEED", str(speed)))
        output = tmp_path / f"out-{speed}"
        status = compare.main(["--baselines", str(folder), "--output", str(output), *words])
        return status, capsys.readouterr().out

    status, said = run(100.0, "--save")
    assert status == 0 and "no baseline on" in said
    status, said = run(99.0)
    assert status == 0 and said.endswith("99 tokens/s, 1.0 GiB; baseline 100 tokens/s, 1.0 GiB; 0.99x, as fast\n")
    (folder / "large.json").write_text(json.dumps({**fields, "gpus": 9, "command": "python3 none.py"}))
    status, said = run(90.0)
    assert said.startswith("large                      left out: it needs 9 GPUs\n")
    assert status == 1 and said.endswith("0.90x, slower\n")
    (folder / "tiny.json").write_text((folder / "tiny.json").read_text().replace('"lightseq"', '"other"'))
    status, said = run(80.0)
    assert status == 1 and "failed: its command wrote no record; log" in said


def test_a_folder_without_cells_is_refused(tmp_path: Path) -> None:
    assert f"--baselines {tmp_path} has no cell" in refusal(compare.main, "--baselines", tmp_path)
