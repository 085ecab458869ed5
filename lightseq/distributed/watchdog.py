"""Watchdog that names the rank that never came, died, froze or fell behind, and ends all ranks: no run waits forever.

Every rank reports its step and phase to a shared store once a second, from a thread that keeps running while the main
one waits in a collective. A rank whose heartbeat stops is dead or frozen; among the others, the furthest behind is the
one they wait for. If a rank's death breaks a connection, the other ranks' main threads get an error that does not name
it: they wait for its heartbeat to stop, and name it.

Another watchdog guards the rendezvous, where torch's own timeout does not say who is missing.
"""

import faulthandler
import json
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from lightseq.distributed.start_over import is_store_of_launcher, start_over
from lightseq.distributed.world import World, exit_process, report_error

EXIT_STATUS = 70  # exit status of a process that ends because of another rank (EX_SOFTWARE)
STORE_NAME = "the rendezvous store"
RENDEZVOUS = "rendezvous"
SAID = "said"  # key of the store, counts the ranks that have explained the end of the run
PHASES = (
    RENDEZVOUS,
    "start",
    "data",
    "forward",
    "backward",
    "update",
    "evaluation",
    "samples",
    "saving",
    "end",
)  # in the order of a run
SILENT_BEATS, SILENT_SECONDS = 5, 60.0  # more than a busy interpreter may lose
START_OVER, LEAVING_SECONDS = "start over", 30.0  # key in the store; ranks leave together, or after this time
# Messages of gloo, NCCL and sockets when a peer is gone.
PEER_GONE = re.compile(r"(?i:closed by peer|reset by peer|broken pipe|ncclRemoteError|remote process exited)")


class RankNotResponding(Exception):
    """Error of a rank that waited in vain for another; the watchdog adds which, and why."""


@dataclass(frozen=True)
class Heartbeat:
    """Step and phase of a rank. `number` grows while it is alive; `seconds` is its time in the phase."""

    rank: int
    host: str
    number: int
    step: int
    phase: str
    seconds: float

    @property
    def position(self) -> tuple[int, int]:
        return self.step, PHASES.index(self.phase)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (step {self.step}, {self.phase}, for {self.seconds:.0f} s)"


