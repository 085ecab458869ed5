"""Ranks that a command starts on this host: their environment, how they end, and what their command returns."""

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

from lightseq.cli import main
from lightseq.distributed import rank_launcher
from lightseq.distributed.job_launchers import adopt_launcher, without_rank
from lightseq.distributed.rank_launcher import Launch, parse_launcher_flags, start_ranks

# Variables of any launcher, which a test run may have been started with.
PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "RAY_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setattr(rank_launcher, "GRACE_SECONDS", 0.5)


def launch(size: int, code: str, max_restarts: int = 0) -> int:
    return Launch(
        [sys.executable, "-c", f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{code}"], size
    ).run(max_restarts)


def test_each_rank_learns_its_place(tmp_path: Path) -> None:
    names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
    code = f"open(f'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names}))"
    assert launch(3, code) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        str(rank): f"{rank} 3 3 127.0.0.1 0" for rank in range(3)
    }


def test_the_first_failure_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert launch(3, "sys.exit(7) if rank == 1 else time.sleep(60)") == 7
    assert time.monotonic() - begin < 30
    assert capfd.readouterr().err == ""  # the rank itself says why


def test_a_killed_rank_is_named_though_another_failed_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_launcher, "GRACE_SECONDS", 30.0)
    code = "sys.exit(1) if rank == 0 else (time.sleep(0.2), os.kill(os.getpid(), signal.SIGKILL))"
    assert launch(2, code) == 137
    assert capfd.readouterr().err == (
        "error: rank 1 was ended by SIGKILL; the kernel does that when the host's memory runs out\n"
    )


@pytest.mark.parametrize(("status", "max_restarts", "starts"), [(1, 2, 3), (1, 0, 1), (2, 2, 1)])
def test_failed_ranks_start_again_unless_they_were_refused(
    tmp_path: Path, status: int, max_restarts: int, starts: int
) -> None:
    code = f"open('{tmp_path}/' + os.environ['TORCHELASTIC_RESTART_COUNT'], 'w'); sys.exit({status})"
    assert launch(1, code, max_restarts) == status
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(i) for i in range(starts)]


def test_a_restart_belongs_to_the_same_launch(tmp_path: Path) -> None:
    """By which the run knows that the output directory is its own, and resumes."""
    code = f"open('{tmp_path}/launches', 'a').write(os.environ['LIGHTSEQ_LAUNCH'] + ' '); sys.exit(1)"
    for _ in range(2):
        assert launch(1, code, max_restarts=1) == 1
    first, again, other, last = (tmp_path / "launches").read_text().split()
    assert first == again != other == last


def test_a_restart_can_succeed() -> None:
    assert launch(2, "sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT']) == 0)", max_restarts=1) == 0


DRIVER = """
import sys
from lightseq.distributed.rank_launcher import Launch
code = '''
import os, signal, sys, time
signals = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: signals.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
open(sys.argv[1] + "/" + os.environ["RANK"], "w").write(str(os.getpid()))
while not signals:
    time.sleep(0.01)
time.sleep(0.3)
open(sys.argv[1] + "/got" + os.environ["RANK"], "w").write(str(len(signals)))
'''
sys.exit(Launch([sys.executable, "-c", code, sys.argv[1]], 2).run())
"""


