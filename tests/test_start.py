"""A rank that never comes, or freezes before its first heartbeat, is named, and those that wait for it end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import forked
import pytest
from cases import slow_except
from forked import Done
from worlds import free_port

from lightseq.distributed.start import init_distributed
from lightseq.distributed.watchdog import EXIT_STATUS

# Ranks that meet and are watched. Rank `culprit` freezes at a moment.
PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from lightseq.distributed.start import init_distributed
from lightseq.distributed.watchdog import Watchdog
when, culprit, timeout, stacks = sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
def reach(moment):
    if moment == when and os.environ["RANK"] == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
connect = dist.init_process_group
def connecting(*arguments, **named):
    reach("connecting")
    connect(*arguments, **named)
dist.init_process_group = connecting
reach("coming")
with init_distributed(2 * timeout) as world:
    reach("beating")
    with Watchdog(world, timeout, stacks):
        dist.all_reduce(torch.zeros(1))
"""


class Case(NamedTuple):
    when: str
    culprit: int
    ranks: int
    launcher: bool  # hosts the store; else rank 0 does
    timeout: float  # some may have to wait for a core for seconds
    line: str


NEVER = "no sign of life from rank {} on an unknown host (step 0, "
FROZEN = "the process is dead, frozen or not started, or its host is unreachable"
STORE = "the rendezvous store has not answered rank 1 on "
CASES = {
    "never comes": Case("coming", 1, 2, True, 3.0, NEVER.format(1) + "rendezvous, for 3 s): " + FROZEN),
    "never comes to rank 0": Case("coming", 2, 3, False, 12.0, NEVER.format(2) + "rendezvous, for "),
    "comes and freezes": Case("connecting", 1, 3, True, 12.0, "no sign of life from rank 1 on "),
    "freezes before its first heartbeat": Case("beating", 2, 3, True, 12.0, NEVER.format(2) + "start, for "),
    "rank 0 never comes": Case("coming", 0, 2, False, 12.0, STORE),
    "rank 0 comes and freezes": Case("connecting", 0, 2, False, 12.0, STORE),
}


@pytest.mark.parametrize("name", slow_except(["never comes"], CASES))
def test_a_missing_rank_is_named_and_the_others_end(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "program.py").write_text(PROGRAM)
    own = {} if case.launcher else {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    words = f"{tmp_path}/program.py {case.when} {case.culprit} {case.timeout} {tmp_path}/hang"
    world, until = forked.World(case.ranks, words, tmp_path, own), time.monotonic() + 60
    ends: list[Done] = [rank.end(until) for i, rank in enumerate(world.ranks) if i != case.culprit]
    world.end(0)
    assert {end.returncode for end in ends} == {EXIT_STATUS}, ends
    said = "".join(end.stderr for end in ends)
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {case.line}") and "host is unreachable" in line and "Traceback" not in said, said
    assert (tmp_path / "hang").exists() == (case.when == "beating")


WAITS = """
import sys
from lightseq.distributed import start
start.WAIT_SECONDS = 0.5
with start.init_distributed(60):
    pass
"""


@pytest.mark.parametrize(
    ("rank", "line"),
    [
        pytest.param(0, "waiting for 1 of 2 ranks to join at 127.0.0.1:{port}: 1", marks=pytest.mark.slow),
        (1, "rank 1 waits for the rendezvous store at 127.0.0.1:{port}, which rank 0 or the launcher hosts"),
    ],
)
def test_a_rank_alone_names_missing_ranks_and_ends_on_ctrl_c(rank: int, line: str) -> None:
    port = free_port()
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    alone = subprocess.Popen(
        [sys.executable, "-c", WAITS], env={**os.environ, **place}, stderr=subprocess.PIPE, text=True
    )
    assert alone.stderr is not None and alone.stderr.readline() == f"{line.format(port=port)}\n"
    alone.send_signal(signal.SIGINT)
    assert alone.wait(20) == -signal.SIGINT


STUCK_COMPILER = """
import os, signal
from lightseq.distributed import compile_workers, start
compile_workers.SECONDS = 1.0
with start.init_distributed(60):
    from torch._inductor.async_compile import AsyncCompile
    compiler = AsyncCompile.process_pool().process
    os.kill(compiler.pid, signal.SIGSTOP)
print(compiler.returncode)
"""


@pytest.mark.slow
def test_compile_workers_that_do_not_end_are_killed() -> None:
    alone = subprocess.run([sys.executable, "-c", STUCK_COMPILER], capture_output=True, text=True, timeout=60)
    assert (alone.stdout, alone.returncode) == (f"{-signal.SIGKILL}\n", 0), alone.stderr


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_address_is_refused_in_one_line(
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
