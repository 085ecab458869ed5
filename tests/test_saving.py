"""A rank that dies over the last save is named, tears no checkpoint, and the run goes on from the one before."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest
from programs import program
from small import losses, words, write_inputs
from worlds import spawn

from lightseq.checkpoint.checkpoints import list_checkpoints
from lightseq.distributed.watchdog import EXIT_STATUS, RankNotResponding
from lightseq.training import errors

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


@pytest.mark.parametrize(
    "name", [name if name == "rank 1 dies" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
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


def test_a_silence_of_ranks_that_live_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "is_first_to", lambda do: True)
    with pytest.raises(SystemExit) as end:
        silent(RuntimeError("timed out after 60000 ms.\nmore"))
    expected = (
        "error: checkpoint-4 could not be saved: timed out after 60000 ms; resume with --resume_from_checkpoint auto"
    )
    assert end.value.code == 1 and capsys.readouterr().err == f"{expected}\n"
