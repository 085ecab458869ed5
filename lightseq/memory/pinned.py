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
    """Error when the host refuses to page-lock more memory: an input error at the start, out of memory later."""


class PinnedMemory:
    """Allocator of page-locked buffers. When it is garbage-collected, its buffers become pageable memory."""

    def __init__(self) -> None:
        locked: list[Tensor] = []
        self._locked = locked
        weakref.finalize(self, _unlock, locked).atexit = False  # a process that ends unlocks everything

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Returns a new buffer of zeros. Raises CannotPin if the host refuses."""
        return self.lock_new(empty_pageable(shape, dtype))

    def lock_new(self, buffer: Tensor) -> Tensor:
        """Zeroes and locks an uninitialized buffer. Raises CannotPin if the host refuses.

        Zeroing maps the pages on all threads. Locking alone maps them on one and takes three to five times as long.
        """
        return self.lock(buffer.zero_())

    def lock(self, buffer: Tensor) -> Tensor:
        """Locks an existing contiguous buffer. Raises CannotPin if the host refuses."""
        if buffer.nbytes:
            status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, PORTABLE))
            if status:
                raise CannotPin(f"{buffer.nbytes:,} bytes of host memory cannot be pinned (CUDA error {status})")
            self._locked.append(buffer)
        return buffer

    def retain_only(self, used: Iterable[Tensor]) -> None:
        """Unlocks and drops all other buffers, such as shards that FSDP2 padded and copied."""
        places = {tensor.data_ptr() for tensor in used}
        _unlock([buffer for buffer in self._locked if buffer.data_ptr() not in places])
        self._locked[:] = [buffer for buffer in self._locked if buffer.data_ptr() in places]


def empty_pageable(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Returns a buffer that is not page-locked."""
    return torch.empty(shape, dtype=dtype)


def _unlock(locked: list[Tensor]) -> None:
    """Unlocks buffers. Memory freed while locked could not be locked again at the same address."""
    for buffer in locked:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
    locked.clear()
