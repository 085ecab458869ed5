"""How a trial is run: its own processes, its own time limit, and in a few words why it failed if it did."""

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
KNOWN = ("ValueError: ", "ImportError: ", "ModuleNotFoundError: ")  # whose text says enough
LONGEST = 200


class Failed(Exception):
    """A trial came to nothing; the message says why."""


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
    """Why it failed: out of memory if that was said at all, else the refusal or the first error that was printed.

    The first, for ranks that wait for one that died have errors of their own.
    """
    if "OutOfMemoryError" in log:
        return "out of memory"
    if refusal := REFUSAL.search(log):
        return refusal[1][:LONGEST]
    if error := ERROR_LINE.search(log):
        text = next((error[1].removeprefix(name) for name in KNOWN if error[1].startswith(name)), error[1])
        return text.strip()[:LONGEST]
    if killed := KILLED.search(log):
        return f"killed: {killed[0]}"
    return f"ended with status {status}"
