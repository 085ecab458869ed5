"""The page of results: what is on it, that it needs no network, and that nothing in the results breaks out of it."""

import gzip
import html
import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import yaml
from analysis_files import about, attention_point, limit, record, step_point, write_lines, write_run
from cases import slow_except
from programs import refusal

from analysis.__main__ import main

EVIL = "</script><script>document.title='broken'</script><!--<img src=x onerror=alert(1)>&amp;\u2028"
BROWSER = next(
    (path for name in ("chromium", "chromium-headless-shell", "google-chrome") if (path := shutil.which(name))), None
)


def header(date: str = "2026-01-01", device: str = "NVIDIA H200") -> dict[str, Any]:
    return {"benchmark": "attention", "command": "attention.py", "date": date, "hardware": {"device": device}}


OTHER_RECORDS: dict[str, list[dict[str, Any]]] = {
    "books/evaluation.jsonl": [
        {"evaluation": "loss", "loss": 2.3, "perplexity": 9.97, "command": "lightseq evaluate books", "model": "m"},
        {"first": 0, "last": 1023, "loss": 2.4, "perplexity": 11.02, "valid_tokens": 900},
        {"first": 1024, "last": 4095, "loss": 2.2, "perplexity": 9.025, "valid_tokens": 2900},
    ],
    "needle/evaluation.jsonl": [
        {"evaluation": "needle", "score": "greedy", "choices": None, "trials": 4, "accuracy": 0.5},
        {"length": 1024, "depth": 0.0, "accuracy": 1.0},
        {"length": 4096, "depth": 0.0, "accuracy": 0.75},
    ],
    "checked/verify.jsonl": [
        {"command": "lightseq verify --bf16", "seconds": 2.5, "passed": False, "versions": {"torch": "2.11.0"}},
        {"check": "loss", "status": "pass", "detail": "off by 1e-7", "error": 1e-7},
        {"check": "gradients", "status": "FAIL", "detail": EVIL},
    ],
    "plans/8b.jsonl": [
        {
            "plan": "training", "command": "lightseq plan --gpus 8", "fits": False, "peak_bytes": 150 * 2**30,
            "usable_gpu_bytes": 131 * 2**30, "host_bytes": 20 * 2**30, "step_seconds": 222.2, "mfu": 0.52,
            "tokens_per_second": 4729.1, "longest_length": 524288, "schedule": "usp", "faster": [],
            "to_fit": [{"change": "--offload activations", "peak_bytes": 2**36, "step_seconds": 240.0}], "notes": [],
            "hardware": {"gpus": 8, "chip": {"device": "NVIDIA H200"}},
            "config": {"model_name_or_path": "llama3-8b", "model_max_length": 1048576},
        }
    ],
}  # fmt: skip


def write_results(tmp_path: Path) -> Path:
    """Two runs, one of them a sweep's cell, and a file of every other kind."""
    slow = [record(step, tokens_per_second=900.0 if step > 1 else 100.0) for step in range(1, 41)]
    write_run(tmp_path / "plain", slow, about(config={"fsdp": ""}), tail='{"step": 40, "eval_loss": 5.5}\n')
    write_run(tmp_path / "sweep" / "length-4096", [record(step, gpu=True) for step in range(1, 41)], about(gpu=True))
    cell = {"name": "length-4096", "status": "done", "seconds": 20.0, "error": None, "ranks": 2, "command": "train.py"}
    broken = {"name": "length-8192", "status": "failed", "seconds": 3.0, "error": EVIL, "ranks": 2, "command": "x"}
    cell |= {"output_dir": "away/length-4096", "flags": {"model_max_length": "4096", "seed": "1", "fsdp": ""}}
    broken |= {"output_dir": "away/length-8192", "flags": {"model_max_length": "8192", "seed": "1", "fsdp": "shard"}}
    write_lines(tmp_path / "sweep" / "sweep.jsonl", [cell, broken])
    write_lines(
        tmp_path / "bench" / "attention.jsonl",
        [header(), *(attention_point("lightseq", "ring", n, rate) for n, rate in ((16384, 3e2), (32768, 4e2)))],
    )
    write_lines(
        tmp_path / "bench" / "step.jsonl",
        [step_point("plain", 32768, (100.0, 16.0), command="step.py"), step_point("lightseq", 32768, None)],
    )
    write_lines(tmp_path / "bench" / "largest.jsonl", [limit(71 * 10**9, 82 * 10**9)])
    for name, values in OTHER_RECORDS.items():
        write_lines(tmp_path / name, values)
    return tmp_path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return write_results(tmp_path)