def started(folder: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Returns a launcher of two ranks that wait for a signal, and their process ids."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    files = [folder / "0", folder / "1"]
    while not all(file.exists() and file.read_text() for file in files):
        assert driver.poll() is None
        time.sleep(0.02)
    return driver, [int(file.read_text()) for file in files]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_reaches_each_rank_once(tmp_path: Path, number: int, status: int) -> None:
    driver, _ = started(tmp_path)
    driver.send_signal(number)
    assert driver.wait(60) == status
    assert [(tmp_path / f"got{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_a_signal_between_the_starts_of_two_ranks_reaches_both(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def signalled(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        if kwargs["env"]["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return start(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", signalled)
    made = Launch([sys.executable, "-c", "import time; time.sleep(60)"], 2)
    assert made.run() == 128 + signal.SIGTERM
    assert [rank.returncode for rank in made.ranks] == [-signal.SIGTERM] * 2


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    driver, ranks = started(tmp_path)
    driver.kill()
    driver.wait()
    assert not psutil.wait_procs([psutil.Process(pid) for pid in ranks if psutil.pid_exists(pid)], timeout=10)[1]


FROZEN = """
import os, signal, sys, time
from lightseq.distributed import rank_launcher
rank_launcher.GRACE_SECONDS = 0.2
code = "import os, time; os.write(1, b'1\\\\n'); time.sleep(600)"  # a rank starts with Ctrl-C held back
sys.exit(rank_launcher.Launch([sys.executable, "-c", code], 2).run())
"""


EARLY = """
import sys
from lightseq.distributed.rank_launcher import Launch
code = "import os, time; os.write(1, b'1\\\\n'); time.sleep(0.5); from lightseq.distributed import rank_launcher as r; "
code += "r.end_at_once_on_ctrl_c(); time.sleep(600)"
sys.exit(Launch([sys.executable, "-c", code], 2).run())
"""


def interrupted(code: str) -> subprocess.Popen[bytes]:
    """Returns a launcher that got a Ctrl-C once both of its ranks ran."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert driver.stdout is not None and [driver.stdout.readline() for _ in range(2)] == [b"1\n"] * 2
    driver.send_signal(signal.SIGINT)
    return driver


def test_a_ctrl_c_before_a_rank_has_a_handler_ends_it_without_a_traceback() -> None:
    driver = interrupted(EARLY)
    assert driver.communicate(timeout=20)[1] == b"\ninterrupted\n" and driver.returncode == 130


def test_a_second_ctrl_c_ends_ranks_that_do_not_answer() -> None:
    driver = interrupted(FROZEN)
    time.sleep(0.5)
    assert driver.poll() is None
    driver.send_signal(signal.SIGINT)
    assert driver.wait(20) == 130


def test_help_starts_no_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Launch, "run", lambda *_: pytest.fail("ranks were started"))
    assert main(["train", "--nproc_per_node", "2", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_launcher_flags_are_taken_out() -> None:
    flags = parse_launcher_flags(["--bf16", "--nproc-per-node=4", "--max_restarts", "2", "--seed", "1"])
    assert (flags.processes, flags.max_restarts, flags.rest) == (4, 2, ("--bf16", "--seed", "1"))
    for words in (["--nproc_per_node", "0"], ["--nproc_per_node=two"], ["--max_restarts", "-1"]):
        with pytest.raises(ValueError, match=r"^--\w+ .+: give a whole number of at least [01]$"):
            parse_launcher_flags(words)


def test_ranks_of_a_launcher_neither_take_its_flags_nor_count_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(rank_launcher, "gpus_here", lambda: pytest.fail("GPUs were counted"))
    assert start_ranks(["--seed", "1"]) == ["--seed", "1"]
    for words in (["--nproc_per_node", "2"], ["--max_restarts", "0"]):
        with pytest.raises(ValueError, match=rf"^{words[0]} {words[1]} starts ranks, but a launcher started this"):
            start_ranks(words)


def test_a_file_starts_as_many_ranks_as_the_run_that_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[tuple[int, int]]()
    monkeypatch.setattr(Launch, "run", lambda self, restarts: started.append((self.size, restarts)) or 0)
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"config": {"seed": 1, "nproc_per_node": 2, "max_restarts": 1}}))
    for words in (["--config", str(file)], ["--nproc_per_node", "3", f"--config={file}"]):
        monkeypatch.setattr(sys, "argv", ["lightseq", "train", *words])
        assert main(["train", *words]) == 0
    assert started == [(2, 1), (3, 1)]


def test_a_rank_knows_what_it_was_started_with(tmp_path: Path) -> None:
    code = "from lightseq.distributed.rank_launcher import started_with\n"
    assert launch(2, f"{code}open(f'{tmp_path}/{{rank}}', 'w').write(str(started_with(2)))", max_restarts=3) == 0
    assert {path.read_text() for path in tmp_path.iterdir()} == {"{'nproc_per_node': 2, 'max_restarts': 3}"}


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "42"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize("variables", [SLURM, MPI, PMI], ids=["srun", "Open MPI", "PMI"])
def test_tasks_of_other_launchers_are_ranks(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ, **variables})
        assert start_ranks(["--seed", "1"]) == ["--seed", "1"]
        found = {
            name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        }
        port = os.environ["MASTER_PORT"]
    assert list(found.values()) == ["1", "2", "1", "2", "127.0.0.1"]
    assert 20000 <= int(port) < 40000


def test_a_step_of_slurm_may_have_fewer_tasks_than_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ, **SLURM, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"})
        assert adopt_launcher() and os.environ["WORLD_SIZE"] == "2"


def test_mpirun_on_several_hosts_needs_an_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ, **PMI, "PMI_SIZE": "4"})
        with pytest.raises(SystemExit, match="2"):
            adopt_launcher()
    assert (
        "MASTER_ADDR is not set; with mpirun on several hosts, export the name of the first" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("variables", "is_rank"),
    [
        ({}, False),
        ({"RANK": "0"}, True),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_TASK_PID": "1"}, False),  # a batch script without srun
        ({**SLURM, "SLURM_STEP_ID": "0", "SLURM_TASK_PID": "1"}, True),
        ({"RAY_JOB_ID": "1"}, True),
    ],
)
def test_a_launcher_is_known_by_its_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_rank: bool
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **variables})
    assert adopt_launcher() == is_rank
    monkeypatch.setattr(os, "environ", without_rank({**os.environ, **variables}))
    assert not adopt_launcher()
