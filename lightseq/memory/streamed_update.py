"""Pipelined update of host tensors on the GPU: one piece is copied in, one is computed, one is copied out.

Tensors on the GPU take the same path at the speed of GPU memory.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

IN_FLIGHT = 3  # pieces on the GPU: one copied in, one computed, one copied out


@dataclass(frozen=True)
class Piece:
    """Flat parts of host tensors that are updated together; the first `changed` of them are copied back.

    `change` receives one device buffer of `sizes` elements per part. A buffer begins with the host's values; the rest
    is undefined. Buffers of one size have one shape, so `change` compiles once.
    """

    host: tuple[Tensor, ...]
    changed: int
    sizes: tuple[int, ...]
    change: Callable[[Sequence[Tensor]], None]

    @property
    def kind(self) -> tuple[tuple[torch.dtype, int], ...]:
        return tuple((x.dtype, size) for x, size in zip(self.host, self.sizes, strict=True))


class _Slot:
    """Device buffers for a piece of one kind."""

    def __init__(self, piece: Piece, device: torch.device) -> None:
        self.buffers = [torch.empty(size, dtype=dtype, device=device) for dtype, size in piece.kind]
        self.left: torch.cuda.Event | None = None  # recorded after the last piece in this slot is copied out


def update_pieces(device: torch.device, pieces: Sequence[Piece]) -> None:
    """Updates every piece on the device, and returns when the results are on the host.

    Copies overlap the computation if the host memory is page-locked. On CPU, pieces run one after another.
    """
    kinds = {piece.kind: piece for piece in pieces}
    slots = {kind: [_Slot(piece, device) for _ in range(IN_FLIGHT)] for kind, piece in kinds.items()}
    streams = _Streams(device)
    for number, piece in enumerate(pieces):
        slot = slots[piece.kind][number % IN_FLIGHT]
        parts = [buffer[: len(x)] for buffer, x in zip(slot.buffers, piece.host, strict=True)]
        with streams.arriving(slot.left):
            for part, x in zip(parts, piece.host, strict=True):
                part.copy_(x, non_blocking=True)
        streams.arrived()
        piece.change(slot.buffers)
        with streams.leaving():
            for x, part in zip(piece.host[: piece.changed], parts, strict=False):
                x.copy_(part, non_blocking=True)
        slot.left = streams.left()
    streams.finish()


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


class _Streams:
    """Ordering of incoming copies, computation and outgoing copies. On CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on = device, has_streams(device)
        if self._on:
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._computing = torch.cuda.current_stream(device)
            self._in.wait_stream(self._computing)  # it may still use the buffers' memory

    def arriving(self, left: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if not self._on:
            return nullcontext()
        if left is not None:
            self._in.wait_event(left)
        return torch.cuda.stream(self._in)

    def arrived(self) -> None:
        if self._on:
            self._computing.wait_stream(self._in)

    def leaving(self) -> AbstractContextManager[object]:
        if not self._on:
            return nullcontext()
        self._out.wait_stream(self._computing)
        return torch.cuda.stream(self._out)

    def left(self) -> torch.cuda.Event | None:
        return self._out.record_event() if self._on else None

    def finish(self) -> None:
        if self._on:
            torch.cuda.synchronize(self._device)
