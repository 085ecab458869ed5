"""Other implementations of distributed attention, measured next to lightseq's.

A peer that cannot run raises an error, and its message becomes the reason in the record. To add a peer, write a context
manager that yields a `Layer` and add it to `PEERS`. Names load without torch, so that --help answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.measure import Case, Layer

    Peer = Callable[[Case], AbstractContextManager[Layer]]


def _peer(module: str, function: str = "layer", /, **settings: Any) -> Peer:
    """Returns a peer whose module is imported when it is set up."""

    def set_up(case: Case) -> AbstractContextManager[Layer]:
        found: Peer = getattr(import_module(f"{__name__}.{module}"), function)
        return found(case, **settings)

    return set_up


PEERS: dict[str, Peer] = {
    **{f"ulysses-{kernel}": _peer("ulysses", inner=kernel) for kernel in ("fa4", "sdpa")},
    **{
        f"torch-cp-{rotation}-cudnn": _peer("torch_context_parallel", rotation=rotation)
        for rotation in ("allgather", "alltoall")
    },
}
WINDOWED_PEERS = ("ulysses-fa4",)  # which take --window
VARLEN = "ring-flash-attn-varlen"
PACKED_PEERS: dict[str, Peer] = {
    f"{VARLEN}-ring": _peer("ring_flash_attn", function="ring_flash_attn_varlen_func", pieces=1),
    f"{VARLEN}-zigzag": _peer("ring_flash_attn", function="zigzag_ring_flash_attn_varlen_func", pieces=2),
    # llama3 gathers one key/value head at a time, llama3-all all of them.
    f"{VARLEN}-llama3": _peer("ring_flash_attn", "llama3_layer", all_heads=False),
    f"{VARLEN}-llama3-all": _peer("ring_flash_attn", "llama3_layer", all_heads=True),
}
