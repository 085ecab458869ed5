"""Memory of sharded gradients, taken from the pool of the stream that computes.

torch reuses freed memory only on the stream that allocated it. FSDP2 allocates the sharded gradients on the stream that
reduces them. Near the limit of a GPU, the pools of both streams together do not fit, so torch would free and allocate
device memory in every step, and wait for the GPU each time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter


class ReduceScatterIntoSharedPool(DefaultReduceScatter):
    """Reduce-scatter that takes its memory from the default stream's pool, as activations do."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates a tensor that the current stream uses, in memory of the default stream.

        The current stream must have waited for the default stream, as FSDP2's does. The memory is not reused before
        the current stream is done with it: with gradient accumulation, FSDP2 adds and frees gradients there.
        """
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            out: Any = torch.empty(*size, dtype=dtype, device=device)
        out.record_stream(torch.cuda.current_stream(device))
        return out
