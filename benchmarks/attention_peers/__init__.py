"""Other implementations of distributed attention, measured next to lightseq's.

A peer that cannot run raises an error, and its message becomes the reason in the record. To add a peer, write a context
manager that yields a `Layer` and add it to `PEERS`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from benchmarks.attention_peers import ring_flash_attn, ringmaster, torch_context_parallel, ulysses, ulysses_flex
from benchmarks.measure import Case, Layer

Peer = Callable[[Case], AbstractContextManager[Layer]]

PEERS: dict[str, Peer] = {
    **{f"ulysses-{kernel}": partial(ulysses.layer, inner=kernel) for kernel in ("fa4", "cudnn", "sdpa")},
    "ulysses-flex": ulysses_flex.layer,
    **{
        f"torch-cp-{rotation}-{backend}": partial(torch_context_parallel.layer, rotation=rotation, backend=backend)
        for rotation in ("allgather", "alltoall")
        for backend in ("cudnn", "flash")
    },
    "ring-flash-attn-ring": partial(ring_flash_attn.layer, function="ring_flash_attn_func", layout="contiguous"),
    "ring-flash-attn-zigzag": partial(ring_flash_attn.layer, function="zigzag_ring_flash_attn_func", layout="zigzag"),
    "ring-flash-attn-stripe": partial(ring_flash_attn.layer, function="stripe_flash_attn_func", layout="striped"),
    "ringmaster-zigzag": partial(ringmaster.layer, module="zigzag", layout="zigzag"),
    "ringmaster-distflash": partial(ringmaster.layer, module="distflash", layout="contiguous"),
}
VARLEN = "ring-flash-attn-varlen"
PACKED_PEERS: dict[str, Peer] = {
    f"{VARLEN}-ring": partial(ring_flash_attn.varlen_layer, function="ring_flash_attn_varlen_func", pieces=1),
    f"{VARLEN}-zigzag": partial(ring_flash_attn.varlen_layer, function="zigzag_ring_flash_attn_varlen_func", pieces=2),
    f"{VARLEN}-llama3": partial(ring_flash_attn.llama3_varlen_layer, all_heads=False),  # one key/value head at a time
    f"{VARLEN}-llama3-all": partial(ring_flash_attn.llama3_varlen_layer, all_heads=True),
}
