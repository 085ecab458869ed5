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
    """Flat parts of host tensors that are updated together; the first `updated_count` of them are copied back.

    `update` receives one device buffer of `sizes` elements per part. A buffer begins with the host's values; the rest
    is undefined. Buffers of one size have one shape, so `update` compiles once.
    """

    host: tuple[Tensor, ...]
    updated_count: int
    sizes: tuple[int, ...]
    update: Callable[[Sequence[Tensor]], None]

    @property
    def kind(self) -> tuple[tuple[torch.dtype, int], ...]:
        return tuple((x.dtype, size) for x, size in zip(self.host, self.sizes, strict=True))


class _Slot:
    """Device buffers for one piece: its tensors' dtypes and sizes are the piece's `kind`."""

    def __init__(self, piece: Piece, device: torch.device) -> None:
        self.buffers = [torch.empty(size, dtype=dtype, device=device) for dtype, size in piece.kind]
        self.copied_out: torch.cuda.Event | None = None  # recorded after the last piece in this slot is copied out


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
        with streams.copy_in(slot.copied_out):
            for part, x in zip(parts, piece.host, strict=True):
                part.copy_(x, non_blocking=True)
        streams.wait_for_copy_in()
        piece.update(slot.buffers)
        with streams.copy_out():
            for x, part in zip(piece.host[: piece.updated_count], parts, strict=False):
                x.copy_(part, non_blocking=True)
        slot.copied_out = streams.record_copy_out()
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

    def copy_in(self, copied_out: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if not self._on:
            return nullcontext()
        if copied_out is not None:
            self._in.wait_event(copied_out)
        return torch.cuda.stream(self._in)

    def wait_for_copy_in(self) -> None:
        if self._on:
            self._computing.wait_stream(self._in)

    def copy_out(self) -> AbstractContextManager[object]:
        if not self._on:
            return nullcontext()
        self._out.wait_stream(self._computing)
        return torch.cuda.stream(self._out)

    def record_copy_out(self) -> torch.cuda.Event | None:
        return self._out.record_event() if self._on else None

    def finish(self) -> None:
        if self._on:
            torch.cuda.synchronize(self._device)
