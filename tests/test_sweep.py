"""Knows what launch/sweep.py makes of a sweep file, and that cells run, fail, time out, stop and go on as they should;
a stand-in for the trainer writes a run's files at once, and one sweep trains for real."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from launch.sweep import main
from launch.sweep_cells import Cell, expand, varying
from launch.sweep_estimate import START_SECONDS, Measured, estimate, step_flops
from launch.sweep_file import read_sweep
from launch.sweep_records import pending
from launch.sweep_run import cause, slurm_command
from launch.sweep_table import shown_value, table
from lightseq.config import parse

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted((ROOT / "launch" / "sweeps").glob("*.yaml"))
VOCABULARY = {"llama2": 32000, "llama3": 128256}

# In the place of an interpreter that runs torch's launcher: the seed says what becomes of the run.
TRAINER = f"""#!{sys.executable}
import json, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from lightseq.config import parse
place = next(i for i, word in enumerate(sys.argv) if word.endswith("/train.py"))
config = parse(sys.argv[place + 1 :], "stand-in")
output = Path(config.output_dir)
with (output.parent / "ran").open("a") as ran:
    print(output.name, file=ran)
if config.seed == 1:
    print("[rank0]: torch.OutOfMemoryError: CUDA out of memory", "torch...ChildFailedError: failed", sep="\\n")
    sys.exit(1)
if config.seed == 2:
    worker = subprocess.Popen(["sleep", "300"], start_new_session=True)
    (output / "worker").write_text(str(worker.pid))
    worker.wait()
steps = range(1, config.max_steps + (config.seed != 3))
ranks = int(sys.argv[sys.argv.index("torch.distributed.run") + 2].split("=")[1])
about = {{"config": config.to_json(), "total_steps": config.max_steps, "world_size": ranks}}
(output / "run.json").write_text(json.dumps(about))
(output / "metrics.jsonl").write_text("".join(
    json.dumps({{"step": step, "loss": 1.0, "step_seconds": 0.5}}) + "\\n" for step in steps))
"""
FIXED = "model: tiny-llama3, random_init: true, max_steps: 2, data_path: data/any"


def write(directory: Path, text: str) -> Path:
    path = directory / "sweep.yaml"
    path.write_text(text)
    return path


def cells_of(directory: Path, text: str) -> list[Cell]:
    return expand(read_sweep(write(directory, f"fixed: {{{FIXED}}}\n{text}")))


def names(cells: list[Cell]) -> list[str]:
    return [cell.name for cell in cells]


# The file


def test_a_grid_is_every_combination_less_what_is_excluded_plus_what_is_included(tmp_path: Path) -> None:
    cells = cells_of(
        tmp_path,
        """
