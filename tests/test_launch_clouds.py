"""Launch files of SkyPilot and Ray Train: what they start trains as one process does."""

import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import small
import yaml
from executables import write_python_program
from programs import alone
from worlds import free_port

from launch import ray_train
from lightseq.config.command_line import parse

ROOT = Path(__file__).resolve().parent.parent
TASK = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
# Keys that SkyPilot 0.14.1 takes in a task and in its resources.
TASK_KEYS = {
    *("name", "workdir", "num_nodes", "resources", "file_mounts", "volumes", "envs", "secrets", "setup", "run"),
}
RESOURCE_KEYS = {"infra", "accelerators", "cpus", "memory", "use_spot", "image_id", "disk_size", "network_tier"}
VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def check_losses(files: Path, output: str, flags: str) -> None:
    """Compares a run on two ranks with one on one."""
    assert alone(small.words(files, "alone", flags)).status == 0
    assert len(small.losses(files, "alone")) > 1
    assert small.losses(files, output) == pytest.approx(small.losses(files, "alone"), rel=1e-5)


# ---- SkyPilot --------------------------------------------------------------------------------------------------------


def test_the_task_has_keys_that_skypilot_takes_and_a_recipe_that_is_here() -> None:
    assert TASK.keys() <= TASK_KEYS and TASK["resources"].keys() <= RESOURCE_KEYS
    assert isinstance(TASK["num_nodes"], int) and re.fullmatch(r"\w+:\d+", TASK["resources"]["accelerators"])
    words = [*TASK["envs"]["FLAGS"].split(), "--output_dir", TASK["envs"]["OUTPUT_DIR"]]
    config = parse(words, "lightseq train")
    (volume,) = TASK["volumes"]
    assert all(Path(x).is_relative_to(volume) for x in (config.data_path, config.output_dir))


def test_the_task_sets_up_extras_that_the_distribution_has() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r'"\.\[([\w,]+)\]"', TASK["setup"])
    (constraints,) = re.findall(r"--constraint (\S+)", TASK["setup"])
    assert {*named.split(",")} <= {*extras} and (ROOT / constraints).is_file()


