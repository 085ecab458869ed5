"""A checkpoint becomes visible only after the records of its steps, however a run ends right after a save."""

import json
from pathlib import Path

import forked
import pytest
from programs import program
from small import losses, words, write_inputs
from worlds import spawn

from lightseq.training.metrics import read_records

# Dies as soon as a checkpoint has its final name, after naming the files that were flushed to the disk before.
PROGRAM = """
import os, signal, sys
import llama3
from lightseq.checkpoint import checkpoints
from lightseq.training import command, trainer
name, stopped_at = sys.argv[1], int(sys.argv[2])
fsync, prune, step, flushed = os.fsync, checkpoints.prune, trainer.Trainer.step, []
def noted(descriptor):
    flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
    fsync(descriptor)
def killed(output_dir, *arguments):
    if (output_dir / name).is_dir():
        print(*flushed[:flushed.index(name + ".partial") + 1], file=sys.stderr, flush=True)
        os._exit(9)
    prune(output_dir, *arguments)
def stopped(self, number):
    if number == stopped_at:
        signal.raise_signal(signal.SIGTERM)
    return step(self, number)
os.fsync, checkpoints.prune, trainer.Trainer.step = noted, killed, stopped
command.main(llama3.FAMILY, sys.argv[3:])
"""
STEPS = "--max_steps 6"
EVALUATION = "--eval_data_path {files}/data.pkl --eval_strategy steps --eval_steps 3"
CASES = {  # the checkpoint after which the run dies, the step that gets a signal, and flags
    "training waits": (2, -1, "--save_steps 2 --async_save False"),
    "training continues": (2, -1, "--save_steps 2"),
    "between two records": (3, -1, "--save_steps 3 --logging_steps 5"),
    "between two records while training waits": (3, -1, "--save_steps 3 --logging_steps 5 --async_save False"),
    "the best checkpoint": (3, -1, f"--save_steps 3 --logging_steps 5 --keep_best {EVALUATION}"),
    "a signal": (4, 3, "--save_steps 100 --logging_steps 3"),
    "the last save": (6, -1, "--save_steps 100 --logging_steps 4"),
    "DeepSpeed": (3, -1, "--save_steps 3 --logging_steps 5 --optim adamw_torch --deepspeed {files}/zero.json"),
}

QUICK = ("training waits", "between two records", "the best checkpoint")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("records"))
    (folder / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (folder / "killed.py").write_text(PROGRAM)
    return folder


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_a_run_killed_right_after_a_save_has_the_records_of_all_saved_steps(case: str, files: Path) -> None:
    step, stopped_at, flags = CASES[case]
    output = f"killed {case}".replace(" ", "-")
    given = f"{STEPS} {flags.format(files=files)}"
    line = words(files, output, given)
    end = forked.run(f"{files}/killed.py checkpoint-{step} {stopped_at} {line}", files)
    assert end.returncode == 9, end.stderr
    *_, flushed = end.stderr.splitlines()
    assert "metrics.jsonl" in flushed.split(), "a power failure may keep the checkpoint and lose the records"
    records = [record["step"] for record in read_records(files / output / "metrics.jsonl") if "loss" in record]
    assert step in records
    resumed, whole = f"{line} --resume_from_checkpoint True", words(files, f"whole-{output}", given)
    ends = [spawn(1, program, "llama3", one)[0] for one in (resumed, whole)]
    assert [end.status for end in ends] == [0, 0], ends
    assert "missing" not in ends[0].out
    if stopped_at < 0:  # a signal records its step, too
        assert losses(files, output) == losses(files, f"whole-{output}")