grid: {ranks: [1, 2], schedule: [ring, zigzag]}
exclude: [{ranks: 1, schedule: [zigzag, prefix]}]
include: [{ranks: 4, schedule: prefix, kernel: [cpu, reference]}, {ranks: 2, schedule: ring}]
""",
    )
    assert names(cells) == [
        "ranks-1_schedule-ring",
        "ranks-2_schedule-ring",
        "ranks-2_schedule-zigzag",
        "ranks-4_schedule-prefix_kernel-cpu",
        "ranks-4_schedule-prefix_kernel-reference",
    ]
    assert [cell.ranks for cell in cells] == [1, 2, 2, 4, 4]
    assert cells[3].config.kernel == "cpu" and cells[0].config.kernel == "auto"


def test_a_cell_keeps_its_name_when_the_grid_grows(tmp_path: Path) -> None:
    before = names(cells_of(tmp_path, "grid: {model: [meta-llama/Llama-3.2-1B], length: [4K]}"))
    after = names(cells_of(tmp_path, "grid: {model: [meta-llama/Llama-3.2-1B, tiny-llama3], length: [4K, 8K]}"))
    assert before == ["Llama-3.2-1B_length-4096"]
    assert set(before) < set(after)


def test_every_word_of_the_file_reaches_the_flag_as_it_was_typed(tmp_path: Path) -> None:
    """In plain YAML `no` is False, 10:12 a number in base 60 and 2e-5 a string."""
    (cell,) = cells_of(
        tmp_path,
        """grid: {save_strategy: no, profile_steps: 10:12, learning_rate: 2e-5, length: 1M, fsdp: "", dtype: bfloat16,
  rope_scaling: '{"rope_type": "linear", "factor": 4}', batch: 2, gradient_checkpointing: False, ranks: 2}""",
    )
    c = cell.config
    assert (c.save_strategy, c.profile_steps, c.learning_rate, c.fsdp) == ("no", (10, 12), 2e-5, "")
    assert (c.model_max_length, c.bf16, c.per_device_train_batch_size) == (2**20, True, 2)
    assert c.rope_scaling == {"rope_type": "linear", "factor": 4} and c.remat_policy == "none"
    assert parse(cell.words, "") == parse([*cell.words], "llama3/train.py")
    assert parse(cell.words, "").output_dir == f"outputs/sweeps/sweep/{cell.name}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid: {schedul: [ring]}", "grid.schedul: unknown setting; did you mean schedule?"),
        ("gird: {schedule: [ring]}", "gird: unknown; did you mean grid?; keys are"),
        ("grid: {schedule: [ring], schedule: [zigzag]}", " line 2: schedule is given twice"),
        ("grid: {schedule: [ring}", " line 2: "),
        ("grid: [ring]", "grid: give `setting: value` lines"),
        ("grid: {schedule: []}", "grid.schedule: give at least one value"),
        ("grid: {schedule: [ring, ring]}", "grid.schedule: ring is listed twice"),
        ("grid: {rope_scaling: [{factor: 2}]}", "grid.rope_scaling: {'factor': '2'} is no single value; put JSON in"),
        ("grid: {output_dir: [a]}", "grid.output_dir: every cell gets its own"),
        ("grid: {model: [a-llama3], model_name_or_path: [b]}", "grid.model_name_or_path: model_name_or_path is given"),
        ("grid: {model: [mistral]}", "model: mistral is by its name of no one family; add `family: llama2`"),
        ("grid: {family: [llama4]}", "family: 'llama4' is unknown; choose from llama3, llama2"),
        ("grid: {ranks: [0]}", "ranks: '0' is no number of processes"),
        ("grid: {dtype: [int8]}", "dtype: 'int8' is unknown; choose from bfloat16"),
        ("grid: {dtype: [float16], bf16: [true]}", "dtype: bf16 and fp16 say the same"),
        ("grid: {schedule: [ringg]}", "schedule-ringg: --schedule 'ringg' is unknown; choose from auto, ring"),
        ("grid: {batch: [0]}", "batch-0: --per_device_train_batch_size 0: give at least 1"),
        ("grid: {length: [4KB]}", "length-4KB: --model_max_length: '4KB' is not a whole number"),
        ("grid: {ranks: [1]}\nexclude: [{ranks: 2}]", "exclude[0]: matches no cell"),
        ("grid: {ranks: [1]}\nexclude: {ranks: 1}", "exclude: give a list"),
        ("grid: {ranks: [1]}\nexclude: [{ranks: 1}]", "grid: no cell is left"),
        ("", "grid: no cell is left; give settings in grid or include"),
        ("grid: {ranks: 1}\ntimeout_seconds: soon", "timeout_seconds: 'soon' is no number above 0"),
        ("grid: {ranks: 1}\ndata: {kind: zipf}", "data: documents is missing"),
        ("grid: {ranks: 1}\ndata: {knd: zipf}", "data.knd: unknown; did you mean kind?"),
        ("grid: {tokenizer: [a/b, a-b]}", "tokenizer-a-b: two cells have this name; they differ in tokenizer"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_key(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        cells_of(tmp_path, text)
    line = str(refused.value)
    assert line.startswith(f"{tmp_path / 'sweep.yaml'}") and said in line and "\n" not in line


def test_lists_among_what_is_fixed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fixed\.ranks: is the same in every cell"):
        read_sweep(write(tmp_path, "fixed: {ranks: [1, 2]}"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweeps_ask_only_for_what_the_trainer_takes(path: Path) -> None:
    sweep = read_sweep(path)
    cells = expand(sweep)
    assert len(cells) > 5
    for cell in cells:
        config = parse(cell.words, f"{cell.family}/train.py")
        assert config.output_dir == str(cell.output_dir) and config.random_init and config.max_steps
        assert sweep.data is not None
        assert config.model_max_length <= int(sweep.data["length"]), "a document of the data is a whole sequence"
        assert int(sweep.data["vocab_size"]) <= VOCABULARY[cell.family], "its ids are words of the model"
        slurm_command(sweep, cell)


def test_the_scaling_sweep_covers_the_experiment() -> None:
    cells = expand(read_sweep(ROOT / "launch" / "sweeps" / "scaling_llama.yaml"))
    models = {"llama2-7b", "llama2-3b", "llama3.2-1b", "llama3.2-3b"}
    found = {(c.config.model_name_or_path, c.config.model_max_length, c.ranks) for c in cells}
    assert {(model, length, 4) for model in models for length in (256, 512, 1024, 2048)} <= found
    assert {ranks for _, _, ranks in found} == {1, 2, 4}
    assert max(length for _, length, _ in found) == 2**20


# Times and the table


def test_estimates_scale_a_like_cell_by_flops_and_ranks(tmp_path: Path) -> None:
    grid = "grid: {length: [1K, 4K], ranks: [1, 2], remat: [none, full]}"
    cells = {cell.name: cell for cell in cells_of(tmp_path, grid)}
    ran = [
        Measured(cell, step_flops(cell) or 0, step_seconds, 5.0)
        for name, step_seconds in (("length-1024_ranks-1_remat-none", 2.0), ("length-1024_ranks-1_remat-full", 99.0))
        for cell in [cells[name]]
    ]
    longer, wider = cells["length-4096_ranks-1_remat-none"], cells["length-4096_ranks-2_remat-none"]
    growth = (step_flops(longer) or 0) / ran[0].step_flops
    assert 4 < growth < 16
    assert estimate(longer, ran, None) == pytest.approx(5 + 2 * 2 * growth)
    assert estimate(wider, ran, None) == pytest.approx(5 + 2 * 2 * growth / 2)


def test_estimates_fall_back_to_the_peak_of_the_device_and_then_to_nothing(tmp_path: Path) -> None:
    known, unknown = cells_of(tmp_path, "grid: {model: [llama3.2-1b, ./my-llama3], length: 32K, ranks: 4}")
    seconds = estimate(known, [], "NVIDIA H100")
    assert seconds == pytest.approx(START_SECONDS + 2 * (step_flops(known) or 0) / 4 / (0.4 * 989e12))
    assert estimate(known, [], None) is None and estimate(known, [], "a GPU of no renown") is None
    assert estimate(unknown, [], "NVIDIA H100") is None


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("width", [80, 120])
def test_the_table_has_one_line_a_cell(path: Path, width: int) -> None:
    cells = expand(read_sweep(path))
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(cells, {c.name: pending(c, "") for c in cells}, dict.fromkeys(names(cells), 5000.0)))
    lines = [line for line in console.export_text().splitlines() if line.strip()]
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[-len(cells) :]] == [str(n) for n in range(1, len(cells) + 1)]
    for cell, line in zip(cells, lines[-len(cells) :], strict=True):
        values = [shown_value(setting, cell.settings.get(setting)) for setting in varying(cells)]
        assert line.split()[1:] == [*values, "pending", "~83", "min"]


# Running


@pytest.fixture
def sweep_dir(tmp_path: Path) -> Path:
    (tmp_path / "python").write_text(TRAINER)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def sweep(directory: Path, text: str) -> Path:
    output, fixed = directory / "out", FIXED
    return write(directory, f"output_dir: {output}\nfixed: {{{fixed}}}\n{text}")


def environment(directory: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHON": str(directory / "python"), "PATH": f"{directory}:{os.environ['PATH']}", **more}


def launch(directory: Path, path: Path, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / "sweep.py"), "--config", str(path), *options]
    return subprocess.run(
        command, cwd=directory, env=environment(directory, **more), capture_output=True, text=True, timeout=120
    )


def records(directory: Path) -> dict[str, dict[str, Any]]:
    lines = (directory / "out" / "sweep.jsonl").read_text().splitlines()
    found = {record["name"]: record for record in map(json.loads, lines)}
    assert len(found) == len(lines), "one object a cell"
    return found


def lives(pid: int) -> bool:
    """Whether a process still runs; one that nobody has buried yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ran(directory: Path) -> list[str]:
    """Cells whose trainer was started, in order, since last asked."""
    path = directory / "out" / "ran"
    words = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return words


