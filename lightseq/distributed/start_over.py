"""Restart of the run's command in the same processes (execve).

Only the launch id, the attempt number and the memory limit carry over, in environment variables. A launcher sees the
same processes. The new attempt connects its ranks under other names in the rendezvous store, so no communicator of the
earlier attempt is used again.
"""

import os
import re
import sys
from typing import Final, NoReturn

from lightseq.distributed.environment import refuse_variable, whole_number_in

ATTEMPT, LAUNCH, MEMORY_LIMIT = "LIGHTSEQ_ATTEMPT", "LIGHTSEQ_LAUNCH", "LIGHTSEQ_MEMORY_LIMIT"
MOST_PORT: Final = 65535
RESTARTS_PER_ATTEMPT = 1000  # more than a launcher's restarts, which are added


def attempt() -> int:
    """Returns the number of times that this process was started over."""
    return whole_number_in(ATTEMPT, 0)


def memory_limit() -> float:
    """Returns the bytes of a GPU that this attempt may plan with: less than the attempt before; else infinity."""
    try:
        limit = float(os.environ.get(MEMORY_LIMIT, "inf"))
    except ValueError:
        limit = 0.0
    if not limit > 0:
        refuse_variable(MEMORY_LIMIT, "is not a number of bytes above 0")
    return limit


def launch_id() -> str | None:
    """Returns the id of the launch that an earlier attempt passed on; None in the first attempt."""
    launch = os.environ.get(LAUNCH)
    if launch is not None and not re.fullmatch(r"[0-9A-Za-z_.-]{1,100}", launch):
        refuse_variable(LAUNCH, "is not the id of a launch")
    return launch


def is_store_of_launcher() -> bool:
    """Returns whether the launcher hosts the rendezvous store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def start_over(launch: str, memory_limit_bytes: float) -> NoReturn:
    """Replaces this process by a new one with the same command. Never returns; all threads and GPU memory are gone."""
    settings = {ATTEMPT: str(attempt() + 1), LAUNCH: launch, MEMORY_LIMIT: str(memory_limit_bytes)}
    if "MASTER_PORT" in os.environ and not is_store_of_launcher():
        port = whole_number_in("MASTER_PORT", 0, most=MOST_PORT)
        settings["MASTER_PORT"] = str(
            port + 1 if port < MOST_PORT else port - 1
        )  # the old port may not be free at once
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:  # the directory itself, closed by now
                continue
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **settings})
