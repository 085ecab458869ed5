"""Batch scripts: the command that they make of an allocation, the batch, logs and refusals. Jobs of one node, of two,
and of two hosts with a cable between them train on CPU."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import slow_except
from executables import write_python_program
from slurm import ROOT, Cluster, Job, make_cluster

from data_gen.__main__ import main as data_gen

JOBS = sorted((ROOT / "launch" / "slurm").glob("*.sbatch"))
QUICK = ("baseline", "flash", "one_node", "several_nodes")
FLAGS = ("--model_name_or_path", "tiny-llama3", "--fsdp", "full_shard auto_wrap", "--note", "a 'quoted' $HOME *")
TYPED = "--model_name_or_path tiny-llama3 --fsdp 'full_shard auto_wrap' --note \"a 'quoted' \\$HOME *\""
PIPED = "envsubst '$MY_USER' < launch/slurm/{} | sbatch"
NOT_A_MULTIPLE = "GLOBAL_BATCH 10 is not a multiple of 4, the sequences of one pass (MICRO_BATCH 1 x 4 data ranks)"
REPORT = "import json, os, sys\nprint(json.dumps(sys.argv[1:]))\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return make_cluster(tmp_path)


@pytest.fixture
def reporting(cluster: Cluster) -> Cluster:
    """A cluster whose srun only reports what it was to run."""
    write_python_program(cluster.programs / "srun", REPORT)
    return cluster


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("data") / "zipf"
    data_gen(f"synthetic --kind zipf --documents 8 --length 64 --output {directory}".split())
    return str(directory)


def split(job: Job) -> tuple[list[str], list[str], list[str]]:
    """Returns the words of srun, of the launcher and of the program that a job was to run."""
    assert job.status == 0, job.out
    words = json.loads(job.out.splitlines()[-1])
    launcher = words.index(sys.executable)
    program = next(i for i, w in enumerate(words) if w.endswith("/train.py") or words[i : i + 2] == ["-m", "lightseq"])
    return words[:launcher], words[launcher + 1 : program], words[program:]


def value(words: list[str], flag: str) -> str:
    """Returns the value of a flag; the last one counts."""
    return words[len(words) - 1 - words[::-1].index(flag) + 1]


def test_several_nodes_rendezvous_at_the_head_node(reporting: Cluster) -> None:
    job = reporting.submit(f"sbatch launch/slurm/several_nodes.sbatch llama3 {TYPED}", FAKE_HOSTS="node07 node08")
    srun, launcher, program = split(job)
    expected = {"--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--output=logs/lightseq-4242/%N.log"}
    assert expected <= set(srun)
    rendezvous = ["--rdzv_backend=c10d", "--rdzv_id=4242", "--rdzv_endpoint=node07:24242"]
    assert launcher == ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=gpu", *rendezvous]
    assert program == ["llama3/train.py", "--output_dir", "outputs/lightseq-4242", *FLAGS]
    assert (reporting.home / "logs" / "lightseq-4242").is_dir()

    command = "sbatch --nodes=3 --job-name=long launch/slurm/several_nodes.sbatch llama3"
    srun, launcher, program = split(reporting.submit(command, FAKE_HOSTS="node01 node02 node03"))
    assert "--nodes=3" in srun and "--nnodes=3" in launcher, "options of sbatch override the script's"
    assert value(program, "--output_dir") == "outputs/long-4242"


@pytest.mark.parametrize(("word", "program"), [("llama2", ["llama2/train.py"]), ("train", ["-m", "lightseq", "train"])])
def test_one_node_needs_no_rendezvous(word: str, program: list[str], reporting: Cluster) -> None:
    _, launcher, words = split(reporting.submit(f"sbatch launch/slurm/one_node.sbatch {word} {TYPED}"))
    assert launcher == ["-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=gpu", "--standalone"]
    assert words == [*program, "--output_dir", "outputs/lightseq-4242", *FLAGS]


def test_envsubst_inserts_the_user_only(reporting: Cluster) -> None:
    """The job does not have the variable itself, so only the text of the script can carry it."""
    command = PIPED.format("one_node.sbatch").replace("| sbatch", "| env -u MY_USER sbatch")
    environment = {"MY_USER": "ada", "FAMILY": "llama3", "MODEL": "a model", "LENGTH": "64", "MAX_STEPS": "5"}
    srun, _, program = split(reporting.submit(command, **environment))
    assert "--output=logs/ada/lightseq-4242/%N.log" in srun
    assert program[1:] == [
        *("--output_dir", "outputs/ada/lightseq-4242", "--model_name_or_path", "a model"),
        *("--model_max_length", "64", "--max_steps", "5"),
    ]


@pytest.mark.parametrize(
    "script", slow_except([job for job in JOBS if job.stem in QUICK], JOBS), ids=lambda path: path.name
)
def test_a_script_is_the_same_piped_and_submitted(script: Path, reporting: Cluster) -> None:
    options = re.findall(r"^#SBATCH (.*)$", script.read_text(), re.MULTILINE)
    assert {"--no-requeue", "--ntasks-per-node=1"} <= set(options)
    assert not [option for option in options if re.match(r"--(account|partition|qos|mail|reservation)", option)]
    environment = {"FAMILY": "llama3", "MY_USER": "", "NPROC": "2"}
    piped = reporting.submit(PIPED.format(script.name), **environment)
    plain = reporting.submit(f"sbatch launch/slurm/{script.name}", **environment)
    assert split(piped) == split(plain)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("flash_fsdp", {"--kernel": "auto", "--fsdp": "full_shard"}),
        ("flash", {"--kernel": "auto", "--fsdp": ""}),
        ("fsdp", {"--kernel": "reference", "--fsdp": "full_shard"}),
        ("neither", {"--kernel": "reference", "--fsdp": ""}),
        ("baseline", {"--kernel": "aten", "--fsdp": "full_shard"}),
        ("fp8", {"--kernel": "aten", "--fsdp": "full_shard", "--fp8": "tensorwise"}),
    ],
)
def test_variants_differ_only_in_the_setting_they_are_named_after(
    name: str, flags: dict[str, str], reporting: Cluster
) -> None:
    _, _, program = split(reporting.submit(PIPED.format(f"{name}.sbatch"), NPROC="4"))
    common = {"--model_name_or_path": "llama3.2-1b", "--data_path": "data/zipf", "--max_steps": "50"}
    expected = common | flags | {"--gradient_accumulation_steps": "8"}
    assert {flag: value(program, flag) for flag in expected} == expected
    assert ("--fp8" in program) == ("--fp8" in flags)


def test_flags_can_come_from_a_file_one_word_a_line(reporting: Cluster) -> None:
    (reporting.home / "words").write_text('--rope_scaling\n{"rope_type": "linear", "factor": 4}\n--fsdp\n\n')
    _, _, program = split(reporting.submit("sbatch launch/slurm/flash_fsdp.sbatch", FLAGS_FILE="words", NPROC="4"))
    assert program[-4:] == ["--rope_scaling", '{"rope_type": "linear", "factor": 4}', "--fsdp", ""]


SHARED_NODE = {"SLURM_GPUS_PER_NODE": "h100:2", "SLURM_GPUS_ON_NODE": "4"}  # as real Slurm sets them in exclusive jobs


@pytest.mark.parametrize(
    ("nodes", "environment", "accumulation"),
    [
        (1, {"GLOBAL_BATCH": "1"}, "1"),  # all ranks on one sequence
        (1, {"GLOBAL_BATCH": "6"}, "6"),
        (1, {"GLOBAL_BATCH": "8", "SEQUENCE_PARALLEL": "2"}, "4"),
        (2, {"GLOBAL_BATCH": "8", "SEQUENCE_PARALLEL": "2"}, "2"),
        (2, {"GLOBAL_BATCH": "32", "SEQUENCE_PARALLEL": "1", "MICRO_BATCH": "4"}, "1"),
        (1, {"MICRO_BATCH": "3"}, "1"),
        (1, {"NPROC": "", "SLURM_GPUS_ON_NODE": "2", "GLOBAL_BATCH": "8", "SEQUENCE_PARALLEL": "1"}, "4"),
        (1, {"NPROC": "", **SHARED_NODE, "GLOBAL_BATCH": "8", "SEQUENCE_PARALLEL": "1"}, "4"),
    ],
)
def test_accumulation_makes_the_global_batch(
    nodes: int, environment: dict[str, str], accumulation: str, reporting: Cluster
) -> None:
    command = f"sbatch --nodes={nodes} launch/slurm/one_node.sbatch llama3"
    _, _, program = split(reporting.submit(command, **{"NPROC": "4", **environment}))
    processes = int(environment.get("SLURM_GPUS_ON_NODE", "4")) * nodes
    assert value(program, "--gradient_accumulation_steps") == accumulation
    assert value(program, "--sequence_parallel_size") == environment.get("SEQUENCE_PARALLEL", str(processes))
    assert value(program, "--per_device_train_batch_size") == environment.get("MICRO_BATCH", "1")


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        ("", {}, "name the program first"),
        ("mistral", {}, "unknown program 'mistral'; llama2, llama3 or train"),
        ("llama3", {"FAKE_HOSTS": " "}, "scontrol names no host for 'node[01-01]'"),
        ("llama3", {"GLOBAL_BATCH": "0"}, "GLOBAL_BATCH '0' is not a whole number above 0"),
        ("llama3", {"GLOBAL_BATCH": "08"}, "GLOBAL_BATCH '08' is not a whole number above 0"),
        ("llama3", {"GLOBAL_BATCH": "9" * 11}, "GLOBAL_BATCH 99999999999 is too large; give at most 9"),
        ("llama3", {"GLOBAL_BATCH": "4", "MICRO_BATCH": "0"}, "MICRO_BATCH '0' is not"),
        ("llama3", {"GLOBAL_BATCH": "4", "SEQUENCE_PARALLEL": "3"}, "3 does not divide the 4 processes"),
        ("llama3", {"GLOBAL_BATCH": "4", "NPROC": ""}, "the number of GPUs per node is unknown here; set NPROC"),
        ("llama3", {"GLOBAL_BATCH": "4", "NPROC": "gpu"}, "NPROC 'gpu' is not a whole number above 0"),
        ("llama3", {"GLOBAL_BATCH": "10", "SEQUENCE_PARALLEL": "1"}, f"{NOT_A_MULTIPLE}; give 8 or 12"),
        ("llama3", {"GLOBAL_BATCH": "2", "SEQUENCE_PARALLEL": "1"}, "give 4"),
        (
            "llama3 --gradient_accumulation_steps=2",
            {"GLOBAL_BATCH": "4"},
            "--gradient_accumulation_steps is set by GLOBAL_BATCH; give one of the two",
        ),
        ("llama3 --per-device-train-batch-size 4", {"GLOBAL_BATCH": "4"}, "--per_device_train_batch_size is set by"),
        ("llama3", {"MICRO_BATCH": "4", "FLAGS_FILE": "words"}, "--sequence_parallel_size is set"),
        ("llama3", {"FLAGS_FILE": "nowhere"}, "no FLAGS_FILE nowhere in"),
        ("llama3", {"CONTAINER": "nowhere.toml"}, "no CONTAINER nowhere.toml in"),
        ("llama3", {"CONTAINER": "nowhere.sqsh"}, "no CONTAINER nowhere.sqsh in"),
        ("llama3", {"REQUEUE": "yes"}, "REQUEUE 'yes' is neither 1 nor 0"),
    ],
)
def test_a_job_refuses_in_one_line(words: str, environment: dict[str, str], said: str, reporting: Cluster) -> None:
    (reporting.home / "words").write_text("--sequence-parallel-size=2\n")
    job = reporting.submit(f"sbatch launch/slurm/one_node.sbatch {words}", **{"NPROC": "4", **environment})
    assert job.status == 2, job.out
    (line,) = job.out.splitlines()
    assert line.startswith("lightseq: error: ") and said in line


def test_a_script_says_where_to_submit_it_from(reporting: Cluster) -> None:
    script = shlex.quote(str(ROOT / "launch" / "slurm" / "fp8.sbatch"))
    job = reporting.submit(f"mkdir elsewhere; cd elsewhere; sbatch {script}; mv slurm-* ..")
    assert job.status == 2 and "error: submit from the repository root" in job.out


def test_a_job_is_requeued_only_on_request_and_then_resumes(reporting: Cluster) -> None:
    command = "sbatch launch/slurm/one_node.sbatch llama3 --output_dir 'my run'"
    again = {"REQUEUE": "1", "SLURM_RESTART_COUNT": "1"}

    def program(command: str, **environment: str) -> list[str]:
        return split(reporting.submit(command, **environment))[2]

    assert not {"--resume_from_checkpoint", "--overwrite_output_dir"} & {*program(command, SLURM_RESTART_COUNT="1")}
    assert not (reporting.home / "updates").exists()
    assert "--resume_from_checkpoint" not in program(command, REQUEUE="1")
    assert (reporting.home / "updates").read_text() == "JobId=4242 Requeue=1\n"
    assert program(command, **again)[-2:] == ["--resume_from_checkpoint", "auto"]

    given = f"{command} --resume_from_checkpoint other/checkpoint-6 --output-dir={reporting.home}/saved"
    assert value(program(given, **again), "--resume_from_checkpoint") == "other/checkpoint-6", "nothing is saved yet"
    for name, resumed in (("checkpoint-9.partial", "other/checkpoint-6"), ("checkpoint-8", "auto")):
        (reporting.home / "saved" / name).mkdir(parents=True)
        (reporting.home / "saved" / name / "trainer_state.json").touch()
        assert value(program(given, **again), "--resume_from_checkpoint") == resumed


@pytest.mark.parametrize(("made", "requeues"), [("checkpoint-5", True), ("checkpoint-5.partial", False)])
def test_a_failed_job_is_requeued_only_if_it_has_saved(made: str, requeues: bool, cluster: Cluster) -> None:
    saves = f"mkdir -p saved/{made}; sleep 0.1; touch saved/{made}/trainer_state.json; exit 3"
    (cluster.programs / "python").write_text(f"#!/usr/bin/env bash\n{saves}\n")
    (cluster.programs / "python").chmod(0o755)
    command = "sbatch launch/slurm/one_node.sbatch llama3 --output_dir saved"
    job = cluster.submit(command, PYTHON=str(cluster.programs / "python"), REQUEUE="1")
    assert job.status == 3 and (cluster.home / "requeues").exists() == requeues


def test_a_container_is_entered_by_srun(reporting: Cluster) -> None:
    command = "touch my.toml image.sqsh; sbatch launch/slurm/one_node.sbatch llama3"
    srun, _, _ = split(reporting.submit(command, CONTAINER="my.toml"))
    assert f"--environment={reporting.home}/my.toml" in srun
    srun, _, _ = split(reporting.submit(command, CONTAINER="image.sqsh"))
    assert {"--container-image=image.sqsh", f"--container-workdir={reporting.home}"} <= set(srun)


def test_a_job_fails_with_its_program_and_keeps_its_log(cluster: Cluster) -> None:
    (cluster.programs / "python").write_text("#!/usr/bin/env bash\necho cannot >&2\nexit 3\n")
    (cluster.programs / "python").chmod(0o755)
    job = cluster.submit("sbatch launch/slurm/several_nodes.sbatch llama3", PYTHON=str(cluster.programs / "python"))
    assert job.status == 3
    said = [path.read_text() for path in (cluster.home / "logs/lightseq-4242").glob("*[!d].log")]
    assert "cannot\n" in said  # the node that fails first ends the other, which may not have come to say it


def trained(cluster: Cluster, output: str) -> dict[str, Any]:
    """Returns run.json of a run, whose losses must all be there and fall."""
    records = [json.loads(line) for line in (cluster.home / output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert records[1]["loss"] < records[0]["loss"] < 7
    run: dict[str, Any] = json.loads((cluster.home / output / "run.json").read_text())
    return run


RUN = {"MODEL": "tiny-llama3", "LENGTH": "64", "MAX_STEPS": "2"}


@pytest.mark.slow
def test_a_piped_job_trains_on_two_processes(cluster: Cluster, data: str) -> None:
    (cluster.home / "words").write_text("--bf16\nFalse\n")
    environment = {"NPROC": "2", "GLOBAL_BATCH": "4", "FLAGS_FILE": "words", "MY_USER": "ada", "DATA": data}
    job = cluster.submit(PIPED.format("flash_fsdp.sbatch"), **RUN, **environment)
    assert job.status == 0, job.out
    run = trained(cluster, "outputs/ada/flash-fsdp-4242")
    assert run["world_size"] == 2 and run["data_ranks"] == 2
    assert "step 2/2" in (cluster.home / "logs/ada/flash-fsdp-4242/localhost.log").read_text()


@pytest.mark.slow
def test_a_job_of_two_nodes_trains_over_both(cluster: Cluster, data: str) -> None:
    command = "sbatch launch/slurm/several_nodes.sbatch llama3 --random_init --save_strategy no"
    job = cluster.submit(command, NPROC="1", DATA=data, **RUN)
    assert job.status == 0, job.out
    assert trained(cluster, "outputs/lightseq-4242")["sequence_ranks"] == 2
    logs = {path.name for path in (cluster.home / "logs/lightseq-4242").iterdir()}
    assert logs == {"127.0.0.1.log", "command.log", "localhost.log"}


# Two hosts of one network each, and a cable: run as `unshare --map-root-user --user --net --mount --uts`.
HOSTS = """
set -euo pipefail
mount --bind "$1" /etc/hosts
for i in 1 2; do
    unshare --net --uts sleep 300 &
    pids[i]=$!