def test_a_sweep_goes_on_after_failures_and_runs_nothing_twice(sweep_dir: Path) -> None:
    path = sweep(sweep_dir, "timeout_seconds: 4\ngrid: {ranks: 2, seed: [1, 2, 3, 4]}")
    done = launch(sweep_dir, path)
    assert done.returncode == 1, done.stderr
    found = records(sweep_dir)
    assert [r["status"] for r in found.values()] == ["failed", "timeout", "failed", "done"]
    assert found["ranks-2_seed-1"]["error"] == "[rank0]: torch.OutOfMemoryError: CUDA out of memory"
    assert found["ranks-2_seed-2"]["error"].startswith("ran past 4 s")
    assert "steps of metrics.jsonl are missing" in found["ranks-2_seed-3"]["error"]
    assert found["ranks-2_seed-2"]["seconds"] >= 4
    good = found["ranks-2_seed-4"]
    assert good["seconds"] > 0 and good["output_dir"] == str(sweep_dir / "out" / "ranks-2_seed-4")
    assert good["flags"]["seed"] == "4" and good["command"].startswith(
        "NPROC=2 launch/local.sh llama3 --model_name_or_"
    )
    assert not lives(int((sweep_dir / "out/ranks-2_seed-2/worker").read_text()))
    assert len(ran(sweep_dir)) == 4

    again = launch(sweep_dir, path)
    assert again.returncode == 1 and ran(sweep_dir) == []
    assert "1 done, 3 failed before (--retry-failed runs them), 0 to run" in again.stdout

    retried = launch(sweep_dir, path, "--retry-failed", "--only", "seed-1")
    assert retried.returncode == 1 and ran(sweep_dir) == ["ranks-2_seed-1"]
    only = launch(sweep_dir, path, "--only", "seed-[4]")
    assert only.returncode == 0 and ran(sweep_dir) == []
    assert list(records(sweep_dir)) == list(found), "cells that were not asked for keep their records"


