"""Start of a command's ranks on this host, one process per GPU.

`lightseq train` alone is the whole command on one host. torch.distributed.run, srun, mpirun and Ray start processes
themselves; each process is then one rank.
"""

import argparse
import ctypes
import itertools
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lightseq.distributed.environment import MAX_RESTARTS, REFUSED, whole_number_in
from lightseq.distributed.job_launchers import adopt_launcher
from lightseq.distributed.start_over import LAUNCH

FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # grace period for other ranks after a failure or a second Ctrl-C
INTERRUPTED: Final = 130  # the status of a program that Ctrl-C has ended
PR_SET_PDEATHSIG: Final = 1  # option of prctl


@dataclass(frozen=True)
class HostGPUs:
    """GPUs that this program may use."""

    name: str | None = None  # model of the first one
    devices: tuple[str, ...] = ()  # as written in CUDA_VISIBLE_DEVICES


def gpus_here() -> HostGPUs:
    """Returns the GPUs that this program may use, without importing torch; none without a driver that answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return HostGPUs()
    try:
        command = [program, "--query-gpu=index,name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return HostGPUs()
    rows = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    if done.returncode or not rows:
        return HostGPUs()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [word.strip() for word in visible.split(",")] if visible is not None else [index for index, _ in rows]
    # CUDA ignores everything from the first invalid entry on, such as -1.
    known = {index for index, _ in rows}
    present = itertools.takewhile(lambda word: word in known or word.startswith(("GPU-", "MIG-")), devices)
    return HostGPUs(rows[0][1].strip(), tuple(present))


LAUNCHER_FLAGS: Final = (  # names, and their help
    ("nproc_per_node", "Processes to start on this host. Default: one per GPU, or one without GPUs."),
    ("max_restarts", "Times to start all processes again after a failure. The run resumes. Default: 0."),
)


def started_with(processes: int) -> dict[str, int]:
    """Returns the launcher flags that start as many processes as run on this host, with as many restarts."""
    return {"nproc_per_node": processes, "max_restarts": whole_number_in(MAX_RESTARTS, 0)}


def started_by_another_launcher() -> bool:
    """Returns whether this process is a rank of torch.distributed.run, srun or the like."""
    return "RANK" in os.environ and LAUNCH not in os.environ


def add_launcher_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the launcher's flags to a command's help. The process that starts the ranks parses them."""
    section = parser.add_argument_group("launching", "Not under torch.distributed.run, srun or mpirun.")
    for name, text in LAUNCHER_FLAGS:
        section.add_argument(f"--{name}", metavar="N", help=text)


@dataclass(frozen=True)
class LauncherFlags:
    """Flags of the launcher, as torch.distributed.run spells them, and the rest of the command line."""

    processes: int | None  # None: one per GPU
    max_restarts: int | None  # None: not given
    rest: tuple[str, ...]


