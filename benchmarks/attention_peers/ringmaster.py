"""https://github.com/axolotl-ai-cloud/ringmaster (package axolotl-ringmaster) with FlashAttention-2."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

from benchmarks.attention_peers import flash_attn_stand_in as stand_in
from benchmarks.measure import Case, Layer

FUNCTIONS = {"zigzag": "zigzag_ring_attention", "distflash": "distflash_attention"}


@contextmanager
def layer(case: Case, module: str, layout: str) -> Iterator[Layer]:
    ring = importlib.import_module(f"ringmaster.ring.{module}")
    case.needs_cuda("ringmaster's flash attention")
    # It asks transformers for the flash-attn package; without it, the stand-in supplies the same kernels.
    ops = stand_in._flash_attn_forward, stand_in._flash_attn_backward
    attend = getattr(ring, FUNCTIONS[module])
    with mock.patch.object(ring, "_flash_ops", lambda *_: ops) if stand_in.is_needed() else nullcontext():
        yield Layer(
            attend=lambda q, k, v: attend(q, k, v, group=case.group, scaling=None).transpose(1, 2),
            positions=case.positions(layout),
            ranks=case.world,
            facts={"kernel": stand_in.kernel(), "transport": "nccl"},
            heads_first=True,
        )
