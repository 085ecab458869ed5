"""Saves that a run, or one of its ranks, does not survive: what is named, what is kept, and from where it resumes."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest
from cases import slow_except
from programs import program
from small import losses, words, write_inputs
from worlds import spawn

from lightseq.checkpoint.checkpoints import list_checkpoints
from lightseq.distributed.watchdog import EXIT_STATUS, RankNotResponding
from lightseq.training import errors
from lightseq.training.metrics import read_records

FLAGS = "--max_steps 4 --save_steps 2 --step_timeout 20"

# A rank dies or freezes over the second save, which is the last, when all steps are done.
PROGRAM = """
import os, signal, sys, time
import llama3
from lightseq.checkpoint import state_files
from lightseq.training import command
what, culprit = sys.argv[1], sys.argv[2]
write, saves = state_files.write, []
def planted(*arguments):
    saves.append(1)
    if len(saves) == 2:
        time.sleep(2.5)  # a beat says that it is here
        if os.environ["RANK"] == culprit:
            os._exit(9) if what == "dies" else os.kill(os.getpid(), signal.SIGSTOP)
    return write(*arguments)
state_files.write = planted
command.main(llama3.FAMILY, sys.argv[3:])
"""


class Case(NamedTuple):
    what: str
    culprit: int
    more: str = ""


CASES = {
    "rank 1 dies": Case("dies", 1),
    "rank 0 dies": Case("dies", 0),
    "rank 1 dies, the training waiting": Case("dies", 1, "--async_save False"),
    "rank 1 freezes": Case("freezes", 1),
}


@pytest.mark.parametrize("name", slow_except(["rank 1 dies"], CASES))
def test_a_rank_that_ends_over_the_last_save_is_named_and_the_run_resumes(name: str, tmp_path: Path) -> None:
    what, culprit, more = CASES[name]
    files = write_inputs(tmp_path)
    (files / "program.py").write_text(PROGRAM)
    line = words(files, "run", f"{FLAGS} {more}")
    world = forked.World(2, f"{files}/program.py {what} {culprit} {line}", files)
    end = world.ranks[1 - culprit].end(time.monotonic() + 120)
    world.end(0)
    assert end.returncode == EXIT_STATUS and "Traceback" not in end.stderr, end
    (error,) = [line for line in end.stderr.splitlines() if line.startswith("error: ")]
    assert f"no sign of life from rank {culprit} on " in error and "(step 4, saving, for " in error
    if what == "dies":  # over a frozen one the others still wait, and nothing has failed yet
        assert error.startswith(f"error: {files}/run/checkpoint-4 could not be saved: no sign of life")
        assert error.endswith("; go on with --resume_from_checkpoint auto")
    assert [path.name for path in list_checkpoints(files / "run")] == ["checkpoint-2"]
    before = losses(files, "run")
    assert [end.status for end in spawn(2, program, "llama3", f"{line} --resume_from_checkpoint auto")] == [0, 0]
    assert sorted(path.name for path in (files / "run").glob("checkpoint*")) == ["checkpoint-2", "checkpoint-4"]
    assert losses(files, "run") == before


def silent(error: Exception | None) -> Any:
    with errors.exit_on_no_response():
        raise RankNotResponding("checkpoint-4 could not be saved") from error


def test_live_ranks_that_do_not_respond_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "is_first_to", lambda do: True)
    with pytest.raises(SystemExit) as end:
        silent(RuntimeError("timed out after 60000 ms.\nmore"))
    expected = (
        "error: checkpoint-4 could not be saved: timed out after 60000 ms; resume with --resume_from_checkpoint auto"
    )
    assert end.value.code == 1 and capsys.readouterr().err == f"{expected}\n"


# Dies as soon as a checkpoint has its final name, after naming the files that were flushed to the disk before.
KILLED_AFTER_SAVE = """
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
EVALUATION = "--eval_data_path {files}/data.pkl --eval_strategy steps --eval_steps 3"
SAVES = {  # the checkpoint after which the run dies, the step that gets a signal, and flags
    "training waits": (2, -1, "--save_steps 2 --async_save False"),
    "between two records": (3, -1, "--save_steps 3 --logging_steps 5"),
    "the best checkpoint": (3, -1, f"--save_steps 3 --logging_steps 5 --keep_best {EVALUATION}"),
    "a signal": (4, 3, "--save_steps 100 --logging_steps 3"),
    "DeepSpeed": (3, -1, "--save_steps 3 --logging_steps 5 --optim adamw_torch --deepspeed {files}/zero.json"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_except(["between two records"], SAVES))
def test_a_run_killed_right_after_a_save_has_the_records_of_all_saved_steps(case: str, tmp_path: Path) -> None:
    """A checkpoint becomes visible only after the records of its steps."""
    step, stopped_at, flags = SAVES[case]
    files = write_inputs(tmp_path)
    (files / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (files / "killed.py").write_text(KILLED_AFTER_SAVE)
    given = f"--max_steps 6 {flags.format(files=files)}"
    line = words(files, "run", given)
    end = forked.run(f"{files}/killed.py checkpoint-{step} {stopped_at} {line}", files)
    assert end.returncode == 9, end.stderr
    *_, flushed = end.stderr.splitlines()
    assert "metrics.jsonl" in flushed.split(), "a power failure may keep the checkpoint and lose the records"
    records = [record["step"] for record in read_records(files / "run" / "metrics.jsonl") if "loss" in record]
    assert step in records
    for one in (f"{line} --resume_from_checkpoint True", words(files, "whole", given)):
        (end,) = spawn(1, program, "llama3", one)
        assert end.status == 0 and "missing" not in end.out, end
    if stopped_at < 0:  # a signal records its step, too
        assert losses(files, "run") == losses(files, "whole")