class Page:
    """A page as a browser reads it: a script ends at the first end tag, and the rest is markup."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8")
        self.scripts = re.findall(r"<script[^>]*>(.*?)</script", self.text, re.DOTALL)
        self.markup = re.sub(r"<script[^>]*>.*?</script>", "", self.text, flags=re.DOTALL)
        self.titles, self.details = self.elements("h2"), self.elements("pre")
        rows = re.findall("<tr>(.*?)</tr>", self.markup, re.DOTALL)
        self.rows = [[html.unescape(cell) for cell in re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]

    def elements(self, tag: str) -> list[str]:
        return [html.unescape(text) for text in re.findall(f"<{tag}>(.*?)</{tag}>", self.markup, re.DOTALL)]

    @property
    def charts(self) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
        """Traces and layout of each chart."""
        charts = [json.loads(script) for script in self.scripts if script.startswith('{"data":')]
        return [(chart["data"], chart["layout"]) for chart in charts]

    def panel(self, title: str) -> list[dict[str, Any]]:
        """Returns the traces below the first subtitle of that name."""
        for traces, layout in self.charts:
            titles = [each["text"] for each in layout.get("annotations", ())]
            if title in titles:
                axis = f"x{titles.index(title) + 1 if titles.index(title) else ''}"
                return [trace for trace in traces if trace["xaxis"] == axis]
        raise KeyError(title)


def page_of(directory: Path) -> Page:
    assert main(["report", str(directory)]) == 0
    return Page(directory / "report.html")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of the results, made once for the tests that only read it."""
    return page_of(write_results(tmp_path_factory.mktemp("results")))


def test_everything_below_the_directory_is_on_the_page(page: Page) -> None:
    titles = ["Training runs", "Sweep: sweep", "Evaluations", "Verifications", "Plans"]
    titles.append("Attention layer, forward and backward")
    assert page.titles == [*titles, "Whole training steps", "The largest model that fits"]
    rows = {row[0]: row for row in reversed(page.rows)}  # the first of each name
    assert rows["plain"][1:4] == ["tiny-llama3", "2", "4K"] and "900" in rows["plain"]
    assert rows["length"][:3] == ["length", "fsdp", "status"], "the seed is the same in all"
    assert "The same in all rows that know it: ranks: 2; steps: 40; " in page.text
    assert rows["4096"][1:3] == ["off (DDP)", "done"]
    assert rows["8192"][1:3] == ["shard", "failed"] and "tokens per second, median: 8,192; " in page.text
    assert ["lightseq ring", "300", "400"] in page.rows
    assert ["plain", "32K", "100", "1.00", "0.0%", "16.0"] in page.rows
    assert "– lightseq, 32K: out of memory" in page.text and "Reasons for not fitting: out of memory." in page.text


def test_evaluations_verifications_and_plans_have_tables_and_commands(page: Page) -> None:
    assert {"Perplexity by position", "Needle: needle", "checked: FAILED"} <= set(page.elements("h3"))
    assert ["1,024 to 4,095", "9.025"] in page.rows and ["0%", "1.00", "0.75"] in page.rows
    assert ["loss", "pass", "off by 1e-7"] in page.rows and ["gradients", "FAIL", EVIL] in page.rows
    (plan,) = (row for row in page.rows if row[0] == "plans/8b.jsonl")
    assert plan[1:7] == ["llama3-8b", "1M", "8", "NVIDIA H200", "usp", "no"]
    assert plan[7:] == ["150.0", "131.0", "20.0", "222 s", "4,729", "52.0%", "524,288"]
    for command in ("lightseq evaluate books", "lightseq verify --bf16", "lightseq plan --gpus 8"):
        assert command in page.details
    assert any("--offload activations" in text for text in page.details)


