"""Knows what the page of results must hold, and that nothing in the results can break out of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from analysis_files import about, record, write_lines, write_run

from analysis.__main__ import main
from analysis.blocks import POINTS, embedded, plain, thinned
from analysis.report import find, page, sections_of

EVIL = "</script><script>document.title='broken'</script><!--<img src=x onerror=alert(1)>&amp;\u2028"
ATTENTION: dict[str, Any] = {
    "world": 4, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "batch": 1, "kernel": "fa4",
    "transport": "symmetric", "peak_memory_bytes": 2**30, "exposed_communication_seconds": None, "skipped": None,
}  # fmt: skip


def attention_point(request: str, length: int, tflops: float) -> dict[str, Any]:
    times = {"seconds_min": 0.9, "seconds_median": 1.0, "seconds_max": 1.1}
    point = {"implementation": "lightseq", "request": request, "length": length, "tflops_per_gpu": tflops}
    return ATTENTION | times | point


def error_point() -> dict[str, Any]:
    errors = {f"relative_error_{name}": 2e-3 for name in ("out", "dq", "dk", "dv")}
    return ATTENTION | errors | {"implementation": "lightseq", "request": "ring", "length": 2048} | {
        "worst_error_over_single_gpu": 1.02
    }  # fmt: skip


def header(date: str = "2026-01-01", device: str = "NVIDIA H200") -> dict[str, Any]:
    return {"benchmark": "attention", "command": "attention.py", "date": date, "hardware": {"device": device}}


def step_point(label: str, rate: float | None) -> dict[str, Any]:
    return {
        "benchmark": "step", "implementation": label, "label": label, "model": "llama3.2-1b", "layers": 16,
        "length": 32768, "world": 4, "dtype": "bfloat16", "tokens_per_second": rate,
        "tokens_per_second_lowest": rate, "tokens_per_second_highest": rate, "mfu": rate and 0.4,
        "model_tflops_per_gpu": rate and 400.0, "peak_memory_allocated_bytes": rate and 2**34,
        "first_loss": rate and 11.9, "last_loss": rate and 11.8, "losses_finite": rate and True,
        "skipped": None if rate else "out of memory", "hardware": {"device": "NVIDIA H200"}, "command": "step.py",
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two runs, one of them a sweep's cell, and a file of every benchmark."""
    slow = [record(step, tokens_per_second=900.0 if step > 1 else 100.0) for step in range(1, 41)]
    write_run(tmp_path / "plain", slow, about(config={"fsdp": ""}), tail='{"step": 40, "eval_loss": 5.5}\n')
    write_run(tmp_path / "sweep" / "length-4096", [record(step, gpu=True) for step in range(1, 41)], about(gpu=True))
    cell = {"name": "length-4096", "status": "done", "seconds": 20.0, "error": None, "ranks": 2, "command": "train.py"}
    broken = {"name": "length-8192", "status": "failed", "seconds": 3.0, "error": EVIL, "ranks": 2, "command": "x"}
    cell |= {"output_dir": "elsewhere/length-4096", "flags": {"model_max_length": "4096", "seed": "1", "fsdp": ""}}
    broken |= {
        "output_dir": "elsewhere/length-8192",
        "flags": {"model_max_length": "8192", "seed": "1", "fsdp": "full_shard"},
    }
    write_lines(tmp_path / "sweep" / "sweep.jsonl", [cell, broken])
    points = [attention_point("ring", 16384, 300.0), attention_point("ring", 32768, 400.0)]
    write_lines(tmp_path / "bench" / "attention.jsonl", [header(), *points])
    write_lines(tmp_path / "bench" / "errors.jsonl", [header(), error_point()])
    write_lines(tmp_path / "bench" / "step.jsonl", [step_point("plain", 100.0), step_point("lightseq", None)])
    return tmp_path


