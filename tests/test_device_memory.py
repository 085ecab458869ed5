"""Fallback of a run that ran out of memory: all its ranks start over with a plan that takes less."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from forked import Done
from programs import program
from small import CONFIG, losses, words, write_inputs
from worlds import spawn

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
STEPS = "--max_steps 6 --save_steps 2 --device_memory_budget 0.4"
# Runs out of memory in a step of one rank while the other waits for it, in as many attempts as given.
PROGRAM = """
import os, sys
sys.path.insert(0, {root!r})
import torch
import llama3
from lightseq.distributed.start_over import attempt
from lightseq.training import trainer
from lightseq.training.command import main

step = trainer.Trainer.step

def short_of_memory(self, number):
    if number == {at} and self.world.rank == self.world.size - 1 and attempt() < {times}:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 is full")
    return step(self, number)

trainer.Trainer.step = short_of_memory
sys.exit(main(llama3.FAMILY, sys.argv[1:]))
"""


def run(
    files: Path, output: str, flags: str, ranks: int, at: int, times: int
) -> Done | subprocess.CompletedProcess[str]:
    script = files / f"{output}.py"
    script.write_text(PROGRAM.format(root=str(ROOT), at=at, times=times))
    command = [str(script), *words(files, output, flags).split()]
    if ranks > 1:
        return forked.run(shlex.join([*LAUNCHER, *command]), files, 300)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment)


def planned_bytes(files: Path, output: str) -> int:
    plan = json.loads((files / output / "run.json").read_text())["memory_plan"]
    return int(plan["gpu_bytes"])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = write_inputs(tmp_path_factory.mktemp("fallback"))
    config = CONFIG.__class__.from_dict({**CONFIG.to_dict(), "num_hidden_layers": 4})
    config.save_pretrained(files / "model")
    return files


@pytest.mark.slow
def test_all_ranks_start_over_with_less_memory_from_the_last_checkpoint(files: Path) -> None:
    for ended in spawn(2, program, "llama3", words(files, "whole", STEPS)):
        assert ended.status == 0 and "resumed" not in ended.out, ended.err
    ended = run(files, "short", STEPS, ranks=2, at=3, times=1)
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "starting over with the next memory plan: " in line]
    assert len(said) == 1 and said[0].startswith("rank 1: CUDA out of memory. Tried to allocate 2.00 GiB; ")
    assert "checkpoint-2" in ended.stdout
    assert planned_bytes(files, "short") <= 0.9 * planned_bytes(files, "whole")
    assert losses(files, "short") == pytest.approx(losses(files, "whole"), rel=1e-6)


@pytest.mark.gpu(2)
def test_ranks_that_wait_for_each_other_on_gpus_start_over(files: Path) -> None:
    """The last rank leaves before a step that the other one has begun, and in which it waits inside a kernel."""
    for output, times in (("gpus", 0), ("gpus-short", 1)):
        ended = run(files, output, "--max_steps 6 --save_steps 2 --bf16", ranks=2, at=3, times=times)
        assert ended.returncode == 0, ended.stderr
    assert planned_bytes(files, "gpus-short") <= 0.9 * planned_bytes(files, "gpus")
    assert losses(files, "gpus-short") == pytest.approx(losses(files, "gpus"), rel=1e-2)


@pytest.mark.slow
def test_a_run_without_checkpoints_begins_anew(files: Path) -> None:
    ended = run(files, "alone", f"{STEPS} --save_strategy no --max_steps 3", ranks=1, at=2, times=2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("starting over with the next memory plan: ") == 2
    assert len(losses(files, "alone")) == 3


@pytest.mark.slow
def test_a_run_without_another_plan_ends_and_says_what_would_fit(files: Path) -> None:
    ended = run(files, "hopeless", STEPS, ranks=1, at=0, times=1000)
    assert ended.returncode == 1 and "to fit: " in ended.stderr.splitlines()[-1]
    assert 1 <= ended.stderr.count("starting over with the next memory plan: ") < 50
