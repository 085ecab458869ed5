"""Timeout of the rendezvous, which names the ranks that are missing and ends those that wait for them.

A waiting rank is blocked inside torch, whose own timeout does not say who is missing. A thread beside it takes a roll
call through the rendezvous store; a frozen rank does not answer.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from lightseq.distributed.error_report import report_error

EXIT_STATUS = 70  # exit status of a process that ends because of another rank (EX_SOFTWARE)
STORE_NAME = "the rendezvous store"
ANSWER_SECONDS = 5.0  # within which a waiting rank answers a roll call


class RendezvousMonitor:
    """Monitor of the rendezvous inside a `with`. After `seconds` the first rank to time out takes a roll call."""

    def __init__(
        self, rank: int, size: int, seconds: float, restarts: int, exit_process: Callable[[int], object]
    ) -> None:
        self._rank, self._size, self._seconds, self._exit_process = rank, size, seconds, exit_process
        self._prefix = f"rendezvous {restarts}"
        self._interval, self._patience = min(1.0, seconds / 20), min(ANSWER_SECONDS, seconds / 2)
        self._until = time.monotonic() + seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="rendezvous", daemon=True)
        self._store: dist.Store | None = None  # None until the store has answered

    def __enter__(self) -> "RendezvousMonitor":
        if self._size > 1:
            self._thread.start()
            threading.Thread(target=self._guard, name="rendezvous's guard", daemon=True).start()
        return self

    def connect(self, store: dist.Store) -> None:
        """Opens a second connection to the store, because the main thread waits on the first."""
        if self._size > 1:
            self._store = dist.PrefixStore(self._prefix, store.clone())  # type: ignore[attr-defined]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self._store is not None and isinstance(error, RuntimeError):
            # Another rank's end may have caused the error; the thread is then about to report it.
            self._thread.join(2 * self._patience)
        self._over.set()
        if self._store is not None and kind is None:
            self._store.set(f"answer {self._rank}", "")

    def _listen(self) -> None:
        while not self._over.wait(self._interval):
            try:
                text = self._answer(self._store) if self._store is not None else None
            except RuntimeError as error:
                text = f"{STORE_NAME} is gone, and with it the rank or launcher that hosted it ({error})"
            if text and not self._over.is_set():
                self._end(text)
                return

    def _answer(self, store: dist.Store) -> str | None:
        """Takes part in a roll call. Returns the verdict of the rank that saw the fault first, None without one."""
        late = time.monotonic() - self._until
        if late > 0:
            store.set("call", "")
        if store.check(["call"]):
            store.set(f"answer {self._rank}", "")
        if store.check(["verdict"]):
            return store.get("verdict").decode()
        if late < self._patience:
            return None
        missing = [rank for rank in range(self._size) if not store.check([f"answer {rank}"])]
        return store.compare_set("verdict", "", missing_ranks_message(missing, self._size, self._seconds)).decode()

    def _guard(self) -> None:
        """Ends the process if the store is missing or frozen, because torch and all requests would wait forever."""
        if not self._over.wait(self._seconds + 1.5 * self._patience):
            self._store = None  # do not ask it again
            waited = f"has not answered rank {self._rank} within {self._seconds:.0f} s"
            self._end(f"{STORE_NAME} {waited}: rank 0 or the launcher that hosts it is frozen or was not started, "
                      "or its host is unreachable")  # fmt: skip

    def _end(self, text: str) -> None:
        self._over.set()
        first = True
        with suppress(RuntimeError):  # the store may be gone
            first = self._store is None or self._store.add("said", 1) == 1
        report_error(text, prints=first)
        if self._store is not None:  # this exit may end the store or all other ranks: let them read the verdict first
            time.sleep(self._patience)
        self._exit_process(EXIT_STATUS)


def missing_ranks_message(missing: list[int], size: int, seconds: float) -> str:
    """Returns one line that names the ranks to look at; their hosts are unknown."""
    if not missing:
        return (
            f"all {size} ranks are there, but could not connect to each other within {seconds:.0f} s: check for a "
            "firewall, and the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        )
    names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return (
        f"no sign of life from {names} of {size} within {seconds:.0f} s of the start: a process is frozen or was not "
        "started, or its host is unreachable"
    )
