"""A rank that never comes, or freezes before its first beat, is named, and those that wait for it end."""

import socket
import time
from pathlib import Path
from typing import NamedTuple

import forked
import pytest
from forked import Done

from lightseq.distributed.rendezvous import EXIT_STATUS, RendezvousMonitor, missing_ranks_message
from lightseq.distributed.start import init_distributed

TIMEOUT = 12.0  # all worlds start at once, on few cores

# Ranks that meet and are watched, some of which freeze at a moment.
PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from lightseq.distributed import mesh
from lightseq.distributed.watchdog import Watchdog
when, culprits, stacks = sys.argv[1], sys.argv[2].split(","), Path(sys.argv[3])
def reach(moment):
    if moment == when and os.environ["RANK"] in culprits:
        os.kill(os.getpid(), signal.SIGSTOP)
connect = dist.init_process_group
def connecting(*arguments, **named):
    reach("connecting")
    connect(*arguments, **named)
dist.init_process_group = connecting
reach("coming")
with mesh.init_distributed(2 * %s) as world:
    reach("beating")
    with Watchdog(world, %s, stacks):
        dist.all_reduce(torch.zeros(1))
"""


class Case(NamedTuple):
    when: str
    culprits: tuple[int, ...]
    launcher: bool  # that holds the store; else rank 0 does
    line: str


NEVER = f"within {TIMEOUT:.0f} s of the start: a process is frozen or was not started, or its host is unreachable"
STORE = f"the rendezvous store has not answered rank 1 within {TIMEOUT:.0f} s: rank 0 or the launcher"
CASES = {
    "two never come": Case("coming", (1, 3), True, f"no sign of life from ranks 1, 3 of 4 {NEVER}"),
    "one never comes to rank 0": Case("coming", (2,), False, f"no sign of life from rank 2 of 3 {NEVER}"),
    "one comes and freezes": Case("connecting", (1,), True, f"no sign of life from rank 1 of 3 {NEVER}"),
    "one freezes before its first beat": Case("beating", (2,), True, "no sign of life from rank 2 on an unknown host"),
    "rank 0 never comes": Case("coming", (0,), False, STORE),
    "rank 0 comes and freezes": Case("connecting", (0,), False, STORE),
}


class World(NamedTuple):
    ends: dict[int, Done]  # of the others
    seconds: float
    hang: Path


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """All at once: they wait most of the time."""
    begin, started = time.monotonic(), {}
    for name, case in CASES.items():
        folder = tmp_path_factory.mktemp("meeting")
        (folder / "program.py").write_text(PROGRAM % (TIMEOUT, TIMEOUT))
        own = {} if case.launcher else {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
        words = f"{folder}/program.py {case.when} {','.join(map(str, case.culprits))} {folder}/hang"
        size = 2 if 0 in case.culprits else max(3, 1 + max(case.culprits))
        started[name] = (forked.World(size, words, folder, own), folder / "hang")
    found = {}
    for name, (world, hang) in started.items():
        others = [rank for rank in range(len(world.ranks)) if rank not in CASES[name].culprits]
        ends = {rank: world.ranks[rank].end(begin + 120) for rank in others}
        found[name] = World(ends, time.monotonic() - begin, hang)
    for world, _ in started.values():
        world.end(0)
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_never_came_are_named_and_the_others_end(name: str, worlds: dict[str, World]) -> None:
    world = worlds[name]
    assert {end.returncode for end in world.ends.values()} == {EXIT_STATUS}, world.ends
    said = "".join(end.stderr for end in world.ends.values())
    line, *more = [line for line in said.splitlines() if line.startswith("error: ")]
    assert not more, said
    assert line.startswith(f"error: {CASES[name].line}") and "Traceback" not in said, said
    assert world.hang.exists() == (CASES[name].when == "beating")


def test_ranks_that_cannot_connect_though_all_are_there_are_not_called_dead() -> None:
    line = missing_ranks_message([], 8, 1800.0)
    assert line.startswith(
        "all 8 ranks are there, but could not connect to each other within 1800 s: check for a firewall"
    )


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_that_is_told_no_place_to_meet_is_refused_in_one_line(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(SystemExit) as refused, init_distributed(10):
        pytest.fail("met")
    assert refused.value.code == 2
    assert capsys.readouterr().err == (
        f"error: RANK is set, but {missing} is not; set both, as torch.distributed.run does, or neither\n"
    )


def test_one_process_meets_nobody(tmp_path: Path) -> None:
    left: list[int] = []
    with RendezvousMonitor(0, 1, 0.1, 0, exit_process=left.append):
        time.sleep(0.5)
    assert not left
