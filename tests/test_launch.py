"""Knows what the launch scripts must run, pass on and refuse; programs that only report their arguments stand in for
torch, srun and scontrol."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = (ROOT / "launch" / "local.sh", ROOT / "launch" / "slurm.sbatch", ROOT / ".ci" / "run")
FLAGS = ("--model_name_or_path", "tiny-llama3", "--fsdp", "full_shard auto_wrap", "--note", "a 'quoted' $HOME *")


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder of programs: `python` has 3 GPUs and reports its arguments, as `srun` does; `scontrol` names hosts."""
    report = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ.get('OMP_NUM_THREADS')]))\n"
    programs = {
        "python": "import sys\nif sys.argv[1] == '-c':\n    sys.exit(print(3))\n" + report,
        "srun": report,
        "scontrol": "import sys\nassert sys.argv[3] == 'node[07-08]'\nprint('node07', 'node08', sep='\\n')\n",
    }
    for name, source in programs.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{source}")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(script: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with only the given environment, so that what this host sets cannot show through."""
    variables = {"PATH": os.environ["PATH"], **environment}
    command = ["bash", str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=60)


def reported(done: subprocess.CompletedProcess[str]) -> tuple[list[str], str]:
    assert done.returncode == 0, done.stderr
    arguments, threads = json.loads(done.stdout.splitlines()[-1])
    return arguments, threads


def slurm(stand_ins: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    submitted = stand_ins / "repository"
    (submitted / "llama3").mkdir(parents=True, exist_ok=True)
    (submitted / "llama3" / "train.py").touch()
    job = {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "PYTHON": "/usr/bin/some python",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NAME": "long",
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_SUBMIT_DIR": str(submitted),
    }
    return run("slurm.sbatch", *arguments, cwd=stand_ins, **(job | environment))


def test_local_starts_one_process_a_gpu_and_passes_every_flag_as_it_is(stand_ins: Path) -> None:
    arguments, _ = reported(run("local.sh", "llama3", *FLAGS, cwd=stand_ins, PYTHON=str(stand_ins / "python")))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    assert arguments == [*launcher, str(ROOT / "llama3" / "train.py"), *FLAGS]


def test_local_starts_two_processes_where_there_is_no_gpu(stand_ins: Path) -> None:
    # The question as asked of torch, with a torch that has no GPU.
    (stand_ins / "torch.py").write_text("class cuda:\n    device_count = staticmethod(lambda: 0)\n")
    question, rest = f'exec "{sys.executable}" "$@"', f'exec "{stand_ins}/python" "$@"'
    (stand_ins / "ask").write_text(f"#!/usr/bin/env bash\nif [[ $1 == -c ]]; then {question}; fi\n{rest}\n")
    (stand_ins / "ask").chmod(0o755)
    done = run("local.sh", "llama2", cwd=stand_ins, PYTHON=str(stand_ins / "ask"), PYTHONPATH=str(stand_ins))
    assert "--nproc_per_node=2" in reported(done)[0]


def test_local_shares_the_cores_among_its_processes(stand_ins: Path) -> None:
    environment = {"PYTHON": str(stand_ins / "python"), "NPROC": "1"}
    cores = subprocess.run(["nproc"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True).stdout.strip()
    assert reported(run("local.sh", "llama3", cwd=stand_ins, **environment))[1] == cores
    assert reported(run("local.sh", "llama3", cwd=stand_ins, **environment | {"NPROC": "4096"}))[1] == "1"
    assert reported(run("local.sh", "llama3", cwd=stand_ins, OMP_NUM_THREADS="5", **environment))[1] == "5"


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ((), {}, "name the model family first"),
        (("llama4",), {}, "unknown model family 'llama4'"),
        (("llama3",), {"NPROC": "0"}, "NPROC '0' is not a number of processes"),
        (("llama3",), {"NPROC": "two"}, "NPROC 'two' is not a number of processes"),
        (("llama3",), {"PYTHON": "/nowhere/python"}, "/nowhere/python cannot import torch"),
    ],
)
def test_local_refuses_with_one_error_and_its_usage(
    arguments: tuple[str, ...], environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = run("local.sh", *arguments, cwd=tmp_path, **environment)
    assert done.returncode == 2
    assert f"launch/local.sh: error: {said}" in done.stderr
    assert "usage: " in done.stderr.splitlines()[-1]


def test_slurm_starts_one_launcher_a_node_that_meet_at_the_head_node(stand_ins: Path) -> None:
    arguments, _ = reported(slurm(stand_ins, "llama3", *FLAGS))
    place = arguments.index("/usr/bin/some python")
    assert {"--nodes=2", "--ntasks-per-node=1", "--output=logs/long-1234567/%N.log"} <= set(arguments[:place])
    assert arguments[place + 1 :] == [
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=gpu",
        "--rdzv_backend=c10d",
        "--rdzv_id=1234567",
        "--rdzv_endpoint=node07:24567",
        "llama3/train.py",
        *FLAGS,
    ]
    assert (stand_ins / "repository" / "logs" / "long-1234567").is_dir()


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ((), {}, "name the model family first"),
        (("mistral",), {}, "unknown model family 'mistral'"),
        (("llama2",), {}, "no llama2/train.py in"),
        (("llama3",), {"SLURM_JOB_ID": ""}, "not inside a Slurm job"),
        (("llama3",), {"SLURM_JOB_NODELIST": "unknown"}, "scontrol names no host for 'unknown'"),
    ],
)
def test_slurm_refuses_with_one_error_and_its_usage(
    arguments: tuple[str, ...], environment: dict[str, str], said: str, stand_ins: Path
) -> None:
    done = slurm(stand_ins, *arguments, **environment)
    assert done.returncode == 2
    assert f"launch/slurm.sbatch: error: {said}" in done.stderr
    assert "usage: " in done.stderr.splitlines()[-1]


def test_slurm_options_name_no_account_and_never_requeue() -> None:
    lines = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert {"--no-requeue", "--ntasks-per-node=1"} <= set(options)
    assert not [option for option in options if option.startswith(("--account", "--partition", "--qos", "--mail"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_run_and_parse(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean_under_shellcheck(script: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
