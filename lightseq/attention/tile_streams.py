"""Second stream for the tiles of a step, so that one tile fills the SMs that the end of another leaves idle.

The last thread blocks of a kernel fill only some of the SMs: with n waves of blocks, a share of about 1/2n of its time
is lost. Tiles of one step do not depend on each other, so the next tile's blocks can start meanwhile.

Tiles alternate between the current stream and the second one. Memory that a tile allocates belongs to its stream. The
second stream waits for the current one before the step, and the current one for the second after it, so that either may
use what the other has made or freed in other steps. Memory that tiles of both streams write to is allocated before that
wait, because torch fills it in deterministic mode.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final

import torch

# Created once to save host time per tile.
CURRENT_STREAM: Final[AbstractContextManager[object]] = nullcontext()


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns the second stream of a GPU; None for a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