done
trap 'kill "${pids[@]}"' EXIT
sleep 0.5
ip link add name cable1 type veth peer name cable2
for i in 1 2; do
    ip link set "cable$i" netns "${pids[i]}"
    nsenter --target "${pids[i]}" --net --uts bash -c "
        hostname node0$i; ip addr add 10.77.0.$i/24 dev cable$i; ip link set cable$i up; ip link set lo up"
done
FAKE_ENTER_node01=${pids[1]} FAKE_ENTER_node02=${pids[2]} FAKE_HOSTS="node01 node02" sbatch "${@:2}"
"""
SPACES = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--uts")


def can_make_hosts() -> bool:
    if not all(shutil.which(name) for name in ("unshare", "nsenter", "ip")):
        return False
    cable = ["ip", "link", "add", "name", "cable1", "type", "veth", "peer", "name", "cable2"]
    return subprocess.run([*SPACES, *cable], capture_output=True).returncode == 0


@pytest.mark.slow
def test_two_hosts_joined_by_a_cable_train_together(cluster: Cluster, data: str) -> None:
    if not can_make_hosts():
        pytest.skip("making network namespaces is not allowed here")
    (cluster.home / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node01\n10.77.0.2 node02\n")
    (cluster.home / "hosts.sh").write_text(HOSTS)
    command = "bash hosts.sh hosts launch/slurm/several_nodes.sbatch llama3 --random_init --save_strategy no"
    job = cluster.submit(f"{' '.join(SPACES)} {command}", NPROC="1", DATA=data, **RUN)
    assert job.status == 0, job.out
    assert "--rdzv_endpoint=node01:24242" in job.out
    run = trained(cluster, "outputs/lightseq-4242")
    assert run["world_size"] == 2 and run["hardware"]["host"] == "node01"
    assert {"node01.log", "node02.log"} <= {p.name for p in (cluster.home / "logs/lightseq-4242").iterdir()}
