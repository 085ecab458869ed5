"""Additions to FSDP2: prefetch of offloaded weights, gradients in the pool of activations, passes without gradients."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter


class WeightPrefetch:
    """Hooks that prefetch offloaded weights one unit ahead, for runs in which weights are not sharded.

    FSDP2 overlaps all-gathers with the previous unit's computation. Without sharding it copies weights when their unit
    begins, and the device idles. The hooks start the copy of the next unit on a side stream when a unit begins its
    forward or backward pass. Two units' weights are on the device at a time, as with all-gathers. `units` are lists of
    adjacent layers, each passed to one `fully_shard`, in model order.
    """

    def __init__(self, units: Sequence[Sequence[nn.Module]], device_type: str) -> None:
        self._units = units
        self._side_stream = torch.cuda.Stream() if device_type == "cuda" else None
        # Events by unit; the device waits for a unit's event before it computes the unit.
        self._unshard_events: dict[int, torch.cuda.Event] = {}
        for index, unit in enumerate(units):  # hooks run in order of registration, so FSDP2's own come first
            unit[0].register_forward_pre_hook(partial(self._before_forward, index))
            unit[-1].register_forward_hook(partial(self._after_forward, index))

    def _before_forward(self, index: int, *_: Any) -> None:
        self._begin(index, index + 1)

    def _after_forward(self, index: int, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self._before_backward, index))

    def _before_backward(self, index: int, _gradient: Tensor) -> None:
        self._begin(index, index - 1)

    def _begin(self, index: int, following: int) -> None:
        came = self._unshard_events.pop(index, None)
        if came is not None:
            torch.cuda.current_stream().wait_event(came)
        if 0 <= following < len(self._units):
            self._start_unshard(following)

    def _start_unshard(self, index: int) -> None:
        unit = self._units[index][0]
        assert isinstance(unit, FSDPModule)
        if self._side_stream is None:
            unit.unshard()
            return
        # The copy may reuse memory of another unit's weights that the compute stream still reads.
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            unit.unshard()
            self._unshard_events[index] = self._side_stream.record_event()


class ReduceScatterIntoSharedPool(DefaultReduceScatter):
    """Reduce-scatter that takes its memory from the default stream's pool, as activations do.

    torch reuses freed memory only on the stream that allocated it, and FSDP2 allocates sharded gradients on the stream
    that reduces them. Near the limit of a GPU, the pools of both streams do not fit together, so torch would free and
    allocate device memory in every step, and wait for the GPU each time.
    """

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


def forget_forward_passes(root: Any) -> None:
    """Clears FSDP2's record of forward passes, for a model that never runs backward.

    FSDP2 records the order of units, to prefetch them in the backward pass. Without a backward pass the record grows.
    """

    def forget(*_: Any) -> None:
        order = root._get_fsdp_state()._comm_ctx.post_forward_order
        for group in order:
            group._post_forward_indices.clear()
        order.clear()

    root.register_forward_hook(forget)