class Watchdog:
    """Watchdog of one rank, active inside a `with`.

    `end` receives the verdict on every rank; by default it writes `stacks`, if given, and ends the process. In the
    phase "rendezvous" there is no store yet: call `connect`.
    """

    def __init__(
        self,
        world: World,
        timeout_seconds: float,
        stacks: Path | None,
        end: Callable[[str], None] | None = None,
        store: dist.Store | None = None,
        phase: str = "start",
    ) -> None:
        self._world, self._timeout, self._stacks = world, timeout_seconds, stacks
        self._end = end or self._give_up
        self._interval = min(1.0, timeout_seconds / 20)
        self._host = socket.gethostname()
        self._at = (0, phase, time.monotonic())
        self._progress: Callable[[], int] = lambda: 0
        self._counted = (0, 0.0)  # last value, and when it changed
        self._began = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: number of its last heartbeat, and when it came
        self._closed = threading.Event()
        self._store: dist.Store | None = None
        self._request_began: float | None = time.monotonic()  # when the unanswered request to the store began
        self._error: Exception | None = None  # the error that ended the main thread's work
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._beats = threading.Thread(target=self._beat, name="watchdog's beat", daemon=True)
        self._thread.start()
        if world.size > 1:
            threading.Thread(target=self._guard, name="watchdog's guard", daemon=True).start()
            if phase != RENDEZVOUS:
                self.connect(store or own_connection(dist.distributed_c10d._get_default_store(), world, phase))

    def connect(self, store: dist.Store) -> None:
        """Opens this watchdog's own connection to the store, and starts the heartbeat."""
        self._store = store
        self._publish(self._heartbeat(0))
        self._request_began = None
        self._beats.start()

    def mark(self, step: int | None, phase: str) -> None:
        """Records the main thread's step (None: the same) and phase. Costs nothing measurable."""
        self._at = (self._at[0] if step is None else step, phase, time.monotonic())

    def follow_progress(self, progress: Callable[[], int]) -> None:
        """Sets a counter that grows while the main thread makes progress within a phase, which may take hours."""
        self._progress = progress

    def mark_explained(self) -> None:
        """Keeps other ranks from printing that this one is gone, because it has printed why it ends."""
        if self._store is not None:
            self._store.add(SAID, 1)

    def start_over(self, memory_limit: float) -> NoReturn:
        """Starts the command over on all ranks, with a new limit of GPU bytes for plans. Never returns."""
        if self._store is None:
            start_over(self._world.launch, memory_limit)
        self._store.compare_set(START_OVER, "", str(memory_limit))
        while True:  # until the watching thread replaces the process
            time.sleep(1.0)

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Reports this rank as done. After an error it stays silent instead, so that the others notice."""
        if self._store is not None and isinstance(error, Exception):
            self._error = error
            self._wait_for_a_verdict()
        self.mark(None, "end")
        self._closed.set()
        self._thread.join(self._timeout)
        if self._store is None:
            return
        self._beats.join(self._timeout)
        if kind is None and not self._thread.is_alive() and not self._beats.is_alive():
            with suppress(RuntimeError):  # the launcher may be gone already
                self._publish(self._heartbeat(-1))

    def _wait_for_a_verdict(self) -> None:
        """Waits until the watchdog would know that another rank's death caused the error; it then ends the process.

        Ignores SIGTERM meanwhile, which a launcher sends to all ranks as soon as one has ended.
        """
        # A function, because a process that starts over would go on ignoring a signal.
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        self._thread.join((SILENT_BEATS + 3) * self._interval)
        signal.signal(signal.SIGTERM, before)

    def _beat(self) -> None:
        """Publishes heartbeats and does nothing else: a busy interpreter delays a thread after every request."""
        number = 0
        while not self._closed.wait(self._interval):
            number += 1
            try:
                self._publish(self._heartbeat(number))
            except (dist.DistStoreError, dist.DistNetworkError, RuntimeError):
                return  # the watching thread reports it

    def _watch(self) -> None:
        while not self._closed.wait(self._interval):
            if self._store is None and self._world.size > 1:
                continue  # not connected yet
            self._request_began = time.monotonic()
            try:
                if self._store is not None and self._store.check([START_OVER]):
                    self._leave_together(self._store)
                text = self._judge(self._heartbeat(0))
            except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
                text = f"{STORE_NAME} is gone, and with it the rank or launcher that hosted it ({error})"
            if text and not self._closed.is_set():
                self._end(text)
                return
            self._request_began = None

    def _leave_together(self, store: dist.Store) -> NoReturn:
        """Waits until every rank knows that the run starts over, and replaces this process."""
        memory_limit = float(store.get(START_OVER))
        store.set(f"leaves {self._world.rank}", "")
        until = time.monotonic() + LEAVING_SECONDS
        while not store.check([f"leaves {rank}" for rank in range(self._world.size)]) and time.monotonic() < until:
            time.sleep(0.02)
        if self._world.is_main and not is_store_of_launcher():
            time.sleep(0.5)  # the store ends with this process: let the others read it once more
        start_over(self._world.launch, memory_limit)

    def _guard(self) -> None:
        """Ends the process if the store stops answering, for example after a network failure."""
        while not self._closed.wait(self._interval):
            began = self._request_began
            if began is not None and time.monotonic() - began > self._timeout:
                self._store = None  # do not ask it again
                waited = f"has not answered {self._heartbeat(0)} within {self._timeout:.0f} s"
                self._end(f"{STORE_NAME} {waited}: rank 0 or the launcher that hosts it is frozen or was not started, "
                          "or its host is unreachable")  # fmt: skip
                return

    def _heartbeat(self, number: int) -> Heartbeat:
        step, phase, since = self._at
        if (progress := self._progress()) != self._counted[0]:
            self._counted = (progress, time.monotonic())
        seconds = time.monotonic() - max(since, self._counted[1])
        return Heartbeat(self._world.rank, self._host, number, step, phase, seconds)

    def _publish(self, beat: Heartbeat) -> None:
        if (store := self._store) is not None:  # the guard drops a store that does not answer
            store.set(f"beat {beat.rank}", json.dumps(asdict(beat)))

    def _judge(self, beat: Heartbeat) -> str | None:
        """Returns the verdict of the rank that found the fault first, None without a fault."""
        late = beat.seconds > self._timeout and beat.phase != "start"  # one rank may download weights for hours
        if self._store is None:
            return f"{beat} makes no progress" if late else None
        if self._store.check(["verdict"]):
            return self._store.get("verdict").decode()
        beats = self._read_beats()
        silent = self._silent(beats)
        if not silent and not late:
            return None
        text = stalled_ranks_message(beats, silent)
        return self._store.compare_set("verdict", "", text).decode()

    def _read_beats(self) -> list[Heartbeat]:
        assert self._store is not None
        keys = [f"beat {rank}" for rank in range(self._world.size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        return [Heartbeat(**json.loads(text)) for text in self._store.multi_get(keys)]

    def missing_ranks(self) -> list[int] | None:
        """Returns the ranks that have not joined yet, and None while the store cannot be reached."""
        if self._store is None:
            return None
        return sorted(set(range(self._world.size)) - {beat.rank for beat in self._read_beats()})

    def _silent(self, beats: Sequence[Heartbeat]) -> list[Heartbeat]:
        """Returns ranks whose heartbeat stopped or never came."""
        now, patience = time.monotonic(), SILENT_BEATS * self._interval
        if self._error is None:
            patience = max(patience, min(self._timeout / 2, SILENT_SECONDS))
        for beat in beats:
            if beat.rank not in self._heard or self._heard[beat.rank][0] != beat.number:
                self._heard[beat.rank] = (beat.number, now)
        unheard = {beat.rank: now - self._heard[beat.rank][1] for beat in beats}
        silent = [  # assume that each is still in that phase
            replace(beat, seconds=beat.seconds + unheard[beat.rank])
            for beat in beats
            if beat.phase != "end" and unheard[beat.rank] > patience
        ]
        # After the rendezvous all ranks start within moments.
        if (seconds := now - self._began) > (self._timeout if self._at[1] == RENDEZVOUS else patience):
            missing = sorted(set(range(self._world.size)) - {beat.rank for beat in beats})
            silent += [Heartbeat(rank, "an unknown host", 0, 0, self._at[1], seconds) for rank in missing]
        return silent

    def _give_up(self, text: str) -> None:
        """Writes the stacks of all threads to a file, prints the verdict once, and ends this process.

        Also prints this rank's own error if it may be the cause; the file has it in any case.
        """
        remedy = ""
        if isinstance(self._error, RankNotResponding):
            text, remedy = f"{self._error}: {text}", "; go on with --resume_from_checkpoint auto"
        elif self._error is not None and not PEER_GONE.search(str(self._error)):
            traceback.print_exception(self._error)
        if self._stacks is not None:
            text += f"; {self._write_stacks(text, self._stacks)}"
        first = True
        with suppress(RuntimeError):  # the store may be gone
            first = self._store is None or self._store.add(SAID, 1) == 1
        # The launcher sees a rank's end before its heartbeat is missed, which takes up to two intervals.
        unheard = max((time.monotonic() - at for _, at in self._heard.values()), default=0.0)
        report_error(text + remedy, prints=first, seconds_ago=unheard + 2 * self._interval)
        time.sleep(2 * self._interval)  # a launcher ends all ranks as soon as one ends: let them write first
        exit_process(EXIT_STATUS)

    def _write_stacks(self, text: str, directory: Path) -> str:
        """Writes the verdict, this rank's error and the stacks of its threads. Returns their path."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with (directory / f"rank{self._world.rank}.txt").open("w") as file:
                file.write(text + "\n")
                file.writelines(traceback.format_exception(self._error) if self._error is not None else ())
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError as error:
            return f"the stacks of rank {self._world.rank} could not be written to {directory} ({error.strerror})"
        return f"the stacks of all ranks are in {directory}"


