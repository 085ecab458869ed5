"""Programs as from a command line, in processes forked from a server that has imported torch: no import to wait for."""

import os
import runpy
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import forkserver
import torch.distributed as dist
from worlds import freeze_imports

ROOT = Path(__file__).resolve().parent.parent


class Done(NamedTuple):
    """The end of a process; one that had to be killed has no status."""

    returncode: int | None
    stdout: str
    stderr: str


class Running(NamedTuple):
    process: Any
    out: Path
    err: Path

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self, until: float) -> Done:
        """Waits for its end up to a time of the monotonic clock, then makes it end."""
        self.process.join(max(0.0, until - time.monotonic()))
        status = self.process.exitcode
        self.process.kill()
        self.process.join()
        return Done(status, self.out.read_text(), self.err.read_text())


class World:
    """Ranks of a program with the environment of a launcher, and the store in which they meet.

    A launcher that restarts its ranks keeps its `store`.
    """

    def __init__(
        self,
        ranks: int,
        words: str,
        folder: Path,
        environment: dict[str, str] | None = None,
        store: dist.TCPStore | None = None,
    ) -> None:
        self.store = store or dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
        meeting |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self.ranks = [
            start(words, folder, f"rank{r}", {**meeting, "RANK": str(r), "LOCAL_RANK": str(r), **(environment or {})})
            for r in range(ranks)
        ]

    def end(self, seconds: float = 120.0) -> list[Done]:
        until = time.monotonic() + seconds
        return [rank.end(until) for rank in self.ranks]


def start(words: str, folder: Path, name: str, environment: dict[str, str], cwd: Path = ROOT) -> Running:
    """`words` are what would follow `python3`: a script or -m and a module, and arguments. Output is in `folder`."""
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    process = forkserver.context().Process(
        target=_enter, args=(words, str(out), str(err), environment, str(cwd)), daemon=True
    )
    process.start()
    return Running(process, out, err)


def run(words: str, folder: Path, seconds: float = 120.0) -> Done:
    """A program without a launcher."""
    return start(words, folder, "alone", {}).end(time.monotonic() + seconds)


def _enter(words: str, out: str, err: str, environment: dict[str, str], cwd: str) -> None:
    freeze_imports()
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = shlex.split(words)
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