def data_of(html: str) -> dict[str, Any]:
    """What the page's script reads, taken as a browser does: up to the first end tag."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', html, re.DOTALL | re.IGNORECASE)
    return json.loads(text)


def test_a_page_of_another_program_is_not_replaced(results: Path, capsys: pytest.CaptureFixture) -> None:
    (results / "report.html").write_text("<title>My own</title>")
    assert main(["report", str(results)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "report.html is there and was not written by analysis report; name another" in line
    assert (results / "report.html").read_text() == "<title>My own</title>"
    for _ in range(2):
        assert main(["report", str(results), "--output", str(results / "page.html")]) == 0


def test_everything_below_the_directory_is_on_the_page(results: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(results)]) == 0
    assert "2 training runs, 1 sweep, 3 benchmark files" in capsys.readouterr().out
    data = data_of((results / "report.html").read_text())
    titles = ["Training runs", "Sweep: sweep", "Attention layer", "Errors of the attention layer"]
    assert [section["title"] for section in data["sections"]] == [*titles, "Whole training steps"]
    runs, sweep = data["sections"][:2]
    assert [row[0] for row in runs["blocks"][0]["rows"]] == ["plain", "sweep/length-4096"]
    assert sweep["blocks"][0]["columns"][:5] == ["cell", "status", "ranks", "model_max_length", "fsdp"]  # one seed
    assert [row[4] for row in sweep["blocks"][0]["rows"]] == ["off (DDP)", "full_shard"]
    assert sweep["blocks"][0]["rows"][0][5] == {"text": "8,192", "value": 8192.0}
    assert data["left_out"] == []


def test_charts_hold_the_numbers_and_leave_out_what_a_run_does_not_know(results: Path) -> None:
    sections = plain(sections_of(find(results), results))
    charts = {chart["title"]: chart for chart in sections[0]["blocks"][1]["charts"]}
    assert [one["entry"] for one in charts["MFU"]["series"]] == [1]
    assert charts["MFU"]["series"][0]["y"] == [40.0] * 40
    assert charts["Throughput"]["series"][0]["y"][:2] == [100.0, 900.0]
    loss = charts["Training loss"]["series"][0]
    assert (loss["raw"][:2], loss["marks"]) == ([5.99, 5.98], [[40.0, 5.5]])
    bars = sections[4]["blocks"][0]["charts"][0]["groups"]
    assert [(bar["value"], bar["why"]) for bar in bars[0][1]] == [(None, "out of memory"), (100.0, "")]


def test_flags_that_the_command_names_are_marked_and_come_first(results: Path) -> None:
    sections = plain(sections_of(find(results), results))
    parts = {part["title"].split(";")[0]: part for part in sections[0]["blocks"][2]["parts"]}
    flags = [(fact["name"], fact["named"]) for fact in parts["Flags"]["facts"]]
    assert flags[:4] == [("model_name_or_path", True), ("max_steps", True), ("fsdp", True), ("data_path", False)]
    assert {"Command", "Chosen", "Hardware and commit", "Versions", "Model config"} <= parts.keys()
    assert ("commit", "0123abcd") in [(fact["name"], fact["value"]) for fact in parts["Hardware and commit"]["facts"]]


def test_nothing_in_the_results_can_end_the_script_it_stands_in(results: Path) -> None:
    write_run(results / "evil", [record(1)], about(command=f"train.py --x '{EVIL}'", notes=[EVIL]))
    html = page(EVIL, sections_of(find(results), results), [EVIL])
    assert html.lower().count("</script") == 2  # of the data and of the program
    assert "<img" not in html and "<!--" not in html
    assert html.count("<title>") == 1 and "<title>&lt;/script&gt;" in html
    assert data_of(html)["left_out"] == [EVIL]


def test_the_page_asks_for_nothing_from_anywhere(results: Path) -> None:
    assert main(["report", str(results), "--output", str(results / "new" / "page.html")]) == 0
    html = (results / "new" / "page.html").read_text()
    assert "default-src 'none'" in html
    assert set(re.findall(r"https?://[^\s\"']+", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.findall(r"(?:src|href)=", html.split('id="data"')[0])


def test_unreadable_files_are_named_on_the_page_and_the_others_are_shown(
    results: Path, capsys: pytest.CaptureFixture
) -> None:
    write_run(results / "started", [])
    for name in ("other", "another"):
        write_lines(results / "bench" / f"{name}.jsonl", [{"text": "a document"}])
    write_lines(results / "bench" / "torn.jsonl", [{"benchmark": "step"}])
    assert main(["report", str(results)]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 3 and all(note.startswith("analysis: note: not shown: ") for note in notes)
    assert "bench/another.jsonl, bench/other.jsonl are of another kind than this page shows" in notes[-1]
    assert len(data_of((results / "report.html").read_text())["left_out"]) == 3


def test_garbled_lines_are_told_and_what_is_around_them_is_shown(results: Path, capsys: pytest.CaptureFixture) -> None:
    for path in (*results.rglob("*.jsonl"),):
        path.write_text("{garbled\n" + path.read_text())
    assert main(["report", str(results)]) == 0
    out, err = capsys.readouterr()
    assert "2 training runs, 1 sweep, 3 benchmark files" in out
    assert err.count("line 1 is not JSON") == 6
    text = (results / "report.html").read_text()
    assert text.count("line 1 is not JSON") == 6


def test_without_scripts_the_page_says_so_and_what_it_is_of(results: Path) -> None:
    text = page("Results & more", sections_of(find(results), results), [])
    shown = re.sub(r"<[^>]+>", "", text.split("<main")[1].split("</main>")[0])
    assert "Results &amp; more" in shown and "of: Training runs, Sweep: sweep, Attention layer, " in shown
    assert "JavaScript is off or blocked here" in shown
    assert '.replaceChildren(el("h1"' in text, "the script puts the tables in the place of that"


def test_what_is_missing_is_said_in_plain_words(tmp_path: Path) -> None:
    write_run(tmp_path / "bare", [record(1)])
    write_run(tmp_path / "old", [record(1)], {k: v for k, v in about(commit=None).items() if k != "hardware"})
    write_run(tmp_path / "died", [], about()).joinpath("metrics.jsonl").unlink()
    write_lines(tmp_path / "other.jsonl", [{"text": "a document"}])
    cells = [{"name": name, "status": status, "flags": {}, "output_dir": name}
             for name, status in (("bare", "done"), ("away", "done"), ("broken", "failed"))]  # fmt: skip
    write_lines(tmp_path / "sweep.jsonl", cells)
    found = find(tmp_path)
    assert f"{tmp_path / 'died'} has a run.json and no metrics.jsonl; the run has logged no step" in found.left_out
    assert any("other.jsonl is of another kind than this page shows (runs, sweeps, " in line for line in found.left_out)
    runs, sweep = plain(sections_of(found, tmp_path))
    assert (
        runs["blocks"][0]["rows"][0][1] == runs["blocks"][0]["rows"][0][-1] == {"text": "not recorded", "value": None}
    )
    bare, old = (block["parts"] for block in runs["blocks"] if block["kind"] == "details")
    assert [part["title"] for part in bare] == [
        "No run.json beside the metrics: flags, hardware and versions are not known."
    ]
    facts = {part["title"]: [(fact["name"], fact["value"]) for fact in part["facts"]] for part in old}
    assert facts["Hardware and commit"] == [("device", "not recorded"), ("commit", "not recorded")]
    speed, _ = (chart["groups"][0][1] for chart in sweep["blocks"][1]["charts"])
    assert [bar["why"] for bar in speed] == ["", "its run is not below this directory", "failed"]


def test_a_directory_with_nothing_to_show_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "nothing to show" in lines[0] and "is no directory" in lines[1]
    assert not (tmp_path / "report.html").exists()


def test_devices_are_never_joined_and_the_later_measurement_counts(tmp_path: Path) -> None:
    points = {"a": ("2026-03-01", "NVIDIA H200", 500.0), "b": ("2026-02-01", "NVIDIA H200", 100.0)}
    points["c"] = ("2026-04-01", "NVIDIA H100", 300.0)
    for name, (date, device, tflops) in points.items():
        write_lines(tmp_path / f"{name}.jsonl", [header(date, device), attention_point("ring", 16384, tflops)])
    (section,) = plain(sections_of(find(tmp_path), tmp_path))
    tables = {block["title"][4:15]: block["rows"] for block in section["blocks"] if block["kind"] == "table"}
    assert {device: rows[0][1]["value"] for device, rows in tables.items()} == {
        "NVIDIA H100": 300.0,
        "NVIDIA H200": 500.0,
    }


def test_checkpoints_and_hidden_folders_are_passed_over(tmp_path: Path) -> None:
    for name in ("checkpoint-10", ".cache"):
        write_run(tmp_path / name, [record(1)])
    assert not find(tmp_path).runs


def test_long_runs_are_thinned_evenly_and_keep_their_end() -> None:
    assert list(thinned(4)) == [0, 1, 2, 3]
    kept = thinned(100_000)
    assert (len(kept), kept[0], kept[-1]) == (POINTS, 0, 99_999)


def test_what_is_no_number_becomes_null() -> None:
    assert json.loads(embedded([float("nan"), float("inf"), 1.23456789, range(2)])) == [None, None, 1.23457, [0, 1]]
