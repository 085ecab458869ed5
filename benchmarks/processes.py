"""Measurements in separate processes, with a time limit and the reason for a failure."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

GRACE_SECONDS = 40.0  # longer than the 30 s after which the launcher kills its workers

# Last line of a traceback from python, or from torch's launcher with the rank before it.
ERROR_LINE = re.compile(r"^(?:\[rank\d+\]:\s?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
REFUSAL = re.compile(r"^error: (.+)$", re.MULTILINE)
# The launcher's own error says that a rank failed, and its report then which one failed first.
LAUNCHERS_OWN, ROOT_CAUSE = "ChildFailedError", "Root Cause (first observed failure):"
KILLED = re.compile(r"Signal \d+ \(SIG\w+\)")
PLAIN = re.compile(r"^(ValueError|ImportError|ModuleNotFoundError): ")  # the message is clear without the class name
LONGEST = 200


class Failed(Exception):
    """Error for a run without a result; the message is the reason."""


def torchrun(processes: int) -> list[str]:
    """Returns the arguments after `python3` that launch a program on `processes` processes of this host."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def run(
    words: Sequence[str],
    timeout: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> None:
    """Runs `python` with these arguments, and `environment` added to this process's.

    Raises Failed on a timeout or a nonzero exit status.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            [python, *words], stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end within {timeout:g} s") from None
        finally:
            stop(process)
    if status:
        raise Failed(reason(log.read_text(errors="replace"), status))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher and its workers, which are ended one by one because each has its own session."""
    if process.poll() is not None:
        return  # the launcher has waited for its workers
    workers = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for worker in workers:
        if worker.is_running():
            worker.kill()
    psutil.wait_procs(workers, GRACE_SECONDS)


def reason(log: str, status: int) -> str:
    """Returns the reason of a failure: out of memory, else the refusal or the first error in the log.

    Later errors come from ranks that waited for the failed one.
    """
    if "OutOfMemoryError" in log:
        return "out of memory"
    if killed := KILLED.search(log.partition(ROOT_CAUSE)[2]):
        return f"killed: {killed[0]}"
    if refusal := REFUSAL.search(log):
        return refusal[1][:LONGEST]
    errors = [found[1] for found in ERROR_LINE.finditer(log) if LAUNCHERS_OWN not in found[1]]
    if errors:
        return PLAIN.sub("", errors[0]).strip()[:LONGEST]
    if killed := KILLED.search(log):
        return f"killed: {killed[0]}"
    return f"ended with status {status}"
