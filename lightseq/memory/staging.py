"""Asynchronous host copies of tensors, for checkpoints.

A side stream copies GPU tensors to pinned memory. The compute stream waits for it, on the device, before it overwrites
a tensor. `finish` copies large host tensors on a thread other than training's.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightseq.memory.pinned import PinnedMemory, empty_pageable

SMALL_BYTES = 1 << 20  # smaller host tensors are copied at once

T = TypeVar("T")


class Staging:
    """Host buffers by tensor name, allocated once and reused."""

    def __init__(self, device: torch.device) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._pinned = PinnedMemory()
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host_copies: list[tuple[Tensor, Tensor]] = []  # (source, copy), for `finish`
        self._on_host = threading.Event()
        self._on_host.set()
        self._copied: torch.cuda.Event | None = None

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Allocates the buffers for these tensors in advance, because pinning takes time."""
        for name, tensor in tensors.items():
            _map_inner_tensors(name, tensor, self._buffer)

    def begin(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Starts copying and returns the copies, which are complete once `finish` has returned."""
        assert self._on_host.is_set() and not self._host_copies, "the previous copies are not finished"
        if self._side_stream is not None:
            self._side_stream.wait_stream(torch.cuda.current_stream())
        copies = {name: _map_inner_tensors(name, tensor, self._copy) for name, tensor in tensors.items()}
        self._copied = self._side_stream.record_event() if self._side_stream is not None else None
        if self._host_copies:
            self._on_host.clear()
        return copies

    def wait_before_update(self) -> None:
        """Waits for host copies, and makes the device wait for its own. Call it before the tensors change."""
        self._on_host.wait()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def finish(self) -> None:
        """Copies the remaining host tensors and waits for all copies."""
        try:
            for source, copy in self._host_copies:
                copy.copy_(source)
        finally:
            self._host_copies = []
            self._on_host.set()
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        copy = self._buffer(name, tensor)
        if tensor.device.type == "cuda":
            assert self._side_stream is not None
            with torch.cuda.stream(self._side_stream):
                copy.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._side_stream)
        elif tensor.nbytes < SMALL_BYTES:
            copy.copy_(tensor)
        else:
            self._host_copies.append((tensor, copy))
        return copy

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        found = self._buffers.get(name)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            make = self._pinned.empty if tensor.device.type == "cuda" else empty_pageable
            found = self._buffers[name] = make(tensor.shape, tensor.dtype)
        return found


def _map_inner_tensors(name: str, tensor: Tensor, take: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Rebuilds a tensor, with each of its plain inner tensors replaced by the result of `take`."""
    if not is_traceable_wrapper_subclass(tensor):
        return take(name, tensor)
    parts, context = tensor.__tensor_flatten__()
    inner: dict[str, Any] = {part: getattr(tensor, part) for part in parts}
    inner = {
        part: _map_inner_tensors(f"{name}/{part}", x, take) if isinstance(x, Tensor) else x for part, x in inner.items()
    }
    made: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made


def local_bytes(tensors: dict[str, Tensor]) -> int:
    """Returns the bytes of this rank's parts of the tensors."""
    total = 0

    def count(_: str, tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    for name, tensor in tensors.items():
        _map_inner_tensors(name, tensor, count)
    return total
