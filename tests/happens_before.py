"""Streams as a GPU orders them, on a CPU: who touched which memory when, and what no wait has put in order.

Every stream of every rank has a clock of what it knows of all of them, which waits and barriers pass on. Operations run
at once; two of them race if they touch the same words, one writes, and neither clock knows of the other.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

WORD = 8  # bytes

Key = tuple[Any, ...]  # a piece of memory
Who = tuple[int, str]  # rank and stream
Clock = dict[Who, int]


class Touch(NamedTuple):
    who: Who
    clock: Clock
    words: np.ndarray
    writes: bool
    operator: str

    def is_before(self, other: "Touch") -> bool:
        return other.clock.get(self.who, 0) >= self.clock[self.who]


class Streams(TorchDispatchMode):
    """Notes what operations on this rank touch. `main` is the stream that is current at first.

    A tensor is written when it is made, also by torch.empty, because torch fills it in deterministic mode.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.now = rank, "main"
        self.before: list[str] = []  # of streams that were current where one was entered
        self.touches: dict[Key, list[Touch]] = {}
        self.freed_early: set[str] = set()
        self.mapped: dict[int, tuple[int, int]] = {}  # memory of a rank that others map, by address: rank and size
        self._clocks: dict[str, Clock] = {"main": {(rank, "main"): 0}}
        self._alive: dict[int, tuple[StorageWeakRef, str, int]] = {}  # by address: of which stream it is, its number
        self._made = 0

    def clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {(self.rank, stream): 0})

    def learn(self, stream: str, clock: Clock) -> None:
        self.look_for_freed()
        mine = self.clock(stream)
        mine |= {who: max(count, mine.get(who, 0)) for who, count in clock.items()}

    def tick(self, stream: str) -> Clock:
        self.look_for_freed()
        self.clock(stream)[self.rank, stream] += 1
        return dict(self.clock(stream))

    def look_for_freed(self) -> None:
        """Checks that streams which freed memory have waited for all other uses of it."""
        for address, (storage, stream, number) in list(self._alive.items()):
            if torch.UntypedStorage._expired(storage.cdata):  # as storage.expired(), which takes three times as long
                del self._alive[address]
                clock = self.clock(stream)
                for touch in self.touches.get(("local", self.rank, number), []):
                    if clock.get(touch.who, 0) < touch.clock[touch.who]:
                        self.freed_early.add(f"{touch.operator} on {touch.who[1]}")

    def stream(self, *_: object, **__: object) -> "Stream":
        name = f"side {len(self._clocks)}"
        self.clock(name)
        return Stream(self, name)

    def current(self, *_: object) -> "Stream":
        return Stream(self, self.now)

    def set(self, name: str) -> None:
        self.look_for_freed()
        self.now = name

    def synchronize(self, *_: object) -> None:
        for clock in [dict(clock) for clock in self._clocks.values()]:
            for stream in self._clocks:
                self.learn(stream, clock)

    def barrier(self, group: dist.ProcessGroup) -> None:
        everyone: list[Clock] = [{}] * dist.get_world_size(group)
        with _disable_current_modes():
            dist.all_gather_object(everyone, self.tick(self.now), group=group)
        for clock in everyone:
            self.learn(self.now, clock)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tick(self.now)
        results = func(*args, **(kwargs or {}))
        schema, made = func._schema, results if isinstance(results, tuple) else (results,)
        for x, result in zip(made, schema.returns, strict=False):
            if isinstance(x, Tensor) and result.alias_info is None:
                self._note_made(x)
        if schema.returns and all(result.alias_info and not result.alias_info.is_write for result in schema.returns):
            return results  # a view
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in schema.arguments:
            self._touch(given.get(argument.name), bool(argument.alias_info), func.name())
        self._touch([x for x, r in zip(made, schema.returns, strict=False) if not r.alias_info], True, func.name())
        return results

    def _note_made(self, x: Tensor) -> None:
        address = x.untyped_storage().data_ptr()
        if address and address not in self._alive:
            self._made += 1
            self._alive[address] = (StorageWeakRef(x.untyped_storage()), self.now, self._made)

    def _touch(self, found: Any, writes: bool, operator: str) -> None:
        for x in found if isinstance(found, list | tuple) else [found]:
            if isinstance(x, Tensor) and x.numel():
                key, start = self._place(x)
                words = start + _words(x.storage_offset(), x.shape, x.stride(), x.element_size())
                touch = Touch((self.rank, self.now), dict(self.clock(self.now)), words, writes, operator)
                self.touches.setdefault(key, []).append(touch)

    def _place(self, x: Tensor) -> tuple[Key, int]:
        address = x.untyped_storage().data_ptr()
        for begin, (rank, size) in self.mapped.items():
            if begin <= address < begin + size:
                return ("of all", rank), (address - begin) // WORD
        self._note_made(x)
        return ("local", self.rank, self._alive[address][2]), 0


class Stream(NamedTuple):
    streams: Streams
    name: str

    def __enter__(self) -> None:
        self.streams.before.append(self.streams.now)
        self.streams.set(self.name)

    def __exit__(self, *_: object) -> None:
        self.streams.set(self.streams.before.pop())

    def wait_stream(self, other: "Stream") -> None:
        self.streams.learn(self.name, self.streams.clock(other.name))

    def wait_event(self, event: Clock) -> None:
        self.streams.learn(self.name, event)

    def record_event(self) -> Clock:
        return self.streams.tick(self.name)


@lru_cache
def _words(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> np.ndarray:
    places = np.array([offset])
    for size, stride in zip(shape, strides, strict=True):
        places = (places[:, None] + np.arange(size) * stride).ravel()
    return np.unique([places * element // WORD, (places * element + element - 1) // WORD])


def races(touches: dict[Key, list[Touch]]) -> set[str]:
    """Pairs of operations that no wait puts in order, by name."""
    found = set()
    for some in touches.values():
        for i, a in enumerate(some):
            for b in some[i + 1 :]:
                apart = a.who == b.who or not (a.writes or b.writes) or a.is_before(b) or b.is_before(a)
                if not apart and np.intersect1d(a.words, b.words, assume_unique=True).size:
                    found.add(f"{a.operator} on {a.who[1]}, {b.operator} on {b.who[1]}")
    return found


def of_all_ranks(touches: dict[Key, list[Touch]], group: dist.ProcessGroup) -> dict[Key, list[Touch]]:
    everyone: list[dict[Key, list[Touch]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, touches, group=group)
    keys = dict.fromkeys(key for theirs in everyone for key in theirs)
    return {key: [touch for theirs in everyone for touch in theirs.get(key, [])] for key in keys}