def stalled_ranks_message(beats: Sequence[Heartbeat], silent: Sequence[Heartbeat]) -> str:
    """Returns one line that names the rank to look at."""
    if silent:
        names = ", ".join(map(str, silent))
        return f"no sign of life from {names}: the process is dead, frozen or not started, or its host is unreachable"
    last = min(beats, key=lambda beat: beat.position)
    ahead = [beat for beat in beats if beat.position > last.position]
    if not ahead and last.phase == RENDEZVOUS:
        return (
            f"all {len(beats)} ranks are there, but could not connect to each other within {last.seconds:.0f} s: check "
            "for a firewall, and the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        )
    if not ahead:
        return f"no rank makes progress, and all are in the same phase as {last}: a collective or a kernel does not end"
    behind = [beat for beat in beats if beat.position == last.position]
    furthest = max(ahead, key=lambda beat: beat.position)
    return f"{', '.join(map(str, behind))} fell behind: others are at step {furthest.step}, {furthest.phase}"


def own_connection(store: dist.Store, world: World, phase: str) -> dist.Store:
    """Opens a second connection to the store, because the main thread may block the first. Keys are of this restart."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    own: dist.Store = store.clone()  # type: ignore[attr-defined]
    own.set_timeout(timedelta(seconds=30))
    return dist.PrefixStore(f"watchdog {phase} {world.restarts}", own)
