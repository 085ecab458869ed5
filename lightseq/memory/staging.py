"""Copies of tensors in host memory, taken while the device goes on computing.

A copy of what is on a GPU goes into pinned memory on a stream of its own; the stream that computes waits for it, on the
device, before it overwrites what is being copied. Large tensors that are on the host already are copied by `finish`,
from another thread than the one that trains.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightseq.memory.pinned import PinnedMemory, empty_pageable

SMALL_BYTES = 1 << 20  # on the host: copied at once

T = TypeVar("T")


class Staging:
    """Buffers made once and used again for the same tensors by name."""

    def __init__(self, device: torch.device) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._pinned = PinnedMemory()
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: list[tuple[Tensor, Tensor]] = []  # for `finish` to copy: from, to
        self._on_host = threading.Event()
        self._on_host.set()
        self._copied: torch.cuda.Event | None = None

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Makes the buffers that these tensors need: to pin memory takes time."""
        for name, tensor in tensors.items():
            _each(name, tensor, self._buffer)

    def begin(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Starts copying; the copies, which hold what they should once `finish` has returned."""
        assert self._on_host.is_set() and not self._waiting, "the copies before are still being made"
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        copies = {name: _each(name, tensor, self._copy) for name, tensor in tensors.items()}
        self._copied = self._side.record_event() if self._side is not None else None
        if self._waiting:
            self._on_host.clear()
        return copies

    def before_overwriting(self) -> None:
        """To be called before the tensors change: the device waits for its copies, the host for its own."""
        self._on_host.wait()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def finish(self) -> None:
        """Makes and awaits the rest of the copies."""
        try:
            for source, copy in self._waiting:
                copy.copy_(source)
        finally:
            self._waiting = []
            self._on_host.set()
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        copy = self._buffer(name, tensor)
        if tensor.device.type == "cuda":
            assert self._side is not None
            with torch.cuda.stream(self._side):
                copy.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._side)
        elif tensor.nbytes < SMALL_BYTES:
            copy.copy_(tensor)
        else:
            self._waiting.append((tensor, copy))
        return copy

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        found = self._buffers.get(name)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            make = self._pinned.empty if tensor.device.type == "cuda" else empty_pageable
            found = self._buffers[name] = make(tensor.shape, tensor.dtype)
        return found


def _each(name: str, tensor: Tensor, take: Callable[[str, Tensor], Tensor]) -> Tensor:
    """The same tensor around what `take` gives for the plain tensors that it is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return take(name, tensor)
    parts, context = tensor.__tensor_flatten__()
    inner: dict[str, Any] = {part: getattr(tensor, part) for part in parts}
    inner = {part: _each(f"{name}/{part}", x, take) if isinstance(x, Tensor) else x for part, x in inner.items()}
    made: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made


def local_bytes(tensors: dict[str, Tensor]) -> int:
    """What copies of this rank's parts take."""
    total = 0

    def count(_: str, tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    for name, tensor in tensors.items():
        _each(name, tensor, count)
    return total
