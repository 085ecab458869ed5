"""Page-locked host memory of the exact size, so that GPU copies overlap the computation.

torch's own allocator rounds up to powers of two, which can double the size.
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

Shape = torch.Size | tuple[int, ...]
PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context


class CannotPin(OSError, MemoryError):
    """The host refuses to page-lock more memory: an input error when a run begins, out of memory later."""


class PinnedMemory:
    """Allocator of page-locked buffers; they are unlocked when this object goes, and then remain plain memory."""

    def __init__(self) -> None:
        locked: list[Tensor] = []
        self._locked = locked
        weakref.finalize(self, _unlock, locked).atexit = False  # a process that ends unlocks everything

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Returns a new buffer of zeros. Raises CannotPin if the host does not lock that much."""
        return self.lock_new(empty_pageable(shape, dtype))

    def lock_new(self, buffer: Tensor) -> Tensor:
        """Locks a buffer without values, which become zeros. Raises CannotPin if the host does not lock that much.

        Writing zeros makes the kernel map the pages on all threads; locking alone uses one and takes three to five
        times as long.
        """
        return self.lock(buffer.zero_())

    def lock(self, buffer: Tensor) -> Tensor:
        """Locks an existing contiguous buffer. Raises CannotPin if the host does not lock that much."""
        if buffer.nbytes:
            status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, PORTABLE))
            if status:
                raise CannotPin(f"{buffer.nbytes:,} bytes of host memory cannot be pinned (CUDA error {status})")
            self._locked.append(buffer)
        return buffer

    def retain_only(self, used: Iterable[Tensor]) -> None:
        """Unlocks and drops all other buffers: FSDP2 copies a shard that it pads."""
        places = {tensor.data_ptr() for tensor in used}
        _unlock([buffer for buffer in self._locked if buffer.data_ptr() not in places])
        self._locked[:] = [buffer for buffer in self._locked if buffer.data_ptr() in places]


def empty_pageable(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Returns a buffer that is not page-locked."""
    return torch.empty(shape, dtype=dtype)


def _unlock(locked: list[Tensor]) -> None:
    """Unlocks buffers before their memory is freed: a later buffer at the same address could not be locked."""
    for buffer in locked:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
    locked.clear()
