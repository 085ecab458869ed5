"""Slurm's scripts on a real Slurm of two hosts (`make test-cluster`, which starts it by tests/cluster.sh)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

if "CLUSTER" not in os.environ:
    pytest.skip("needs a Slurm (`make test-cluster`)", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
SLURMD = Path(os.environ["CLUSTER"]) / "slurmd"
SECONDS = 300  # for two processes that share two cores, or for Slurm to begin a requeued job
MODEL = "--model_name_or_path tiny-llama3 --random_init --data_path data/zipf --model_max_length 64"
TWO_NODES = f"sbatch --gpus-per-node=1 launch/slurm/several_nodes.sbatch llama3 {MODEL}"
LONG = f"{TWO_NODES} --max_steps 60 --save_steps 5 --save_total_limit 2 --output_dir outputs/long"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with data."""
    home = tmp_path_factory.mktemp("cluster") / "lightseq"
    for name in ("launch", "lightseq", "llama3", "data_gen"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    words = "-m data_gen synthetic --kind zipf --documents 8 --length 64 --vocab_size 512 --output data/zipf"
    subprocess.run([sys.executable, *words.split()], cwd=home, env=os.environ | {"PYTHONPATH": ""}, check=True)
    return home


@pytest.fixture
def home(checkout: Path) -> Path:
    """The checkout, without what other tests left in it, on an idle cluster."""
    subprocess.run(["scancel", "--me", "--full"], check=True)
    until(lambda: not typed(checkout, "squeue --noheader"))
    until(lambda: idle_nodes(checkout) == 2)
    for name in ("outputs", "logs"):
        shutil.rmtree(checkout / name, ignore_errors=True)
    return checkout


def idle_nodes(home: Path) -> int:
    return int(typed(home, "sinfo --noheader --states=idle --format=%D").strip() or 0)


def typed(home: Path, command: str, **variables: str) -> str:
    """Returns what a command printed that a user types in the checkout."""
    own = {"PYTHON": sys.executable, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | own | variables
    done = subprocess.run(["bash", "-c", command], cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(home: Path, command: str, **variables: str) -> str:
    found = re.search(r"^Submitted batch job (\d+)$", typed(home, command, **variables), re.MULTILINE)
    assert found
    return found[1]


def until(holds: Callable[[], Any], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def state(job: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    return str(re.search(r"JobState=(\w+)", shown)[1])  # type: ignore[index]


def end(home: Path, job: str, expected: str = "COMPLETED") -> None:
    """Waits for a job, and fails with its logs if it does not end as expected."""
    until(lambda: state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    logs = [home / f"slurm-{job}.out", *home.glob(f"logs/**/*-{job}/*.log")]
    assert state(job) == expected, "\n".join(path.read_text() for path in logs)


def steps(home: Path, output: str) -> list[int]:
    return [json.loads(line)["step"] for line in (home / output / "metrics.jsonl").read_text().splitlines()]


def run_of(home: Path, output: str) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((home / output / "run.json").read_text())
    return run


def begins(home: Path, job: str) -> None:
    """Lets a requeued job begin soon; Slurm waits two minutes, and needs a second to forget its first start."""
    until(lambda: state(job) == "PENDING")
    time.sleep(3)
    typed(home, f"scontrol update JobId={job} StartTime=now")


def test_two_nodes_train_together_and_log_each_to_its_file(home: Path) -> None:
    job = submit(home, f"{TWO_NODES} --max_steps 3 --save_strategy no")
    end(home, job)
    run = run_of(home, f"outputs/lightseq-{job}")
    assert (run["world_size"], run["sequence_ranks"], run["hardware"]["host"]) == (2, 2, "node01")
    assert steps(home, f"outputs/lightseq-{job}") == [1, 2, 3]
    logs = home / "logs" / f"lightseq-{job}"
    assert {path.name for path in logs.iterdir()} == {"command.log", "node01.log", "node02.log"}
    assert "step 3/3" in (logs / "node01.log").read_text()


def test_a_piped_job_starts_a_process_for_each_gpu_that_it_asks_for(home: Path) -> None:
    """The nodes have four GPUs, all of which an exclusive job gets, but not its steps."""
    flags = "printf '%s\\n' --random_init --save_strategy no > flags.txt"
    piped = "envsubst '$MY_USER' < launch/slurm/one_node.sbatch | sbatch --gpus-per-node=2"
    run = {"FAMILY": "llama3", "MODEL": "tiny-llama3", "DATA": "data/zipf", "LENGTH": "64", "MAX_STEPS": "2"}
    job = submit(home, f"{flags}; {piped}", MY_USER="ada", FLAGS_FILE="flags.txt", GLOBAL_BATCH="2", **run)
    end(home, job)
    run = run_of(home, f"outputs/ada/lightseq-{job}")
    assert run["world_size"] == 2 and run["config"]["gradient_accumulation_steps"] == 2
    assert {path.name for path in (home / f"logs/ada/lightseq-{job}").iterdir()} == {"command.log", "node01.log"}


def test_each_task_of_srun_is_a_rank(home: Path) -> None:
    train = f"{sys.executable} -m lightseq train {MODEL} --max_steps 2 --save_strategy no --output_dir outputs/tasks"
    typed(home, f"srun --nodes=2 --ntasks-per-node=1 {train}")
    assert run_of(home, "outputs/tasks")["world_size"] == 2


@pytest.mark.parametrize("receiver", ["", "--batch"], ids=["ranks", "script"])  # --signal=USR1@300 and B:USR1@300
def test_a_job_that_a_signal_stops_is_requeued_and_resumes(receiver: str, home: Path) -> None:
    job = submit(home, LONG, REQUEUE="1")
    until((home / "outputs/long/checkpoint-5").is_dir)
    typed(home, f"scancel {receiver} --signal=USR1 {job}")
    begins(home, job)
    ended = run_of(home, "outputs/long")["ended"]
    assert ended["reason"] == "SIGUSR1" and (home / f"outputs/long/checkpoint-{ended['step']}").is_dir()
    end(home, job)
    assert steps(home, "outputs/long") == [*range(1, 61)]
    assert run_of(home, "outputs/long")["resumed_from"] == f"outputs/long/checkpoint-{ended['step']}"
    assert (home / f"slurm-{job}.out").read_text().count("launch: nodes 2") == 2, "the first start's lines are kept"


@pytest.mark.parametrize(("cancel", "ends"), [("scancel --signal=TERM", "FAILED"), ("scancel", "CANCELLED")])
def test_a_job_that_is_cancelled_is_not_requeued(cancel: str, ends: str, home: Path) -> None:
    job = submit(home, LONG, REQUEUE="1")
    until((home / "outputs/long/checkpoint-5").is_dir)
    typed(home, f"{cancel} {job}")
    end(home, job, ends)
    time.sleep(2)
    assert state(job) == ends


def test_a_job_outlives_a_slurmd_and_is_requeued_when_its_node_is_lost(home: Path) -> None:
    job = submit(home, LONG, REQUEUE="1")
    until((home / "outputs/long/checkpoint-5").is_dir)
    slurmd = int((SLURMD.parent / "node02.pid").read_text())
    os.kill(slurmd, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(slurmd))
    subprocess.run([SLURMD, "node02"], check=True)
    until((home / "outputs/long/checkpoint-15").is_dir)
    assert state(job) == "RUNNING"

    for process in on_node02():
        process.kill()
    until(lambda: state(job) == "PENDING")  # Slurm has found the node down
    subprocess.run([SLURMD, "node02"], check=True)
    end(
        home, job
    )  # after the two minutes: until then Slurm may end what is left of the first start, by the job's number
    assert steps(home, "outputs/long") == [*range(1, 61)]
    assert "no sign of life from rank 1 on node02" in (home / f"logs/lightseq-{job}/node01.log").read_text()


def test_a_job_that_fails_after_it_saved_is_requeued(home: Path) -> None:
    job = submit(home, LONG, REQUEUE="1")
    until((home / "outputs/long/checkpoint-5").is_dir)
    next(process for process in on_node02() if "llama3/train.py" in process.cmdline()[1:3]).kill()
    begins(home, job)
    end(home, job)
    assert steps(home, "outputs/long") == [*range(1, 61)]


def on_node02() -> list[psutil.Process]:
    """Returns all processes of the other host but the one that keeps its namespaces."""
    own = os.readlink("/proc/self/ns/uts")
    others = [process for process in psutil.process_iter() if os.readlink(f"/proc/{process.pid}/ns/uts") != own]
    return [process for process in others if process.name() != "sleep"]


def test_a_job_that_fails_before_it_saves_is_not_requeued(home: Path) -> None:
    job = submit(home, f"{TWO_NODES} --max_steps 3 --schedule none", REQUEUE="1")
    end(home, job, "FAILED")
    assert "error: " in (home / f"logs/lightseq-{job}/node01.log").read_text()


def test_cells_of_a_sweep_are_jobs(home: Path) -> None:
    (home / "cells.yaml").write_text(
        "data: {kind: zipf, documents: 8, length: 64, vocab_size: 512, output: data/zipf}\n"
        "gpus_per_node: 1\n"
        "fixed: {model: tiny-llama3, random_init: true, max_steps: 2, save_strategy: no}\n"
        "grid: {length: [64], ranks: [1, 2]}\n"
    )
    sweep = f"{sys.executable} launch/sweep.py --config cells.yaml"
    assert "2 submitted" in typed(home, f"{sweep} --submit")
    until(lambda: not typed(home, "squeue --noheader"))
    assert "2 done" in typed(home, sweep)
    worlds = {run_of(home, str(path.parent))["world_size"] for path in home.glob("outputs/**/run.json")}
    assert worlds == {1, 2}
