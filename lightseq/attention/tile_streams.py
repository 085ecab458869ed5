"""Streams on which the tiles of a step run, so that one tile fills the SMs that the end of another leaves idle.

The last thread blocks of a kernel fill only some of the SMs: with n waves of blocks, a share of about 1/2n of its time
is lost. Tiles of one step do not depend on each other, so the next tile's blocks can start meanwhile.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import TracebackType

import torch


class TileStreams:
    """Streams of one step. Its tiles alternate between the current stream and a second one.

    Memory that a tile allocates belongs to its stream. The second stream waits for the current one before the step, and
    the current one for the second after it, so that either may use what the other has made or freed in other steps.
    """

    def __init__(self, device: torch.device, tiles: int) -> None:
        self._second = second_stream(device) if tiles > 1 else None
        self._started = 0

    def __enter__(self) -> "TileStreams":
        if self._second is not None:
            self._second.wait_stream(torch.cuda.current_stream())
        return self

    def following(self) -> AbstractContextManager[object]:
        """Returns a context in which the next tile is launched."""
        self._started += 1
        if self._second is None or self._started % 2:
            return nullcontext()
        return torch.cuda.stream(self._second)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._second is not None:
            torch.cuda.current_stream().wait_stream(self._second)


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None
