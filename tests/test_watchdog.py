"""A rank that freezes, dies or falls behind is named, every process ends, and a healthy run is left alone."""

import json
import shlex
import threading
import time
from pathlib import Path

import forked
import pytest
import torch
from forked import Done

from lightseq.distributed.watchdog import EXIT_STATUS, PHASES, Heartbeat, Watchdog, stalled_ranks_message
from lightseq.distributed.world import World

TIMEOUT = 12.0  # a rank may have to wait for a core for seconds

# Three ranks that count steps together. Rank 1 does something at step 3.
PROGRAM = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from lightseq.distributed.start import init_distributed
from lightseq.distributed.watchdog import Watchdog
what, stacks = sys.argv[1], Path(sys.argv[2])
with init_distributed(60) as world:
    with Watchdog(world, %s, stacks) as watchdog:
        for step in range(1, 6):
            watchdog.mark(step, "data")
            if world.rank == 1 and step == 3 and what != "nothing":
                time.sleep(1.5)  # a beat says that it is here
                if what == "freezes":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if what in ("dies", "dies as another fails"):
                    os._exit(9)
                if what == "raises":
                    raise ValueError("of its own")
                if what == "falls behind":
                    time.sleep(1000)
                if what == "holds the interpreter":
                    for _ in range(10):
                        ctypes.PyDLL(None).usleep(800_000)
            watchdog.mark(step, "forward")
            if world.rank == 0 and step == 3 and what == "dies as another fails":
                raise ValueError("of its own")
            dist.all_reduce(torch.zeros(1))
    print("done", world.rank)
"""


def run(what: str, folder: Path, timeout: float = TIMEOUT) -> list[Done]:
    """Returns how three ranks ended; rank 1 gets little time once the others have ended, and none if it is frozen."""
    (folder / "program.py").write_text(PROGRAM % timeout)
    world = forked.World(3, f"{folder}/program.py {shlex.quote(what)} {folder}/hang", folder)
    until = time.monotonic() + 90
    first, last = (world.ranks[rank].end(until) for rank in (0, 2))
    return [first, world.ranks[1].end(time.monotonic() + 5 * (what != "freezes")), last]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("freezes", "no sign of life from rank 1 on"),
        ("dies", "no sign of life from rank 1 on"),
        ("dies as another fails", "no sign of life from rank 1 on"),
        ("raises", "no sign of life from rank 1 on"),
        ("falls behind", "rank 1 on"),
    ],
)
def test_the_rank_that_others_wait_for_is_named_and_all_end(what: str, words: str, tmp_path: Path) -> None:
    ends = run(what, tmp_path)
    # The second to end may see the connection of the first close before its own watchdog gets to it.
    assert EXIT_STATUS in (ends[0][0], ends[2][0]) and all(ends[rank][0] for rank in (0, 2)), ends
    said = "".join(err for _, _, err in ends)
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert words in line and "step 3, data" in line, said
    if what == "freezes":
        seconds = int(line.split("step 3, data, for ")[1].split()[0])
        assert seconds >= TIMEOUT / 2, "since when nothing was heard counts too"
    if what == "raises":
        assert ends[1][0] == 1 and "ValueError: of its own" in ends[1][2]
    if what == "dies as another fails":
        assert "ValueError: of its own" in ends[0][2]
    if what == "falls behind":
        assert ends[1][0] and "fell behind: others are at step 3, forward" in said
    stacks = {path.name: path.read_text() for path in (tmp_path / "hang").iterdir()}
    assert {"rank0.txt", "rank2.txt"} <= stacks.keys() and "program.py" in stacks["rank0.txt"]
    if what in ("dies", "raises"):
        assert "Traceback" not in ends[0][2] and "closed by peer" in stacks["rank0.txt"]


@pytest.mark.parametrize(
    ("what", "timeout"),
    [
        ("nothing", TIMEOUT),
        pytest.param("holds the interpreter", 10.0, marks=pytest.mark.slow),  # needs its cores for itself
    ],
)
def test_a_healthy_run_is_left_alone(what: str, timeout: float, tmp_path: Path) -> None:
    """So is one in which other threads hardly get a turn, as where launches wait in a full queue."""
    for rank, (status, out, err) in enumerate(run(what, tmp_path, timeout)):
        assert (status, out, err) == (0, f"done {rank}\n", "")
    assert not (tmp_path / "hang").exists()


def beat(rank: int, step: int, phase: str) -> Heartbeat:
    return Heartbeat(rank, "node", 7, step, phase, 12.0)


def test_a_phase_without_a_step_of_its_own_belongs_to_the_last_one() -> None:
    with Watchdog(World(0, 1, 0, 1, torch.device("cpu")), 60.0, Path("unused")) as watchdog:
        watchdog.mark(7, "update")
        watchdog.mark(None, "evaluation")
        assert watchdog._heartbeat(1).position == (7, PHASES.index("evaluation"))


def test_a_rank_that_has_not_begun_may_take_its_time(tmp_path: Path) -> None:
    ends: list[str] = []
    with Watchdog(World(0, 1, 0, 1, torch.device("cpu")), 0.2, tmp_path, ends.append) as watchdog:
        time.sleep(0.6)
        assert not ends
        watchdog.mark(1, "data")
        watchdog._thread.join(20)
    assert len(ends) == 1 and "(step 1, data, for" in ends[0]


def test_a_rank_that_makes_progress_within_a_phase_may_take_its_time(tmp_path: Path) -> None:
    ends: list[str] = []
    passes = 0
    with Watchdog(World(0, 1, 0, 1, torch.device("cpu")), 1.5, tmp_path, ends.append) as watchdog:
        watchdog.follow_progress(lambda: passes)
        watchdog.mark(1, "backward")
        for passes in range(1, 5):
            time.sleep(0.5)
            assert not ends, passes
        watchdog._thread.join(20)
    assert len(ends) == 1 and "(step 1, backward, for" in ends[0]


class Unreachable:
    """A store behind a cut cable."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def set(self, key: str, value: str) -> None:
        if json.loads(value)["number"]:  # the first beat got through
            self.check([key])

    def check(self, keys: list[str]) -> bool:
        self.closed.wait()
        raise RuntimeError("closed")


