"""Launch scripts: what they run, pass on and refuse. A program that reports its arguments stands in for torch."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from executables import write_python_program

from data_gen.__main__ import main as data_gen
from lightseq.distributed.environment import LAUNCHER_SETTINGS, launcher_note, launcher_shutdown_seconds
from lightseq.models.presets import LLAMA3

ROOT = Path(__file__).resolve().parent.parent
JOBS = sorted((ROOT / "launch" / "slurm").glob("*.sbatch"))
SCRIPTS = (ROOT / "launch" / "local.sh", ROOT / "launch" / "extend.sh", *JOBS, ROOT / ".ci" / "run")
FLAGS = ("--model_name_or_path", "tiny-llama3", "--fsdp", "full_shard auto_wrap", "--note", "a 'quoted' $HOME *")


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder with a `python` that has 3 GPUs and reports its arguments."""
    report = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    counts = "import sys\nif sys.argv[1] == '-c':\n    sys.exit(print(3))\n"
    write_python_program(tmp_path / "python", f"{counts}{report}")
    return tmp_path


def run(script: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with only the given environment, so that settings of this host do not matter."""
    variables = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **environment}
    command = ["bash", str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=60)


def reported(done: subprocess.CompletedProcess[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments and the environment of the launcher."""
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout.splitlines()[-1])
    return arguments, environment


def test_local_starts_one_process_per_gpu_and_passes_flags_unchanged(stand_ins: Path) -> None:
    arguments, _ = reported(run("local.sh", "llama3", *FLAGS, cwd=stand_ins, PYTHON=str(stand_ins / "python")))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    assert arguments == [*launcher, str(ROOT / "llama3" / "train.py"), *FLAGS]


def test_local_starts_two_processes_without_gpus(stand_ins: Path) -> None:
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
    for given, threads in (({}, cores), ({"NPROC": "4096"}, "1"), ({"OMP_NUM_THREADS": "5"}, "5")):
        done = run("local.sh", "llama3", cwd=stand_ins, **environment | given)
        assert reported(done)[1]["OMP_NUM_THREADS"] == threads


TORCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "llama3/train.py")
LOCAL = ("env", "NPROC=2", f"PYTHON={sys.executable}", "launch/local.sh", "llama3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "exported", "name"),
    [(LOCAL, False, "SIGTERM"), (LOCAL, False, "SIGUSR1"), (TORCH, True, "SIGTERM"), (TORCH, True, "SIGUSR1")],
)
def test_a_signal_to_the_launcher_saves_and_ends_the_run(
    command: tuple[str, ...], exported: bool, name: str, tmp_path: Path
) -> None:
    out = stopped(command, tmp_path / "out", name, **exported_by_the_page_on_reliability() if exported else {})
    assert f"stopped by {name}; resume with" in out and list((tmp_path / "out").glob("checkpoint-*"))
    assert "torch's launcher" not in out


@pytest.mark.slow
def test_a_run_whose_launcher_would_lose_a_checkpoint_says_so_first(tmp_path: Path) -> None:
    out = stopped(TORCH, tmp_path / "out", "SIGTERM")
    before, _, _ = out.partition("step ")
    assert launcher_words(exported_by_the_page_on_reliability()) in before


def stopped(command: tuple[str, ...], output: Path, name: str, **environment: str) -> str:
    """Returns the output of a run whose launcher gets a signal after the first logged step."""
    data = output.parent / "data"
    assert data_gen(f"synthetic --kind copy --documents 4 --length 64 --output {data}".split()) == 0
    flags = f"--model_name_or_path tiny-llama3 --random_init --data_path {data} --output_dir {output}"
    flags += " --model_max_length 64 --max_steps 100000"
    given = {"PATH": os.environ["PATH"], "HOME": str(output.parent), "OMP_NUM_THREADS": "1", **environment}
    words, pipe = [*command, *flags.split()], subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, env=given, stdout=pipe, stderr=pipe, text=True) as launcher:
        deadline, metrics = time.monotonic() + 60, output / "metrics.jsonl"
        while time.monotonic() < deadline and not (metrics.is_file() and metrics.read_text()):
            time.sleep(0.05)
        launcher.send_signal(getattr(signal, name))
        out, _ = launcher.communicate(timeout=60)
    return out