def node(workdir: Path, rank: int, gpus: int, port: int, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """Starts the task's `run` on one node of two, as SkyPilot does."""
    own = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus)}
    environment = {**os.environ, **own, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", **variables}
    script = TASK["run"].replace("--master_port=8008", f"--master_port={port}")
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", "-c", script], cwd=workdir, env=environment, **pipe)  # type: ignore[call-overload,no-any-return]


def workdir_with(tmp_path: Path, program: str) -> Path:
    """Makes a folder whose environment has this program as its interpreter."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    write_python_program(tmp_path / ".venv" / "bin" / "python", program)
    return tmp_path


def test_each_node_starts_its_ranks_and_names_the_first_node(tmp_path: Path) -> None:
    workdir = workdir_with(tmp_path, "import sys\nprint(*sys.argv[1:])\n")
    started = node(workdir, 1, 8, 8008, {"FLAGS": "--bf16 --max_steps 3", "OUTPUT_DIR": "/shared/a run"})
    words = started.communicate(timeout=60)[0].split(" -m lightseq train ")
    places = {"--nnodes=2", "--node_rank=1", "--nproc_per_node=8", "--master_addr=127.0.0.1"}
    assert places <= {*words[0].split()}
    assert words[1].strip() == "--bf16 --max_steps 3 --output_dir /shared/a run --resume_from_checkpoint auto"


@pytest.mark.slow
def test_two_nodes_of_the_task_train_as_one_process(tmp_path: Path) -> None:
    files = small.write_inputs(tmp_path)
    program = f"import os, sys\nos.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
    workdir, flags = workdir_with(tmp_path, program), "--max_steps 3 --logging_steps 1"
    words = small.words(files, "nodes", flags).replace(f"--output_dir {files}/nodes", "")
    variables = {**VARIABLES, "FLAGS": words, "OUTPUT_DIR": str(files / "nodes")}
    port = free_port()
    nodes = [node(workdir, rank, 1, port, variables) for rank in (0, 1)]
    ended = [(one.communicate(timeout=240)[0], one.returncode) for one in nodes]
    assert [status for _, status in ended] == [0, 0], ended
    check_losses(files, "nodes", flags)


# ---- Ray Train -------------------------------------------------------------------------------------------------------


class Made(SimpleNamespace):
    """An object of Ray, which keeps what it was made from."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(positional=positional, **named)


def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a stand-in for the parts of Ray that the script uses."""
    for name, parts in {
        "ray": (),
        "ray.train": ("FailureConfig", "RunConfig", "ScalingConfig"),
        "ray.train.torch": ("TorchConfig", "TorchTrainer"),
    }.items():
        module = ModuleType(name)
        for part in parts:
            setattr(module, part, Made)
        monkeypatch.setitem(sys.modules, name, module)


GIVEN = "--num_workers 2 --model_name_or_path m --data_path d --output_dir o"


def trainers_made(monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[Any]:
    """Returns what Ray's trainers are made from for command lines that are not refused."""
    with_ray(monkeypatch)
    made: list[Any] = []
    monkeypatch.setattr(Made, "fit", lambda self: made.append(self), raising=False)
    assert [ray_train.main(shlex.split(line)) for line in lines] == [0] * len(lines)
    return made


def test_ray_gets_a_worker_for_each_rank_and_the_flags_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    many = f"{GIVEN} --num_workers 16 --max_failures 2 --storage_path /shared/ray --bf16 --output_dir 'a run'"
    made, on_cpu = trainers_made(monkeypatch, many, f"{GIVEN} --cpu")
    assert made.positional == (ray_train.train_rank,)
    assert made.train_loop_config["flags"][4:] == [
        *("--output_dir", "o", "--bf16", "--output_dir", "a run", "--resume_from_checkpoint", "auto")
    ]
    assert (made.scaling_config.num_workers, made.scaling_config.use_gpu) == (16, True)
    assert (made.run_config.storage_path, made.run_config.failure_config.max_failures) == ("/shared/ray", 2)
    assert not on_cpu.scaling_config.use_gpu


def test_ray_starts_no_worker_for_flags_that_training_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, reason in (("--bf17", "--bf17"), ("--bf16 --fp16", "exclude each other")):
        assert ray_train.main(f"{GIVEN} {wrong}".split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and reason in error and error.count("\n") == 1


def test_runs_that_ray_starts_again_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--resume_from_checkpoint c", "--resume-from-checkpoint=c")
    options = ("", "--max_failures 1", *(f"--max_failures 1 {more}" for more in given))
    made = trainers_made(monkeypatch, *(f"{GIVEN} {more}" for more in options))
    assert [each.train_loop_config["flags"][6:] for each in made] == [
        [], ["--resume_from_checkpoint", "auto"], ["--resume_from_checkpoint", "c"],
        ["--resume-from-checkpoint=c"],
    ]  # fmt: skip


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray.train", None)
    assert ray_train.main(GIVEN.split()) == 2
    assert "pip install 'ray[train]'" in capsys.readouterr().err


def test_a_worker_starts_its_rank_in_a_process_that_meets_the_others_at_rays_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, ...]] = []

    def start(command: list[str], env: dict[str, str], cwd: str, **_: Any) -> Any:
        started.append((command, env, cwd))
        return Made(returncode=len(started) - 1)

    monkeypatch.setattr(ray_train.subprocess, "run", start)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RANK", "5")
    config = {"flags": ["--bf16"], "folder": str(tmp_path), "root": str(ROOT)}
    ray_train.train_rank(config)
    command, env, folder = started[0]
    assert command == [sys.executable, "-m", "lightseq", "train", "--bf16"] and folder == str(tmp_path)
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True" and env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    with pytest.raises(RuntimeError, match="rank 5 ended with status 1"):
        ray_train.train_rank(config)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_workers_of_ray_train_as_one_process_and_resume_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.train", reason="needs Ray: make test-ray")
    files, flags = small.write_inputs(tmp_path), "--max_steps 30 --logging_steps 1 --save_steps 2"
    own = f"--num_workers 2 --cpu --max_failures 1 --storage_path {tmp_path}/records"
    command = [sys.executable, "launch/ray_train.py", *own.split(), *small.words(files, "workers", flags).split()]
    log, environment = tmp_path / "log", {**os.environ, **VARIABLES, "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("w") as file:
        running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        kill_a_rank(files / "workers", running)
        assert running.wait(timeout=600) == 0, log.read_text()
    finally:
        running.terminate()  # ends Ray's own processes, too
    assert "ended with status -9" in log.read_text()
    check_losses(files, "workers", flags)


def kill_a_rank(output: Path, running: subprocess.Popen[bytes]) -> None:
    """Kills the last rank of a run, which is named by its output, once it has a checkpoint."""
    while not (output / "checkpoint-4").exists():
        assert running.poll() is None, "the run ended before its first checkpoint"
        time.sleep(0.2)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            rank = re.search(rb"\0RANK=1\0", (folder / "environ").read_bytes())
        except OSError:
            continue
        if rank and str(output) in words and "lightseq" in words:
            os.kill(int(folder.name), 9)
            return
    raise AssertionError("rank 1 is not running")
