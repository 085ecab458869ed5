"""Running of sweeps: cells fail, time out, stop and continue, and never run twice. A stand-in for the trainer writes a
run's files at once; one cell trains for real."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from executables import write_python_program

from data_gen.__main__ import parser as data_parser
from launch.sweep import main
from launch.sweep_run import OF_ONE_RUN, cause, make_data
from lightseq.distributed.rank_launcher import HostGPUs, gpus_here

ROOT = Path(__file__).resolve().parent.parent
FIXED = "model: tiny-llama3, random_init: true, max_steps: 2, data_path: data/any"

# In the place of an interpreter that runs lightseq train: the seed says what becomes of the run.
TRAINER = f"""
import json, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from lightseq.config.command_line import parse
from lightseq.distributed.rank_launcher import parse_launcher_flags, prepare_rank
assert sys.argv[1:4] == ["-m", "lightseq", "train"]
flags = parse_launcher_flags(sys.argv[4:])
config = parse(flags.rest, "stand-in")
output = Path(config.output_dir)
with (output.parent / "ran").open("a") as ran:
    print(output.name, file=ran)
if config.seed == 1:
    print("[rank0]: torch.OutOfMemoryError: CUDA out of memory")
    sys.exit(1)
if config.seed == 2:
    worker = subprocess.Popen(["sleep", "300"], start_new_session=True, preexec_fn=prepare_rank)
    (output / "worker").write_text(str(worker.pid) + "\\n")
    worker.wait()
steps = range(1, config.max_steps + (config.seed != 3))
about = {{"config": config.to_json(), "total_steps": config.max_steps, "world_size": flags.processes}}
(output / "run.json").write_text(json.dumps(about))
(output / "metrics.jsonl").write_text("".join(
    json.dumps({{"step": step, "loss": 1.0, "step_seconds": 0.5}}) + "\\n" for step in steps))
