"""Running foreign code, such as a chat template, in a child process with a limit of time and memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import resource
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
MAX_SECONDS = 60.0  # for one item
MAX_BYTES = 2 << 30  # beyond what the process holds when it starts


class LimitError(ValueError):
    """An item took too much time or memory."""

    def __init__(self, item: Any, reason: str) -> None:
        super().__init__(reason)
        self.item = item


def limited_map(function: Callable[[T], R], batches: Iterable[Sequence[T]]) -> Iterator[list[R]]:
    """Yields function(item) for the items of each batch, computed in a forked process, one batch ahead of the caller.

    Raises what the function raises, and LimitError if an item takes more than MAX_SECONDS, or the process more than
    MAX_BYTES beyond those it starts with.
    """
    here, there = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs Python only, and takes no lock of torch
        child = os.fork()
    if child == 0:
        here.close()
        _serve(function, there)
    there.close()
    try:
        iterator = iter(batches)
        batch = next(iterator, None)
        _send(here, batch)
        while batch is not None:
            results = [_receive(here, item) for item in batch]
            batch = next(iterator, None)
            _send(here, batch)
            yield results
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        here.close()


def _send(connection: Connection, batch: Sequence[T] | None) -> None:
    if batch is None:
        return
    try:
        connection.send(batch)
    except RecursionError:
        item = next(filter(_is_too_deep, batch), batch[0])
        raise LimitError(item, "fails, because it is nested too deeply") from None


def _is_too_deep(item: object) -> bool:
    try:
        pickle.dumps(item)
    except RecursionError:
        return True
    return False


def _receive(connection: Connection, item: object) -> Any:
    if not connection.poll(MAX_SECONDS):
        raise LimitError(item, f"takes more than {MAX_SECONDS:.0f} s")
    try:
        error, value = connection.recv()
    except (EOFError, ConnectionError):
        raise LimitError(item, "ends its process, perhaps for lack of memory") from None
    if isinstance(error, MemoryError):
        raise LimitError(item, f"takes more than {MAX_BYTES >> 30} GiB") from None
    if error is not None:
        raise error
    return value


def _serve(function: Callable[[T], R], connection: Connection) -> None:
    """Answers each item with an error or a result. Ends the process without running anything else of the parent."""
    try:
        gc.freeze()  # objects of the parent, tensors on a GPU among them, must not be freed here
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MAX_BYTES, resource.RLIM_INFINITY))
        while True:
            for item in connection.recv():
                try:
                    answer: tuple[Exception | None, R | None] = (None, function(item))
                except Exception as error:
                    answer = (error, None)
                connection.send(answer)
    finally:
        os._exit(0)
