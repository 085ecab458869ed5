"""A rank that dies over the last save is named, tears no checkpoint, and the run goes on from the one before."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest
from forked import Done
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


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Done]]:
    """By case, the folder and how the other rank ended; all at once, for they wait most of the time."""
    started = {}
    for name, (what, culprit, more) in CASES.items():
        folder = write_inputs(tmp_path_factory.mktemp("saving"))
        (folder / "program.py").write_text(PROGRAM)
        line = words(folder, "run", f"{FLAGS} {more}")
        started[name] = (folder, forked.World(2, f"{folder}/program.py {what} {culprit} {line}", folder))
    until = time.monotonic() + 120
    found = {name: (folder, w.ranks[1 - CASES[name].culprit].end(until)) for name, (folder, w) in started.items()}
    for _, world in started.values():
        world.end(0)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_ends_over_the_last_save_is_named(name: str, ends: dict[str, tuple[Path, Done]]) -> None:
    folder, end = ends[name]
    assert end.returncode == EXIT_STATUS and "Traceback" not in end.stderr, end
    (line,) = [line for line in end.stderr.splitlines() if line.startswith("error: ")]
    assert f"no sign of life from rank {CASES[name].culprit} on " in line and "(step 4, saving, for " in line
    if CASES[name].what == "dies":  # over a frozen one the others still wait, and nothing has failed yet
        assert line.startswith(f"error: {folder}/run/checkpoint-4 could not be saved: no sign of life")
        assert line.endswith("; go on with --resume_from_checkpoint auto")
    assert [path.name for path in list_checkpoints(folder / "run")] == ["checkpoint-2"]


def test_the_run_goes_on_from_the_checkpoint_before(ends: dict[str, tuple[Path, Done]]) -> None:
    folder, _ = ends["rank 1 dies"]
    before = losses(folder, "run")
    line = words(folder, "run", f"{FLAGS} --resume_from_checkpoint auto")
    assert [end.status for end in spawn(2, program, "llama3", line)] == [0, 0]
    assert sorted(path.name for path in (folder / "run").glob("checkpoint*")) == ["checkpoint-2", "checkpoint-4"]
    assert losses(folder, "run") == before


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
