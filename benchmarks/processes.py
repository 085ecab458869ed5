"""Measurements in processes of their own, with a time limit and the reason why one failed."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

GRACE_SECONDS = 40.0  # the launcher gives its workers 30 to end before it kills them

# A traceback's last line, as python and torch's launcher (which names the rank before it) print it.
ERROR_LINE = re.compile(r"^(?:\[rank\d+\]:\s?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
REFUSAL = re.compile(r"^error: (.+)$", re.MULTILINE)
KILLED = re.compile(r"Signal \d+ \(SIG\w+\)")
PLAIN = re.compile(r"^(ValueError|ImportError|ModuleNotFoundError): ")  # the text after it says enough
LONGEST = 200


class Failed(Exception):
    """A run without a result; the message says why."""


def torchrun(processes: int) -> list[str]:
    """Returns the words that start a program on so many processes of this host, after `python3`."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def run(words: Sequence[str], timeout: float, log: Path) -> None:
    """Runs python with these words to its end. Raises Failed where that is too late or not a good one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=subprocess.STDOUT)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end within {timeout:g} s") from None
        finally:
            stop(process)
    if status:
        raise Failed(reason(log.read_text(errors="replace"), status))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher and every process that it started; workers are in sessions of their own, so each is named."""
    if process.poll() is not None:
        return  # it waits for its workers
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
    """Returns why it failed: out of memory if the log says so, else the refusal or the first error in it.

    The first, for ranks that wait for one that died have errors of their own.
    """
    if "OutOfMemoryError" in log:
        return "out of memory"
    if refusal := REFUSAL.search(log):
        return refusal[1][:LONGEST]
    if error := ERROR_LINE.search(log):
        return PLAIN.sub("", error[1]).strip()[:LONGEST]
    if killed := KILLED.search(log):
        return f"killed: {killed[0]}"
    return f"ended with status {status}"
