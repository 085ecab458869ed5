"""Tensors of the host, changed on the GPU a piece at a time: one piece arrives, one is computed, one leaves.

Those that are on the GPU anyway go the same way, at the rate of its memory.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

IN_FLIGHT = 3  # pieces: one arrives, one is computed, one leaves


@dataclass(frozen=True)
class Piece:
    """Flat parts of host tensors that change together; the first `changed` of them go back.

    `change` gets a buffer on the device for each, of `sizes` elements and with the host's values first. Pieces of the
    same sizes are the same shapes to it, so that it compiles once; what lies behind the values is anything.
    """

    host: tuple[Tensor, ...]
    changed: int
    sizes: tuple[int, ...]
    change: Callable[[Sequence[Tensor]], None]

    @property
    def kind(self) -> tuple[tuple[torch.dtype, int], ...]:
        return tuple((x.dtype, size) for x, size in zip(self.host, self.sizes, strict=True))


class _Slot:
    """Buffers on the device for a piece of one kind."""

    def __init__(self, piece: Piece, device: torch.device) -> None:
        self.buffers = [torch.empty(size, dtype=dtype, device=device) for dtype, size in piece.kind]
        self.left: torch.cuda.Event | None = None  # when the piece that was here last is on the host again


def update_pieces(device: torch.device, pieces: Sequence[Piece]) -> None:
    """Changes every piece on the device, and returns once the host has the results.

    Copies run beside the computing where the host's memory is page-locked. On CPU the same happens one after another.
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
    """The order between what arrives, what the current stream computes and what leaves; on CPU there is but one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on = device, has_streams(device)
        if self._on:
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._computing = torch.cuda.current_stream(device)
            self._in.wait_stream(self._computing)  # whose memory the buffers were

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
