"""Last screen and exit status of `lightseq train` for every way it ends, and that it leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from small import CONFIG, words, write_inputs

from lightseq.training.metrics import read_records

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "RAY_", "TORCHELASTIC_")
ALONE = [sys.executable, "-m", "lightseq", "train"]
TORCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lightseq", "train"]
LONG, MARK = "--max_steps 100000 --save_steps 100000", "LIGHTSEQ_TEST_RUN"
# Runs out of memory in a step of the last rank, in as many attempts as given.
SHORT_OF_MEMORY = """
import sys
sys.path.insert(0, {root!r})
if "RANK" in __import__("os").environ:
    import torch
    from lightseq.distributed.start_over import attempt
    from lightseq.training import trainer
    step = trainer.Trainer.step

    def short_of_memory(self, number):
        if number == 3 and self.world.rank == self.world.size - 1 and attempt() < {times}:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 is full")
        return step(self, number)

    trainer.Trainer.step = short_of_memory
from lightseq.cli import main
sys.exit(main())
"""


class Screen(NamedTuple):
    """Output and exit status of a command."""

    status: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Run:
    """A started command, whose processes are found by a variable in their environment."""

    def __init__(self, command: list[str], flags: str, folder: Path, **variables: str) -> None:
        self.folder, self.mark = folder, f"{folder}-{time.monotonic()}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        environment = {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "200", MARK: self.mark, **variables}
        self.files = [folder / "stdout", folder / "stderr"]
        with self.files[0].open("a") as out, self.files[1].open("a") as err:
            flags = words(folder, "out", flags)
            self.process = subprocess.Popen([*command, *flags.split()], stdout=out, stderr=err, env=environment)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def rank(self, number: int) -> psutil.Process:
        return next(process for process in self.processes() if process.environ().get("RANK") == str(number))

    def wait_for_step(self, step: int) -> None:
        metrics, until = self.folder / "out" / "metrics.jsonl", time.monotonic() + 100
        while not metrics.exists() or not any(record["step"] >= step for record in read_records(metrics)):
            assert self.process.poll() is None and time.monotonic() < until, self.files[1].read_text()
            time.sleep(0.02)

    def end(self) -> Screen:
        """Waits for the command. It must leave no process, nor a traceback."""
        status = self.process.wait(120)
        assert not psutil.wait_procs(self.processes(), timeout=10)[1]
        out, err = (file.read_text() for file in self.files)
        assert "Traceback (most recent call last)" not in out + err, err
        return Screen(status, out, err)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


def last_lines(folder: Path, step: int) -> list[str]:
    return [f"checkpoint  {folder}/out/checkpoint-{step}", f"metrics     {folder}/out/metrics.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [[*ALONE, "--nproc_per_node", "2"], [*ALONE, "--nproc_per_node", "3"], TORCH],
    ids=["two", "three", "torch.distributed.run"],
)
def test_a_completed_run_ends_with_its_loss_checkpoint_and_metrics(folder: Path, command: list[str]) -> None:
    screen = Run(command, "--max_steps 2", folder).end()
    loss, *others = screen.out.splitlines()[-3:]
    assert screen.status == 0 and not screen.errors
    assert loss.startswith("loss ") and others == last_lines(folder, 2)


@pytest.mark.slow
def test_tasks_of_srun_end_as_one_run(folder: Path) -> None:
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    tasks = [
        Run(ALONE, "--max_steps 2", folder, **job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in (0, 1)
    ]
    screens = [task.end() for task in tasks]
    assert [screen.status for screen in screens] == [0, 0] and not screens[1].errors
    assert screens[1].out.splitlines()[-2:] == last_lines(folder, 2) and screens[1].out.count("metrics     ") == 1


@pytest.mark.slow
def test_a_refused_run_prints_one_line_and_writes_nothing(folder: Path) -> None:
    screen = Run([*ALONE, "--nproc_per_node", "2"], "--sequence_parallel_size 3", folder).end()
    assert screen == (2, "", "error: --sequence_parallel_size 3 does not divide 2 ranks; use 1 or 2\n")
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.slow
def test_a_stopped_run_saves_and_says_how_to_go_on(folder: Path, number: signal.Signals, status: int) -> None:
    run = Run([*ALONE, "--nproc_per_node", "2"], LONG, folder)
    run.wait_for_step(1)
    run.process.send_signal(number)
    screen = run.end()
    done = read_records(folder / "out" / "metrics.jsonl")[-1]["step"]
    stopped, loss, *others = screen.out.splitlines()[-4:]
    assert screen.status == status and not screen.errors
    assert stopped == f"stopped by {number.name}; resume with --resume_from_checkpoint True"
    assert loss.startswith("loss ") and others == last_lines(folder, done)


@pytest.mark.slow
def test_a_killed_rank_is_named_in_the_last_line(folder: Path) -> None:
    run = Run([*ALONE, "--nproc_per_node", "2"], f"{LONG} --step_timeout 20", folder)
    run.wait_for_step(1)
    run.rank(1).kill()
    screen = run.end()
    assert screen.status == 137
    assert screen.err.splitlines()[-1] == (
        "error: rank 1 was ended by SIGKILL; the kernel does that when the host's memory runs out"
    )


@pytest.mark.slow
def test_a_restarted_run_ends_as_one_that_lost_no_rank(folder: Path) -> None:
    flags = "--max_steps 300 --save_steps 50 --save_total_limit 1 --step_timeout 20"
    run = Run([*ALONE, "--nproc_per_node", "2", "--max_restarts", "1"], flags, folder)
    run.wait_for_step(60)
    run.rank(1).kill()
    screen = run.end()
    assert screen.status == 0 and screen.out.splitlines()[-2:] == last_lines(folder, 300)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_run_short_of_memory_falls_back_or_says_what_would_fit(folder: Path, times: int) -> None:
    CONFIG.__class__.from_dict({**CONFIG.to_dict(), "num_hidden_layers": 4}).save_pretrained(folder / "model")
    script = folder / "short.py"
    script.write_text(SHORT_OF_MEMORY.format(root=str(ROOT), times=99 if times > 1 else 1))
    command = [sys.executable, str(script), "train", "--nproc_per_node", "2"]
    screen = Run(command, "--max_steps 6 --save_steps 2 --device_memory_budget 0.4", folder).end()
    if times == 1:
        assert screen.status == 0 and screen.out.splitlines()[-2:] == last_lines(folder, 6)
    else:
        assert screen.status == 1 and "out of memory" in "\n".join(screen.errors).lower()
        assert screen.err.splitlines()[-1].startswith("to fit")