"""


@pytest.fixture
def sweep_dir(tmp_path: Path) -> Path:
    write_python_program(tmp_path / "python", TRAINER)
    return tmp_path


def sweep(directory: Path, text: str, fixed: str = FIXED) -> Path:
    path = directory / "sweep.yaml"
    path.write_text(f"output_dir: {directory}/out\nfixed: {{{fixed}}}\n{text}")
    return path


def program(path: Path, source: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{source}\n")
    path.chmod(0o755)


def environment(directory: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHON": str(directory / "python"), "PATH": f"{directory}:{os.environ['PATH']}", **more}


def launch(directory: Path, path: Path, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, ROOT / "launch" / "sweep.py", "--config", path, *options]
    return subprocess.run(
        words, cwd=directory, env=environment(directory, **more), capture_output=True, text=True, timeout=120
    )


def started(directory: Path, path: Path, *options: str, workers: int = 1) -> tuple[subprocess.Popen[str], list[int]]:
    """Starts a sweep whose cells of seed 2 never end. Returns it and the processes of `workers` such cells."""
    words = [sys.executable, ROOT / "launch" / "sweep.py", "--config", path, *options]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, env=environment(directory), stdout=pipe, stderr=pipe, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        noted = [path.read_text() for path in (directory / "out").glob("*/worker")]
        if sum(text.endswith("\n") for text in noted) == workers:
            break
        time.sleep(0.05)
    return process, [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


@pytest.fixture
def listed(
    sweep_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Returns status, output and errors of --list, made in this process."""

    def call(path: Path, **more: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", lambda *_: None)
            patch.chdir(sweep_dir)
            for name, value in environment(sweep_dir, **more).items():
                patch.setenv(name, value)
            capsys.readouterr()
            return main(["--config", str(path), "--list"]), *capsys.readouterr()

    return call


def records(directory: Path) -> dict[str, dict[str, Any]]:
    lines = (directory / "out" / "sweep.jsonl").read_text().splitlines()
    found = {record["name"]: record for record in map(json.loads, lines)}
    assert len(found) == len(lines), "one object a cell"
    return found


def lives(pid: int) -> bool:
    """Returns whether a process still runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_end(pids: Sequence[int]) -> bool:
    """Returns whether no process runs any more. A killed one takes a moment to end on a busy machine."""
    until = time.monotonic() + 10
    while any(map(lives, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(lives, pids))


def ran(directory: Path) -> list[str]:
    """Cells whose trainer was started, in order, since last asked."""
    path = directory / "out" / "ran"
    words = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return words


@pytest.mark.slow
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
    assert good["flags"]["seed"] == "4"
    assert good["command"].startswith("python3 -m lightseq train --nproc_per_node 2 --model_name_or_path tiny-llama3 ")
    assert all_end([int((sweep_dir / "out/ranks-2_seed-2/worker").read_text())])
    assert len(ran(sweep_dir)) == 4

    again = launch(sweep_dir, path)
    assert again.returncode == 1 and ran(sweep_dir) == []
    assert "2 failed, 1 timeout, 1 done; 0 to run; --retry-failed runs" in again.stdout

    retried = launch(sweep_dir, path, "--retry-failed", "--only", "seed-1")
    assert retried.returncode == 1 and ran(sweep_dir) == ["ranks-2_seed-1"]
    only = launch(sweep_dir, path, "--only", "seed-[4]")
    assert only.returncode == 0 and ran(sweep_dir) == []
    assert list(records(sweep_dir)) == list(found), "cells that were not asked for keep their records"


@pytest.mark.slow
def test_a_cell_is_done_only_with_all_steps_of_the_same_flags(sweep_dir: Path) -> None:
    first = "grid: {seed: [5, 6]}"
    assert launch(sweep_dir, sweep(sweep_dir, first)).returncode == 0
    assert len(ran(sweep_dir)) == 2
    metrics = sweep_dir / "out" / "seed-5" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    assert launch(sweep_dir, sweep(sweep_dir, first)).returncode == 0
    assert ran(sweep_dir) == ["seed-5"]

    other = sweep(sweep_dir, first, FIXED.replace("max_steps: 2", "max_steps: 3"))
    assert launch(sweep_dir, other).returncode == 0
    assert len(ran(sweep_dir)) == 2
    (sweep_dir / "out" / "sweep.jsonl").unlink()
    assert launch(sweep_dir, other).returncode == 0
    assert ran(sweep_dir) == [], "a run's own files say that it is done"


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_stopped_sweep_leaves_no_process_and_continues(number: signal.Signals, sweep_dir: Path) -> None:
    path = sweep(sweep_dir, "grid: {seed: [4, 2, 5]}")
    process, below = started(sweep_dir, path)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "launch/sweep.py: stopped; run the same command again to continue\n"
    worker = int((sweep_dir / "out" / "seed-2" / "worker").read_text())
    assert worker in below and all_end(below)
    assert [r["status"] for r in records(sweep_dir).values()] == ["done", "stopped", "pending"]
    ran(sweep_dir)
    assert launch(sweep_dir, path, "--timeout", "3").returncode == 1
    assert ran(sweep_dir) == ["seed-2", "seed-5"]


def test_stopping_ends_every_cell_that_runs(sweep_dir: Path) -> None:
    path = sweep(sweep_dir, "grid: {seed: 2, learning_rate: [1e-3, 1e-4, 1e-5]}")
    process, below = started(sweep_dir, path, "--at_once", "2", workers=2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and all_end(below)
    assert [r["status"] for r in records(sweep_dir).values()] == ["stopped", "stopped", "pending"]


def test_cells_end_with_an_interpreter_that_a_script_started(sweep_dir: Path) -> None:
    """Such a script is the process that the sweep starts, and does not end what it started."""
    (sweep_dir / "python").rename(sweep_dir / "trainer")
    program(sweep_dir / "python", f'{sweep_dir}/trainer "$@"; exit $?')
    path = sweep(sweep_dir, "grid: {seed: [2]}")
    process, below = started(sweep_dir, path)
    try:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 130 and len(below) == 3 and all_end(below)
        late = launch(sweep_dir, path, "--timeout", "4")
        assert [r["status"] for r in records(sweep_dir).values()] == ["timeout"], late.stdout + late.stderr
        assert all_end([int((sweep_dir / "out" / "seed-2" / "worker").read_text())])
    finally:
        for pid in filter(lives, below):
            os.kill(pid, signal.SIGKILL)


def test_cells_start_their_own_ranks_wherever_the_sweep_runs(sweep_dir: Path) -> None:
    """A pod of Kubernetes has the variables of a rank."""
    write_python_program(
        sweep_dir / "python", TRAINER.replace("config = ", "assert 'RANK' not in os.environ\nconfig = ")
    )
    done = launch(sweep_dir, sweep(sweep_dir, "grid: {seed: 4}"), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_running_sweep_is_not_disturbed_and_a_killed_one_leaves_no_process(
    sweep_dir: Path, listed: Callable[..., tuple[int, str, str]]
) -> None:
    path = sweep(sweep_dir, "grid: {seed: [4, 2]}")
    process, left = started(sweep_dir, path)
    log = sweep_dir / "out" / "seed-2" / "log.txt"
    try:
        said, noted = log.read_text(), records(sweep_dir)
        beside = launch(sweep_dir, sweep(sweep_dir, "grid: {seed: [5]}"))
        assert beside.returncode == 2 and "in use" in beside.stderr and len(beside.stderr.splitlines()) == 1
        assert listed(path)[0] == 0, "listing writes nothing"
        assert (log.read_text(), records(sweep_dir)) == (said, noted)
        process.kill()
        process.communicate()
        assert all_end(left)
    finally:
        for pid in filter(lives, left):
            os.kill(pid, signal.SIGKILL)
    assert ran(sweep_dir) == ["seed-4", "seed-2"]
    assert launch(sweep_dir, sweep(sweep_dir, "grid: {seed: [4, 5]}")).returncode == 0 and ran(sweep_dir) == ["seed-5"]


def test_listing_runs_nothing_and_shows_the_status(
    sweep_dir: Path, listed: Callable[..., tuple[int, str, str]]
) -> None:
    path = sweep(sweep_dir, "grid: {seed: [1, 4, 5]}")
    status, shown, _ = listed(path)
    assert status == 0 and ran(sweep_dir) == [] and not (sweep_dir / "out").exists()
    assert "3 cells: 3 pending" in shown
    launch(sweep_dir, path, "--only", "seed-1", "--only", "seed-4")
    status, shown, _ = listed(path)
    assert status == 0
    rows = [line.split()[:3] for line in shown.splitlines() if line[:1].isdecimal()]
    assert rows[:3] == [["1", "seed-1", "failed"], ["2", "seed-4", "done"], ["3", "seed-5", "pending"]]
    assert not [line for line in shown.splitlines() if line.endswith(" ")]
    assert "[rank0]: torch.OutOfMemoryError" in shown
    assert "3 cells: 1 failed, 1 done, 1 pending" in shown


@pytest.mark.slow
def test_the_files_of_a_cell_replace_a_garbled_record(
    sweep_dir: Path, listed: Callable[..., tuple[int, str, str]]
) -> None:
    path = sweep(sweep_dir, "grid: {seed: [1, 4, 5]}")
    launch(sweep_dir, path)
    ran(sweep_dir)
    noted = sweep_dir / "out" / "sweep.jsonl"
    noted.write_text(noted.read_text()[:-40])  # the disk was full
    status, shown, said = listed(path)
    assert status == 0 and "3 cells: 1 failed, 2 done" in shown
    assert said.startswith(f"launch/sweep.py: note: {noted} line 3 is cut off") and said.count("\n") == 1
    again = launch(sweep_dir, path)
    assert again.returncode == 1 and ran(sweep_dir) == [] and list(records(sweep_dir)) == ["seed-1", "seed-4", "seed-5"]

    noted.write_text("step,loss\n1,2.0\n")
    refused = launch(sweep_dir, path)
    assert refused.returncode == 2 and refused.stderr.startswith(f"error: {noted} line 1 is not JSON")
    assert noted.read_text().startswith("step,loss")


def test_invalid_options_are_one_line_and_status_2(sweep_dir: Path) -> None:
    path = sweep(sweep_dir, "grid: {seed: [4]}")
    refused = (("--only", "nothing"), ("--timeout", "0"), ("--config", "nowhere.yaml"), ("--submit",))
    for options in (*refused, ("--submit", "--at_once", "2"), ("--at_once", "0")):
        done = launch(sweep_dir, path, *options, PATH="nowhere")  # without sbatch
        assert done.returncode == 2 and done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_each_cell_is_submitted_once_and_followed(sweep_dir: Path, listed: Callable[..., tuple[int, str, str]]) -> None:
    program(sweep_dir / "sbatch", 'echo "$*" >> "$JOBS"; echo Submitted batch job "$(wc -l < "$JOBS")"')
    program(sweep_dir / "squeue", 'echo "${ALIVE-}"')
    jobs = sweep_dir / "jobs"
    path = sweep(sweep_dir, "gpus_per_node: 2\ntimeout_seconds: 90\ngrid: {ranks: [1, 4]}")
    done = launch(sweep_dir, path, "--submit", JOBS=str(jobs))
    assert done.returncode == 0, done.stderr
    one, several = jobs.read_text().splitlines()
    assert one.startswith("--job-name=ranks-1 --nodes=1 --gpus-per-node=1 --time=2 launch/slurm/several_nodes.sbatch ")
    assert several.startswith("--job-name=ranks-4 --nodes=2 --gpus-per-node=2 --time=2 launch/slurm/several_nodes.sba")
    assert [(r["status"], r["job_id"]) for r in records(sweep_dir).values()] == [("submitted", "1"), ("submitted", "2")]

    launch(sweep_dir, path, "--submit", JOBS=str(jobs), ALIVE="1\n2")
    assert len(jobs.read_text().splitlines()) == 2, "not twice"
    assert "job 1 ended too early" in listed(path, JOBS=str(jobs), ALIVE="2")[1]

    refused = launch(sweep_dir, sweep(sweep_dir, "gpus_per_node: 2\ngrid: {ranks: [2, 3]}"), "--submit", JOBS=str(jobs))
    assert refused.returncode == 2 and "ranks: 3 do not fill nodes of 2 GPUs" in refused.stderr
    assert len(jobs.read_text().splitlines()) == 2, "all or none are submitted"


def test_variables_of_another_run_do_not_reach_a_job(sweep_dir: Path) -> None:
    """Each variable that job.sh reads is either kept from the cells, or about the host they run on."""
    program(sweep_dir / "sbatch", f"env > {sweep_dir}/seen; echo Submitted batch job 1")
    read = set(re.findall(r"\$\{([A-Z_]+):-", (ROOT / "launch" / "slurm" / "job.sh").read_text()))
    own = {name for name in read if not name.startswith(("SLURM_", "OMP_", "TORCH_", "PET_"))}
    path = sweep(sweep_dir, "grid: {ranks: 2}")
    done = launch(sweep_dir, path, "--submit", **dict.fromkeys(own, "7"))
    assert done.returncode == 0, done.stderr
    seen = {line.partition("=")[0] for line in (sweep_dir / "seen").read_text().splitlines()}
    assert own - {*OF_ONE_RUN} == own & seen == {"PYTHON", "CONTAINER", "REQUEUE"}


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("  model tiny\nerror: --data_path x: no\nE1 ChildFailedError\n", "error: --data_path x: no"),
        ("Traceback\n[rank1]: ValueError: odd\n[rank0]: RuntimeError: closed by peer\n", "[rank1]: ValueError: odd"),
        ("RuntimeError: closed\n[rank1]: torch.OutOfMemoryError: full\n", "[rank1]: torch.OutOfMemoryError: full"),
        ("model tiny\nKilled\n", "Killed"),
        ("sbatch: error: no partition x\nusage: \n", "sbatch: error: no partition x"),
        ("", None),
    ],
)
def test_the_cause_of_a_failure_is_found_in_its_log(log: str, said: str | None) -> None:
    assert cause(log) == said


def test_data_made_with_other_flags_is_refused(tmp_path: Path) -> None:
    flags = f"synthetic --kind zipf --documents 2 --length 8 --vocab_size 1_6 --output {tmp_path}/data"

    def make(more: str = "") -> None:
        make_data(data_parser().parse_args(f"{flags} {more}".split()))

    make()
    make()
    for more, said in (
        ("--seed 7", "seed 0 (not 7)"),
        ("--kind copy", "source synthetic zipf (not synthetic copy)"),
        ("--documents 4", "documents 2 (not 4)"),
        ("--length 9", "tokens 16 (not 18)"),
        ("--vocab_size 512", "vocab_size 16 (not 512)"),
    ):
        expected = f"data.output {tmp_path}/data was made with {said}; give anothe"
        with pytest.raises(ValueError, match=re.escape(expected)):
            make(more)
    meta = tmp_path / "data" / "meta.json"
    meta.write_text('{"tokens": 16}')
    make("--seed 7")  # an older one, which does not say
    meta.write_text("[]")
    with pytest.raises(ValueError, match=r"meta\.json is not a JSON object; give another output"):
        make()


NVIDIA_SMI = r"printf '0, NVIDIA H200\n1, NVIDIA H200\n2, NVIDIA H200\n'"


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(None, "0 1 2"), ("", ""), ("-1", ""), ("2, 1", "2 1"), ("0,-1,1", "0"), ("GPU-a1,GPU-b2", "GPU-a1 GPU-b2")],
)
def test_gpus_are_the_ones_visible_to_cuda(
    visible: str | None, devices: str, sweep_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(sweep_dir / "nvidia-smi", NVIDIA_SMI)
    monkeypatch.setenv("PATH", f"{sweep_dir}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here() == HostGPUs("NVIDIA H200", tuple(devices.split()))


@pytest.mark.slow
def test_cells_at_once_share_no_gpu(sweep_dir: Path) -> None:
    program(sweep_dir / "nvidia-smi", NVIDIA_SMI)
    write_python_program(sweep_dir / "python", TRAINER.replace("steps = range", SEEN + "steps = range"))
    path = sweep(sweep_dir, "grid: {ranks: [1, 2, 4], seed: [4, 5]}")
    done = launch(sweep_dir, path, "--at_once", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 to run" in done.stdout and "2 need more than the 3 GPUs here" in done.stdout
    assert [r["status"] for r in records(sweep_dir).values()] == ["done"] * 4 + ["pending"] * 2
    seen = [json.loads(line) for line in (sweep_dir / "out" / "seen").read_text().splitlines()]
    assert sorted(len(gpus.split(",")) for gpus, *_ in seen) == [1, 1, 2, 2]
    beside = [(a, b) for a in seen for b in seen if a is not b and a[1] < b[1] < a[2]]
    assert beside, "some ran side by side"
    assert not [1 for a, b in beside if set(a[0].split(",")) & set(b[0].split(","))], "and shared no GPU"

    (sweep_dir / "out" / "seen").unlink()
    assert launch(sweep_dir, path, "--set", "seed=6", "--only", "ranks-1").returncode == 0
    [(gpus, *_)] = [json.loads(line) for line in (sweep_dir / "out" / "seen").read_text().splitlines()]
    assert gpus is None, "one at a time sees all"


SEEN = """
import time
begin = time.monotonic()
time.sleep(1)
with (output.parent / "seen").open("a") as seen:
    print(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), begin, time.monotonic()]), file=seen)
"""
