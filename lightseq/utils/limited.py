"""Running foreign code, such as a chat template, in a child process with a limit of time and memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
MAX_SECONDS = 60.0  # for one item
MAX_BYTES = 2 << 30  # beyond what the process holds when it starts


class LimitError(ValueError):
    """An item took too much time or memory. `index` is its position."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


def limited_map(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yields function(item) of each item, computed in a forked process.

    Raises what the function raises, and LimitError if an item takes more than MAX_SECONDS, or the process more than
    MAX_BYTES beyond those it starts with.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs Python only, and takes no lock of torch
        child = os.fork()
    if child == 0:
        receiver.close()
        _run_child(function, items, sender)
    sender.close()
    try:
        for index in range(len(items)):
            yield _receive(receiver, index)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        receiver.close()


def _receive(receiver: Connection, index: int) -> Any:
    if not receiver.poll(MAX_SECONDS):
        raise LimitError(index, f"takes more than {MAX_SECONDS:.0f} s")
    try:
        error, value = receiver.recv()
    except EOFError:
        raise LimitError(index, "ends its process, perhaps for lack of memory") from None
    if isinstance(error, MemoryError):
        raise LimitError(index, f"takes more than {MAX_BYTES >> 30} GiB") from None
    if error is not None:
        raise error
    return value


def _run_child(function: Callable[[T], R], items: Sequence[T], sender: Connection) -> None:
    """Sends an error or a result for each item, and ends the process without running anything else of the parent."""
    try:
        gc.disable()  # objects of the parent, tensors on a GPU among them, must not be freed here
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MAX_BYTES, resource.RLIM_INFINITY))
        for item in items:
            try:
                result: tuple[Exception | None, R | None] = (None, function(item))
            except Exception as error:
                result = (error, None)
            sender.send(result)
    finally:
        os._exit(0)
