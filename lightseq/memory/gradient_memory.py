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
        """Allocates a tensor for the current stream in memory of the default stream, and orders the uses of both.

        The current stream waits for what the default stream has begun, as FSDP2's has before: in deterministic mode
        torch fills new tensors. The memory is not reused before the current stream is done with it: with gradient
        accumulation, FSDP2 adds and frees gradients there.
        """
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        with torch.cuda.stream(default):
            out: Any = torch.empty(*size, dtype=dtype, device=device)
        if current != default:
            current.wait_stream(default)
            out.record_stream(current)
        return out