@pytest.mark.parametrize("name", slow_except(["needle/evaluation.jsonl"], OTHER_RECORDS))
def test_a_file_with_missing_facts_is_named_and_the_page_is_written(
    results: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {key: OTHER_RECORDS[name][0][key] for key in list(OTHER_RECORDS[name][0])[:1]}
    write_lines(results / name, [first])
    page = page_of(results)
    assert name in capsys.readouterr().err and page.titles[-1] == "Not shown"


def test_charts_hold_the_numbers_and_leave_out_what_a_run_does_not_have(page: Page) -> None:
    assert len(page.charts) == 2, "curves of the run and of the sweep"
    assert page.markup.count('<img src="data:image/png;base64,') == 5, "of three benchmarks and two evaluations"
    smoothed, logged, evaluation = page.panel("Training loss")
    assert logged["y"][:2] == [5.99, 5.98] and smoothed["name"] == "plain"
    assert (evaluation["x"], evaluation["y"]) == ([40.0], [5.5])
    (speed,) = page.panel("Throughput")
    assert speed["y"][:2] == [100.0, 900.0]
    (mfu,) = page.panel("Model FLOPs utilization (MFU)")
    assert mfu["name"] == "length-4096" and mfu["y"] == [40.0] * 40, "the other run knows none"
    for traces, layout in page.charts:
        axes = [value for key, value in layout.items() if re.match("[xy]axis", key)]
        assert all(trace["name"] for trace in traces if trace.get("showlegend"))
        assert any(axis.get("title", {}).get("text") for axis in axes)


def test_details_have_the_command_the_flags_and_the_machine(page: Page) -> None:
    command, info, *_, benchmark = page.details
    assert command == "llama3/train.py --model_name_or_path tiny-llama3 --fsdp full_shard --max_steps=40"
    values = yaml.safe_load(info)
    assert values["config"]["fsdp"] == "" and values["hardware"]["device"] == "cpu" and values["commit"] == "0123abcd"
    assert yaml.safe_load(benchmark).keys() == {"commit", "hardware", "versions"}


def test_nothing_in_the_results_breaks_out_of_the_page(results: Path) -> None:
    command = f"train.py --x '{EVIL}'"
    write_run(results / "<b onclick=x>", [record(1)], about(command=command, notes=[EVIL], config={"fsdp": EVIL}))
    page = page_of(results)
    assert page.markup.count("<img") == 5 and "<b onclick" not in page.markup and page.markup.count("<title>") == 1
    assert len(page.charts) == 2 and command in page.details


def test_axes_have_few_ticks_and_show_model_flops(page: Page) -> None:
    assert page.panel("Model FLOP/s") and "arithmetic" not in page.markup
    layout = page.charts[0][1]
    assert all(axis["nticks"] == 7 for key, axis in layout.items() if re.match("[xy]axis", key))
    low, high = layout["yaxis"]["range"]
    assert low < 5.5 and high > 5.99, "the loss axis holds every loss"


def test_the_page_asks_for_nothing_from_anywhere(page: Page) -> None:
    assert "default-src 'none'" in page.text
    assert all(link.startswith(("#", "data:")) for link in re.findall(r'(?:src|href)="([^"]*)', page.markup))
    packed = b64decode(page.scripts[-2])
    assert b"* plotly.js v" in gzip.decompress(packed) and len(page.text) < 2.5 * 2**20


@pytest.mark.slow
def test_another_page_is_not_replaced(results: Path) -> None:
    (results / "report.html").write_text("<title>My own</title>")
    line = refusal(main, "report", results)
    assert "report.html exists and was not written by analysis report; give another" in line
    assert (results / "report.html").read_text() == "<title>My own</title>"
    for _ in range(2):
        assert main(["report", str(results), "--output", str(results / "new" / "page.html")]) == 0


def test_unreadable_files_are_named_and_the_others_are_shown(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(results / "started", [])
    write_run(results / "died", [], about()).joinpath("metrics.jsonl").unlink()
    for name in ("other", "another"):
        write_lines(results / "bench" / f"{name}.jsonl", [{"text": "a document"}])
    write_lines(results / "bench" / "torn.jsonl", [{"benchmark": "step"}])
    for name in ("checkpoint-10", ".cache"):
        write_run(results / name, [record(1)])
    page = page_of(results)
    out, err = capsys.readouterr()
    notes = err.splitlines()
    assert len(notes) == 4 and all(note.startswith("analysis: note: not shown: ") for note in notes)
    assert f"{results / 'died'} has a run.json but no metrics.jsonl; the run has logged no step" in err
    assert "not shown: 2 other files, listed on the page; it shows runs, sweeps, " in notes[-1]
    assert page.titles[-1] == "Not shown" and "bench/another.jsonl is another kind of file" in page.text
    assert "bench/torn.jsonl line 1 has no" in page.text
    assert "2 training runs" in out, "neither a checkpoint's nor a hidden one"


@pytest.mark.slow
def test_garbled_lines_are_noted_and_the_others_are_shown(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in results.rglob("*.jsonl"):
        path.write_text("{garbled\n" + path.read_text())
    page = page_of(results)
    out, err = capsys.readouterr()
    assert "2 training runs, 1 sweep, 3 benchmark files, 2 evaluations, 1 verification, 1 plan" in out
    assert err.count("line 1 is not JSON") == page.text.count("line 1 is not JSON") == 10


def test_missing_facts_are_said_in_words(tmp_path: Path) -> None:
    write_run(tmp_path / "bare", [record(1)])
    write_run(tmp_path / "old", [record(1)], {k: v for k, v in about(commit=None).items() if k != "hardware"})
    cells = [{"name": name, "status": status, "flags": {}, "output_dir": name}
             for name, status in (("bare", "done"), ("away", "done"), ("broken", "failed"))]  # fmt: skip
    write_lines(tmp_path / "sweep.jsonl", cells)
    page = page_of(tmp_path)
    assert "No run.json beside the metrics: flags, hardware and versions are unknown." in page.details
    rows = {row[0]: row[1] for row in page.rows}
    assert rows["away"] == "done; run not found below this directory" and rows["broken"] == "failed"


def test_a_directory_with_nothing_to_show_is_one_line_and_exit_2(tmp_path: Path) -> None:
    assert "nothing to show" in refusal(main, "report", tmp_path)
    assert "is not a directory" in refusal(main, "report", tmp_path / "nowhere")
    assert not (tmp_path / "report.html").exists()


def test_devices_are_never_joined_and_the_later_measurement_counts(tmp_path: Path) -> None:
    points = {"a": ("2026-03-01", "NVIDIA H200", 500.0), "b": ("2026-02-01", "NVIDIA H200", 100.0)}
    points["c"] = ("2026-04-01", "NVIDIA H100", 300.0)
    for name, (date, device, tflops) in points.items():
        write_lines(
            tmp_path / f"{name}.jsonl", [header(date, device), attention_point("lightseq", "ring", 16384, tflops)]
        )
    page = page_of(tmp_path)
    assert [row[1] for row in page.rows if row[0] == "lightseq ring"] == ["300", "500"]
    assert re.findall(r"<h3>4 × (NVIDIA H\d+)", page.text) == ["NVIDIA H100", "NVIDIA H200"]


def test_long_runs_are_thinned_evenly_and_unknown_numbers_are_gaps(tmp_path: Path) -> None:
    write_run(tmp_path / "long", [record(step, loss=None if step == 1 else 2.0) for step in range(1, 5001)])
    write_run(tmp_path / "short", [record(1)])
    page = page_of(tmp_path)
    _, logged, short = page.panel("Training loss")
    assert (len(logged["x"]), logged["x"][0], logged["x"][-1]) == (1000, 1, 5000)
    assert logged["y"][:2] == [None, 2.0] and short["mode"] == "lines+markers"
    assert page.charts[0][1]["xaxis"]["type"] == "log", "the short run keeps some room"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["plotly", "jinja2"])
def test_without_the_extra_only_the_page_is_refused(tmp_path: Path, module: str) -> None:
    run = write_run(tmp_path / "run", [record(1)])
    code = f"import sys; sys.modules['{module}'] = None; import analysis.__main__ as a; sys.exit(a.main(sys.argv[1:]))"

    def analyse(*words: str) -> subprocess.CompletedProcess[str]:
        root = Path(__file__).resolve().parent.parent
        return subprocess.run([sys.executable, "-c", code, *words], cwd=root, capture_output=True, text=True)

    done = analyse("report", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == f"analysis: error: {module} is not installed; pip install jinja2 plotly\n"
    assert analyse(str(run)).returncode == 0 and (run / "loss.png").exists()


def test_many_runs_of_a_sweep_are_named_by_one_setting(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    page = page_of(tmp_path)
    shown = [trace["name"] for trace in page.charts[0][0] if trace.get("showlegend")]
    assert shown == ["kernel aten", "kernel cudnn", "kernel fa4"] and len(page.panel("Throughput")) == 24
    assert page.charts[0][1]["xaxis"]["dtick"] == 1, "no half steps"


def write_sweep(directory: Path) -> None:
    """Cells of eight lengths by three kernels, with long names."""
    cells = []
    for length, kernel in ((2**i, kernel) for i in range(10, 18) for kernel in ("aten", "cudnn", "fa4")):
        name = f"model_max_length-{length}_fused_attention-true_fsdp-full_shard_kernel-{kernel}_remat-attention"
        info = about(config={"model_max_length": length}, kernel=kernel)
        write_run(directory / "kernels" / name, [record(step) for step in range(1, 4)], info)
        flags = {"model_max_length": str(length), "kernel": kernel}
        cells.append({"name": name, "status": "done", "flags": flags, "output_dir": name, "ranks": 2})
    write_lines(directory / "kernels" / "sweep.jsonl", cells)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_draws_every_chart_without_errors_and_nothing_scrolls_sideways(results: Path, tmp_path: Path) -> None:
    long = {"model_name_or_path": "meta-llama/" + "Llama" * 12, "data_path": "x" * 300}
    write_run(results / "a-run-with-a-long-name-of-its-own", [record(1, gpu=True)], about(gpu=True, config=long))
    write_sweep(results)
    page = page_of(results)
    first = """<script>const problems = [];
        for (const kind of ["error", "unhandledrejection", "securitypolicyviolation"])
            addEventListener(kind, event => problems.push(event.message || event.reason || event.violatedDirective));
        addEventListener("load", () => setTimeout(() => {
            document.querySelectorAll("details").forEach(each => each.open = true);
            const parts = [document.documentElement, ...document.querySelectorAll(".scroll")];
            const wide = parts.filter(each => each.scrollWidth > each.clientWidth).length;
            const charts = document.querySelectorAll(".js-plotly-plot:has(path.js-line)").length;
            document.title = `too wide: ${wide}, errors: ${problems.join("; ")}, charts: ${charts}`;
        }, 5000))</script><title>"""
    page.path.write_text(page.text.replace("<title>", first, 1), encoding="utf-8")
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    words += ["--window-size=1400,1000", f"--user-data-dir={tmp_path / 'profile'}", page.path.as_uri()]
    drawn = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
    found = re.search("<title>(too wide.*?)</title>", drawn)
    assert found and found[1] == f"too wide: 0, errors: , charts: {len(page.charts)}"
