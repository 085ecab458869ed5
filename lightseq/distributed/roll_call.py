"""Record of each rank's calls in the store, so that a call that only some ranks make is named instead of hanging.

Ranks that share sequences must make the same calls in the same order. Each writes its latest calls to the store, which
takes microseconds. Before a call that is new or not a training step, a rank also waits until all others make it. A
thread tells a rank that waits what the main thread does.
"""

import json
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

KEPT_CALLS = 32  # exceeds the calls that one host runs ahead of another
ASK_SECONDS, WARN_SECONDS = 2.0, 10.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0005, 0.05
REMEDY = (
    "every rank must make the same calls of a model whose sequences are split, also to sample or to evaluate "
    "(docs/trainers.md)"
)
COLLECTIVES = ("torch.distributed.", "torch.nn.parallel.distributed.", "lightseq.comm.")  # modules that wait for ranks


class RollCall:
    """Calls of the ranks of one group. Every rank of the group makes its objects in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks, self._rank = dist.get_process_group_ranks(group), dist.get_rank()
        self._made = 0
        self._recent: deque[str] = deque(maxlen=KEPT_CALLS)
        self._known: set[str] = set()
        if len(self._ranks) == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.PrefixStore(f"lightseq calls {hash(tuple(self._ranks)):x}", store)
        number = self._store.add(f"objects of rank {self._rank}", 1)
        self._keys = {rank: f"{number} {rank}" for rank in self._ranks}
        self._answers = _Answers(self._store, self._keys[self._rank])
        weakref.finalize(self, self._answers.end)

    def __deepcopy__(self, _memo: object) -> "RollCall":
        return self  # a copy for the same ranks

    def make(self, call: str, is_training_step: bool) -> None:
        """Records a call, such as "trains on 2 x 60 tokens".

        Waits for the other ranks if the call is no training step, or is new. Raises ValueError if another rank makes
        another call instead, or has ended.
        """
        if len(self._ranks) == 1:
            return
        self._made += 1
        self._recent.append(call)
        self._store.set(self._keys[self._rank], json.dumps([self._made, False, *self._recent]))
        if not is_training_step or call not in self._known:
            self._answers.start()
            self._wait(call, warns=not is_training_step)
            self._known.add(call)

    def _wait(self, call: str, warns: bool) -> None:
        began, pause, asked = time.monotonic(), FIRST_PAUSE_SECONDS, 0
        waits_for, places = [rank for rank in self._ranks if rank != self._rank], dict[int, str]()
        while waits_for := [rank for rank in waits_for if not self._makes(rank, call)]:
            seconds, rank = time.monotonic() - began, waits_for[0]
            if seconds > (asked + 1) * ASK_SECONDS:
                asked += 1
                before, places = places, {x: self._place(x, f"{self._rank} {self._made} {asked}") for x in waits_for}
                stuck = all(place.startswith("waits in") and place == before.get(x) for x, place in places.items())
                if stuck and len(self._ranks) == dist.get_world_size():  # else they may wait for ranks of other groups
                    raise ValueError(f"rank {self._rank} {call}, but rank {rank} {places[rank]}; {REMEDY}")
            late = f"rank {self._rank} {call} and has waited {seconds:.0f} s for rank {rank}"
            if places.get(rank):
                late += f", which {places[rank]}"
            if seconds > self._store.timeout.total_seconds():
                raise ValueError(f"{late}; {REMEDY}")
            if warns and seconds > WARN_SECONDS:
                warnings.warn(f"{late}; {REMEDY}", stacklevel=2)
                warns = False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _makes(self, rank: int, call: str) -> bool:
        """Returns whether a rank has made the call, False if it may still do so. Raises ValueError if it does not."""
        if not self._store.check([self._keys[rank]]):
            return False
        made, has_ended, *recent = json.loads(self._store.get(self._keys[rank]))
        since = made - self._made  # the other rank's calls since this one
        if since < 0 and not has_ended:
            return False
        if since >= len(recent) > 0:
            return True  # long ago
        theirs = "has ended, or does not split its model any more" if since < 0 else recent[-1 - since]
        if theirs != call:
            raise ValueError(f"rank {self._rank} {call}, but rank {rank} {theirs}; {REMEDY}")
        return True

    def _place(self, rank: int, question: str) -> str:
        """Asks a rank for its place. Returns its answer to the previous question, empty without one."""
        key = self._keys[rank]
        answer = self._store.get(f"{key} answers").decode() if self._store.check([f"{key} answers"]) else ""
        self._store.set(f"{key} is asked", question)
        return answer


class _Answers:
    """Thread that answers other ranks' questions, through the store, about the place of this rank's main thread."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store, self._key = store, key
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="roll call", daemon=True)

    def start(self) -> None:
        if not self._thread.is_alive() and not self._ended.is_set():
            self._thread.start()

    def _answer(self) -> None:
        answered = b""
        with suppress(RuntimeError):  # the store may be gone with the launcher or rank 0
            while not self._ended.wait(ASK_SECONDS / 2):
                if not self._store.check([f"{self._key} is asked"]):
                    continue
                if (question := self._store.get(f"{self._key} is asked")) != answered:
                    self._store.set(f"{self._key} answers", main_thread_place())
                    answered = question

    def end(self) -> None:
        """Says in the store that this rank makes no more calls."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        with suppress(RuntimeError):
            found = json.loads(self._store.get(self._key)) if self._store.check([self._key]) else [0, False]
            self._store.set(self._key, json.dumps([found[0], True, *found[2:]]))


def main_thread_place() -> str:
    """Describes where the main thread is: in which collective, or at which line outside torch and lightseq."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "has ended"
    waits = f"{frame.f_globals.get('__name__')}.".startswith(COLLECTIVES)
    name = frame.f_code.co_name
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("torch.", "lightseq.")):
        frame = frame.f_back
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return f"waits in {name} ({line})" if waits else f"is at {line}"