def test_a_store_that_does_not_answer_ends_the_ranks_that_ask_it(tmp_path: Path) -> None:
    ends: list[str] = []
    store = Unreachable()
    watchdog = Watchdog(World(1, 2, 1, 2, torch.device("cpu")), 0.5, tmp_path, ends.append, store)  # type: ignore
    with watchdog:
        watchdog.mark(7, "forward")
        deadline = time.monotonic() + 20
        while not ends and time.monotonic() < deadline:
            time.sleep(0.01)
        store.closed.set()
    (text,) = ends
    assert (
        "has not answered rank 1 on" in text and "(step 7, forward, for" in text and "its host is unreachable" in text
    )


class Gone(Unreachable):
    """A store whose holder was killed."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("holds", ["a folder", "nothing"])
def test_a_rank_without_store_and_file_still_reports_and_ends(
    holds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends: list[int] = []
    monkeypatch.setattr("lightseq.distributed.watchdog.exit_process", ends.append)
    stacks = tmp_path / "hang"
    if holds == "nothing":
        stacks.write_text("a file of that name")
    with Watchdog(World(1, 2, 1, 2, torch.device("cpu")), 0.5, stacks, store=Gone()) as watchdog:  # type: ignore
        watchdog._thread.join(20)
    (line,) = capsys.readouterr().err.splitlines()
    assert ends == [EXIT_STATUS] and line.startswith("error: the rendezvous store is gone")
    where = "the stacks of all ranks are in" if holds == "a folder" else "the stacks of rank 1 could not be written to"
    assert f"; {where} {stacks}" in line


def test_a_verdict_names_the_stalled_ranks() -> None:
    beats = [beat(0, 5, "backward"), beat(1, 5, "data"), beat(2, 5, "forward"), beat(3, 5, "data")]
    behind = "rank 1 on node (step 5, data, for 12 s), rank 3 on node (step 5, data, for 12 s) fell behind"
    assert stalled_ranks_message(beats, []) == f"{behind}: others are at step 5, backward"
    assert stalled_ranks_message(beats, [beats[0]]).startswith(
        "no sign of life from rank 0 on node (step 5, backward, for 12 s)"
    )
    assert "no rank makes progress, and all are in the same phase as rank 0" in stalled_ranks_message(
        [beat(0, 5, "update"), beat(1, 5, "update")], []
    )
    assert stalled_ranks_message([beat(0, 6, "data"), beat(1, 5, "update")], []).startswith("rank 1")
    meeting = stalled_ranks_message([beat(0, 0, "rendezvous"), beat(1, 0, "rendezvous")], [])
    assert meeting.startswith(
        "all 2 ranks are there, but could not connect to each other within 12 s: check for a fire"
    )