def exported_by_the_page_on_reliability() -> dict[str, str]:
    page = (ROOT / "docs" / "reliability.md").read_text()
    return dict(re.findall(r"^export ((?:TORCH|PET)_\w+)=(.*)$", page, flags=re.MULTILINE))


def launcher_words(settings: dict[str, str]) -> str:
    return "before starting it, export " + " ".join(f"{name}={value}" for name, value in settings.items())


def test_missing_launcher_settings_are_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER_SETTINGS, "PET_SHUTDOWN_TIMEOUT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.delenv(name, raising=False)
    assert launcher_note() == () and launcher_shutdown_seconds() is None  # no launcher, or another's
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    (line,) = launcher_note()
    assert "ends this run 30 s after SIGTERM, saved or not, and at once on SIGUSR1, without a checkpoint" in line
    assert line.endswith(launcher_words(LAUNCHER_SETTINGS)) and launcher_shutdown_seconds() == 30
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "900")
    (line,) = launcher_note()
    assert "after SIGTERM" not in line and launcher_shutdown_seconds() == 900
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1")  # as torch makes it of a flag, too
    assert launcher_note() == ()


def test_the_page_on_reliability_exports_what_the_scripts_of_launch_do() -> None:
    assert exported_by_the_page_on_reliability() == LAUNCHER_SETTINGS
    for script in (ROOT / "launch" / "local.sh", ROOT / "launch" / "slurm" / "job.sh"):
        for name, value in LAUNCHER_SETTINGS.items():
            assert f'export {name}="${{{name}:-{value}}}"' in script.read_text()


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ((), {}, "give a model family or a command first"),
        (("mistral",), {}, "'mistral' is neither a model family nor a command\n"),
        (("plan",), {}, "'plan' runs in one process: use lightseq plan"),
        (("llama3",), {"NPROC": "0"}, "NPROC '0' is not a number of processes"),
        (("llama3",), {"NPROC": "two"}, "NPROC 'two' is not a number of processes"),
        (("llama3",), {"PYTHON": "/nowhere/python"}, "/nowhere/python cannot import torch (/"),
    ],
)
def test_local_refuses_with_one_error_and_its_usage(
    arguments: tuple[str, ...], environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = run("local.sh", *arguments, cwd=tmp_path, **environment)
    assert done.returncode == 2
    assert done.stderr.startswith(f"launch/local.sh: error: {said}") or not arguments
    assert f"launch/local.sh: error: {said}" in done.stderr
    assert "usage: " in done.stderr.splitlines()[-1]


def test_scripts_can_be_run() -> None:
    assert all(os.access(script, os.X_OK) for script in SCRIPTS)


# ---- continuous integration ----------------------------------------------------------------------------------------


def test_ci_tests_the_last_commit_in_a_clone_and_removes_it(tmp_path: Path) -> None:
    checkout, temporary = tmp_path / "ein ü checkout", tmp_path / "temporary"
    for folder in (checkout / ".ci", temporary):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    says = "@echo $@ in $(CURDIR) with $(PYTHON): $$(cat committed)"
    (checkout / "Makefile").write_text(f"check:\n\t{says}\ntest:\n\t{says}; exit 2\n")
    (checkout / "committed").write_text("yes\n")
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    (checkout / "committed").write_text("no\n")
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(temporary), "PYTHON": ".venv/bin/python"}
    script = [str(checkout / ".ci" / "run")]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    (folder,) = set(re.findall(r" in (\S+) with ", done.stdout))
    assert Path(folder).name == "lightseq" and Path(folder).is_relative_to(temporary)
    for target in ("check", "test"):
        assert f"{target} in {folder} with {checkout}/.venv/bin/python: yes" in done.stdout
    assert "uncommitted changes are not tested" in done.stdout and not list(temporary.iterdir())


# ---- stages of a longer context --------------------------------------------------------------------------------------


