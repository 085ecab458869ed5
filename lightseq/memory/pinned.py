"""Page-locked host memory, to the byte, from and to which a GPU copies while both go on.

torch's own allocator rounds every piece up to a power of two, which can double it.
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

Shape = torch.Size | tuple[int, ...]
PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context


class CannotPin(OSError, MemoryError):
    """A refusal where a run begins; in the middle of it, the end of the host's memory."""


class PinnedMemory:
    """Makes buffers that stay locked for as long as this object lives; whoever reads them later reads plain memory."""

    def __init__(self) -> None:
        locked: list[Tensor] = []
        self._locked = locked
        weakref.finalize(self, _unlock, locked).atexit = False  # a process that ends lets go of all by itself

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A new buffer, of zeros. Raises CannotPin where the host does not lock as much."""
        return self.lock_new(empty_pageable(shape, dtype))

    def lock_new(self, buffer: Tensor) -> Tensor:
        """Locks one without values, which become zeros. Raises CannotPin where the host does not lock as much.

        Writing them has the kernel make the pages on all threads; locking would on one, in three to five times as long.
        """
        return self.lock(buffer.zero_())

    def lock(self, buffer: Tensor) -> Tensor:
        """Locks one that is there, and contiguous. Raises CannotPin where the host does not lock as much."""
        if buffer.nbytes:
            status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, PORTABLE))
            if status:
                raise CannotPin(f"{buffer.nbytes:,} bytes of host memory cannot be pinned (CUDA error {status})")
            self._locked.append(buffer)
        return buffer

    def retain_only(self, used: Iterable[Tensor]) -> None:
        """Lets go of all buffers but these: FSDP2 copies a shard that it pads."""
        places = {tensor.data_ptr() for tensor in used}
        _unlock([buffer for buffer in self._locked if buffer.data_ptr() not in places])
        self._locked[:] = [buffer for buffer in self._locked if buffer.data_ptr() in places]


def empty_pageable(shape: Shape, dtype: torch.dtype) -> Tensor:
    """A buffer that is not locked."""
    return torch.empty(shape, dtype=dtype)


def _unlock(locked: list[Tensor]) -> None:
    """Before the memory goes back: a later buffer in its place could not be locked."""
    for buffer in locked:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
    locked.clear()