def test_a_cell_is_done_only_with_all_steps_of_these_very_flags(sweep_dir: Path) -> None:
    first = "grid: {seed: [5, 6]}"
    assert launch(sweep_dir, sweep(sweep_dir, first)).returncode == 0
    assert len(ran(sweep_dir)) == 2
    metrics = sweep_dir / "out" / "seed-5" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    assert launch(sweep_dir, sweep(sweep_dir, first)).returncode == 0
    assert ran(sweep_dir) == ["seed-5"]

    changed = sweep(sweep_dir, first + "\ninclude: [{seed: 6, lr_scheduler_type: cosine}]")
    assert launch(sweep_dir, changed).returncode == 0
    assert ran(sweep_dir) == ["seed-6_lr_scheduler_type-cosine"]
    other = write(sweep_dir, changed.read_text().replace("max_steps: 2", "max_steps: 3"))
    assert launch(sweep_dir, other).returncode == 0
    assert len(ran(sweep_dir)) == 3
    (sweep_dir / "out" / "sweep.jsonl").unlink()
    assert launch(sweep_dir, other).returncode == 0
    assert ran(sweep_dir) == [], "a run's own files say that it is done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_kills_every_process_and_the_next_call_goes_on(number: signal.Signals, sweep_dir: Path) -> None:
    path = sweep(sweep_dir, "grid: {seed: [4, 2, 5]}")
    command = [sys.executable, str(ROOT / "launch" / "sweep.py"), "--config", str(path)]
    process = subprocess.Popen(command, env=environment(sweep_dir), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    noted = sweep_dir / "out" / "seed-2" / "worker"
    deadline = time.monotonic() + 30
    while not (noted.exists() and noted.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    worker = int(noted.read_text())
    below = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and said.decode().splitlines() == [
        "launch/sweep.py: stopped; the same command goes on from here"
    ]
    assert worker in below and not [pid for pid in below if lives(pid)]
    assert [r["status"] for r in records(sweep_dir).values()] == ["done", "stopped", "pending"]
    ran(sweep_dir)
    assert launch(sweep_dir, path, "--timeout", "3").returncode == 1
    assert ran(sweep_dir) == ["seed-2", "seed-5"]


def test_listing_runs_nothing_and_says_what_is_known(
    sweep_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sweep(sweep_dir, "grid: {seed: [1, 4, 5]}")
    listed = launch(sweep_dir, path, "--list")
    assert listed.returncode == 0 and ran(sweep_dir) == [] and not (sweep_dir / "out").exists()
    assert "3 cells, 3 not done, time unknown" in listed.stdout
    launch(sweep_dir, path, "--only", "seed-1", "--only", "seed-4")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(sweep_dir)
    assert main(["--config", str(path), "--list"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split()[:3] for line in shown.splitlines() if line.startswith(" ")]
    assert [row for row in rows if row and row[0].isdecimal()] == [
        ["1", "1", "failed"],
        ["2", "4", "done"],
        ["3", "5", "pending"],
    ]
    assert "failed: seed-1: [rank0]: torch.OutOfMemoryError" in shown
    assert "2 not done, about" in shown and "by the cells that ran" in shown


def test_input_that_cannot_be_met_is_one_line_and_status_2(sweep_dir: Path) -> None:
    path = sweep(sweep_dir, "grid: {seed: [4]}")
    for options in (("--only", "nothing"), ("--timeout", "0"), ("--config", "nowhere.yaml"), ("--submit",)):
        done = launch(sweep_dir, path, *options, PATH="/usr/bin:/bin")
        assert done.returncode == 2 and done.stderr.startswith("launch/sweep.py: error: ")
        assert len(done.stderr.splitlines()) == 1


def test_cells_are_handed_to_sbatch_once_and_followed(sweep_dir: Path) -> None:
    for name, source in {
        "sbatch": 'printf "%s\\n" "$*" >> "$JOBS"; echo Submitted batch job "$(wc -l < "$JOBS")"',
        "squeue": 'echo "${ALIVE-}"',
    }.items():
        (sweep_dir / name).write_text(f"#!/usr/bin/env bash\n{source}\n")
        (sweep_dir / name).chmod(0o755)
    jobs = sweep_dir / "jobs"
    path = sweep(sweep_dir, "gpus_per_node: 2\ntimeout_seconds: 90\ngrid: {ranks: [1, 4]}")
    done = launch(sweep_dir, path, "--submit", JOBS=str(jobs))
    assert done.returncode == 0, done.stderr
    one, several = jobs.read_text().splitlines()
    assert one.startswith(
        "--job-name=ranks-1 --nodes=1 --gpus-per-node=1 --time=2 launch/slurm/one_node.sbatch llama3 "
    )
    assert several.startswith("--job-name=ranks-4 --nodes=2 --gpus-per-node=2 --time=2 launch/slurm/several_nodes.sba")
    assert [(r["status"], r["job_id"]) for r in records(sweep_dir).values()] == [("submitted", "1"), ("submitted", "2")]

    launch(sweep_dir, path, "--submit", JOBS=str(jobs), ALIVE="1\n2")
    assert len(jobs.read_text().splitlines()) == 2, "not twice"
    gone = launch(sweep_dir, path, "--list", JOBS=str(jobs), ALIVE="2")
    assert "failed: ranks-1: job 1 ended without all steps" in gone.stdout


def test_ranks_that_do_not_fill_nodes_are_refused(sweep_dir: Path) -> None:
    path = sweep(sweep_dir, "gpus_per_node: 2\ngrid: {ranks: [3]}")
    done = launch(sweep_dir, path, "--submit")
    assert done.returncode == 2 and "ranks: 3 do not fill nodes of 2 GPUs" in done.stderr


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("  model tiny\nerror: --data_path x: no\nE1 ChildFailedError\n", "error: --data_path x: no"),
        ("Traceback\n[rank1]: ValueError: odd\n[rank0]: RuntimeError: closed by peer\n", "[rank1]: ValueError: odd"),
        ("RuntimeError: closed\n[rank1]: torch.OutOfMemoryError: full\n", "[rank1]: torch.OutOfMemoryError: full"),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\nKilled\n", "Killed"),
        ("launch/local.sh: error: NPROC 'x' is not\nusage: \n", "launch/local.sh: error: NPROC 'x' is not"),
        ("", None),
    ],
)
def test_the_cause_of_a_failure_is_found_in_its_log(log: str, said: str | None) -> None:
    assert cause(log) == said


def test_the_tiny_sweep_trains_for_real(tmp_path: Path) -> None:
    tiny = (ROOT / "launch" / "sweeps" / "tiny.yaml").read_text()
    text = tiny.replace("data/sweep-tiny", str(tmp_path / "data")) + f"output_dir: {tmp_path / 'out'}\n"
    python = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = launch(tmp_path, write(tmp_path, text), "--only", "length-256_ranks-2_schedule-zigzag", **python)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = [r for r in records(tmp_path).values() if r["status"] == "done"]
    run = json.loads((Path(record["output_dir"]) / "run.json").read_text())
    assert run["world_size"] == 2 and run["schedule"] == "zigzag"
    assert len((Path(record["output_dir"]) / "metrics.jsonl").read_text().splitlines()) == 5