def stage_flags(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        assert words[:2] == [str(ROOT / "launch" / "local.sh"), "llama3"] and words[-1] == "--bf16"
        found.append({words[i]: words[i + 1] for i in range(2, len(words) - 1, 2)})
    return found


def stages(directory: Path, *flags: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Prints the commands of the stages that launch/extend.sh would run."""
    names = {"MODEL": "m", "DATA": "d", "OUTPUT": str(directory), "DRY_RUN": "1", **given}
    return run("extend.sh", *(flags or ("--bf16",)), cwd=directory, **names)


def test_stages_grow_from_each_others_weights(tmp_path: Path) -> None:
    first, second, third = stage_flags(stages(tmp_path, DATA_512K="long"))
    assert [s["--model_max_length"] for s in (first, second, third)] == ["32768", "131072", "524288"]
    assert [s["--data_path"] for s in (first, second, third)] == ["d", "d", "long"]
    assert (first["--model_name_or_path"], second["--model_name_or_path"]) == ("m", f"{tmp_path}/32K/checkpoint-1000")
    assert json.loads(third["--rope_scaling"]) == {"rope_type": "yarn", "factor": 64}


def test_the_factor_of_a_stage_reaches_its_length_exactly(tmp_path: Path) -> None:
    for context, spelled in ((8192, "8192"), (8192, "8K"), (10007, "10007")):
        found = stage_flags(stages(tmp_path, STAGES="100000:5 1000000:5", CONTEXT=spelled))
        factors = [json.loads(stage["--rope_scaling"])["factor"] for stage in found]
        assert factors == [100_000 / context, 1_000_000 / context]


def test_stages_keep_a_scaling_that_covers_them_already(tmp_path: Path) -> None:
    model = "meta-llama/Llama-3.2-1B"
    warned = stages(tmp_path, MODEL=model)
    assert f"warning: {model} reaches 131072 by its own scaling" in warned.stderr
    assert "--rope_scaling" in stage_flags(warned)[0]
    done = stages(tmp_path, MODEL=model, REACH="128K")
    assert "warning" not in done.stderr
    first, second, third = stage_flags(done)
    assert not (first.keys() | second.keys()) & {"--rope_scaling", "--rope_theta"}
    assert json.loads(third["--rope_scaling"]) == {"rope_type": "yarn", "factor": 64}, "from before any scaling"
    third = stage_flags(stages(tmp_path, MODEL=model, REACH="128K", ROPE="theta"))[2]
    assert third["--rope_theta"] == "2000000", "beside the model's own scaling"
    assert "warning" not in stages(tmp_path, MODEL="meta-llama/Meta-Llama-3-8B").stderr


def test_stages_resume(tmp_path: Path) -> None:
    for done in ("8K/checkpoint-5", "64K/checkpoint-1"):
        (tmp_path / done).mkdir(parents=True)
        (tmp_path / done / "trainer_state.json").write_text("{}")
    (stage,) = stage_flags(stages(tmp_path, STAGES="8K:5 64K:2", ROPE="theta"))
    assert stage["--model_name_or_path"] == f"{tmp_path}/8K/checkpoint-5"
    assert stage["--resume_from_checkpoint"] == "auto" and stage["--rope_theta"] == "4000000"


def test_stages_refuse_invalid_settings_and_explain_them(tmp_path: Path) -> None:
    for change, line in (
        ({"STAGES": "8K"}, "'8K' is not a stage"),
        ({"ROPE": "pi"}, "ROPE 'pi' is unknown"),
        ({"REACH": "far"}, "'far' is not a length"),
        ({"MODEL": ""}, "error: MODEL is not set: "),
    ):
        refused = stages(tmp_path, **change)
        assert refused.returncode == 2 and line in refused.stderr
    helped = stages(tmp_path, "--help")
    assert helped.returncode == 0 and "  DRY_RUN=1  " in helped.stdout and "set -euo" not in helped.stdout


@pytest.mark.slow
def test_stages_run_and_their_scaling_is_in_the_model_that_is_saved(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    from lightseq.architecture.family import preset_config

    torch.manual_seed(0)
    LlamaForCausalLM(preset_config(LLAMA3, "tiny-llama3")).save_pretrained(tmp_path / "model")
    assert data_gen(f"synthetic --kind copy --documents 4 --length 128 --output {tmp_path}/data".split()) == 0
    given = {"MODEL": f"{tmp_path}/model", "DATA": f"{tmp_path}/data", "OUTPUT": f"{tmp_path}/out", "CONTEXT": "1024"}
    given |= {"STAGES": "32:1 2K:1 4K:1", "NPROC": "1", "PYTHON": sys.executable, "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "extend.sh")],
        env={"PATH": os.environ["PATH"], **given}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tokens exceed the" not in done.stdout + done.stderr
    last = AutoConfig.from_pretrained(tmp_path / "out" / "4K" / "checkpoint-1")
    assert last.rope_parameters["factor"] == 4 and last.rope_parameters["original_max_position_embeddings"] == 1024
    assert last.max_position_embeddings == 4096