def parse_launcher_flags(words: Sequence[str]) -> LauncherFlags:
    """Splits --nproc_per_node and --max_restarts from a command line. Raises ValueError for an invalid value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, _ in LAUNCHER_FLAGS:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    try:
        found, rest = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    by_gpus = found.nproc_per_node in ("auto", "gpu")  # as torch.distributed.run takes them
    return LauncherFlags(
        processes=None if by_gpus else _count("nproc_per_node", found.nproc_per_node, 1),
        max_restarts=_count("max_restarts", found.max_restarts, 0),
        rest=tuple(rest),
    )


def _count(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"--{name} {text:.80}: give a whole number of at least {least}")
    return int(text)


@dataclass
class Launch:
    """Ranks of one command on this host, and the signals that arrived meanwhile."""

    command: Sequence[str]  # the command of every rank
    size: int
    launch: str = field(default_factory=lambda: uuid.uuid4().hex)  # a restart keeps it, and resumes
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    undelivered: list[int] = field(default_factory=list)  # signals that wait until every rank has started
    all_started: bool = False
    kill_at: float = math.inf  # monotonic time

    def run(self, max_restarts: int = 0) -> int:
        """Runs the ranks until all have ended. Returns the exit status of the command.

        That is 130 after Ctrl-C, otherwise the status of the first rank that failed, or 0. If a rank fails, the others
        are ended, and all start again up to `max_restarts` times, unless the command was refused.
        """
        before = {number: signal.signal(number, self._forward) for number in FORWARDED}
        status, restarts = 0, -1
        try:
            while restarts < max_restarts and not self.signals:
                restarts += 1
                self._start(restarts, max_restarts)
                self.all_started = True
                self._deliver()
                status = self._wait()
                self.all_started = False
                if status in (0, REFUSED):
                    break
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        return INTERRUPTED if signal.SIGINT in self.signals else status

    def _start(self, restarts: int, max_restarts: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        threads = max(len(os.sched_getaffinity(0)) // self.size, 1)
        shared = {
            "OMP_NUM_THREADS": str(threads),  # a variable of the user's wins
            **os.environ,
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            MAX_RESTARTS: str(max_restarts),
            LAUNCH: self.launch,
        }
        self.ranks = []
        for rank in range(self.size):
            self.ranks.append(
                subprocess.Popen(
                    self.command,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_new_session=True,  # a terminal's Ctrl-C comes through this process alone, once
                    preexec_fn=prepare_rank,
                )
            )

    def _wait(self) -> int:
        """Waits for all ranks, ends them after a failure, and returns the status of the first that failed, or 0."""
        while not any(self._statuses()):
            if None not in self._statuses():
                return 0
            if time.monotonic() > self.kill_at:
                self._end()
            time.sleep(POLL_SECONDS)
        status = next(code for code in self._statuses() if code)
        end = time.monotonic() + GRACE_SECONDS
        while None in self._statuses() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        # A rank killed by a signal is the cause of the others' errors, even if seen later.
        ended = next((rank for rank, code in enumerate(self._statuses()) if code and code < 0), None)
        self._end()
        if ended is None:
            return status
        number = signal.Signals(-self.ranks[ended].returncode)
        if not self.signals and number != signal.SIGPIPE:  # a reader such as `head` closed the pipe
            hint = "; the kernel does that when the host's memory runs out" if number == signal.SIGKILL else ""
            print(f"error: rank {ended} was ended by {number.name}{hint}", file=sys.stderr, flush=True)
        return 128 + number

    def _statuses(self) -> list[int | None]:
        """Returns the exit status of each rank, negative for a signal; None while it runs."""
        return [rank.poll() for rank in self.ranks]

    def _end(self) -> None:
        """Kills the ranks that still run: they wait for one that has failed."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
        for rank in self.ranks:
            rank.wait()

    def _forward(self, number: int, _frame: Any) -> None:
        """Passes a signal on. A second Ctrl-C also ends ranks that wait for others and run no handler."""
        if number == signal.SIGINT and number in self.signals:
            self.kill_at = min(self.kill_at, time.monotonic() + GRACE_SECONDS)
        self.signals.append(number)
        self.undelivered.append(number)
        if self.all_started:
            self._deliver()

    def _deliver(self) -> None:
        """Sends each signal that has not been sent yet to every rank. A handler may run it between any two lines."""
        while self.undelivered:
            number = self.undelivered.pop(0)
            for rank in self.ranks:
                if rank.poll() is None:
                    rank.send_signal(number)


_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def prepare_rank() -> None:
    """Makes Linux end this process with its parent, and blocks Ctrl-C until there is a handler."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def end_at_once_on_ctrl_c() -> None:
    """Makes Ctrl-C end this process with one line, also in the middle of imports, until training handles it."""

    def end(_number: int, _frame: Any) -> None:
        if whole_number_in("RANK", 0) == 0:
            os.write(2, b"\ninterrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def start_ranks(words: Sequence[str], in_file: Sequence[str] = ()) -> int | list[str]:
    """Starts the ranks of a command, and returns its exit status when all have ended.

    Returns the command line without the flags of a launcher if this process is to run the command itself: it is a rank
    of a launcher, or the only one. The command line overrides `in_file`, the launcher flags of a file. Raises
    ValueError for an invalid flag, and for one on the command line of a launcher's rank.
    """
    flags = parse_launcher_flags(words)
    if adopt_launcher():
        for name, value in {"nproc_per_node": flags.processes, "max_restarts": flags.max_restarts}.items():
            if value is not None:
                raise ValueError(
                    f"--{name} {value} starts ranks, but a launcher started this one; give it to the launcher"
                )
        return list(flags.rest)
    flags = parse_launcher_flags([*in_file, *words])
    size = flags.processes or len(gpus_here().devices) or 1
    if size == 1 and not flags.max_restarts:
        return list(flags.rest)
    # How this program was started (as a module or by pip's script), and its command.
    program = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1], sys.argv[1]]
    return Launch([*program, *flags.rest], size).run(flags.max_restarts or 0)
