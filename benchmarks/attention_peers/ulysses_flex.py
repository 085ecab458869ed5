"""Ulysses around FlexAttention, as torchtitan does it: all-to-all of heads, and torch's compiled kernel between."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.attention_peers.ulysses import AllToAll, check_heads
from benchmarks.measure import Case, Layer


@contextmanager
def layer(case: Case) -> Iterator[Layer]:
    check_heads(case)
    case.needs_cuda("FlexAttention's backward pass")
    positions = case.positions("contiguous")
    length = len(positions) * case.world
    # Compiled, because otherwise all pairs of tokens would be in memory.
    mask = torch.compile(create_block_mask, dynamic=False)(causal, None, None, length, length, device=case.device)
    kernel = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")
    yield Layer(
        attend=partial(attend, case, kernel, mask),
        positions=positions,
        ranks=case.world,
        facts={"kernel": "flex", "transport": "nccl"},
    )


def attend(case: Case, kernel: Callable[..., Tensor], mask: BlockMask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (AllToAll.apply(x, case.group, True).transpose(1, 2) for x in (q, k, v))
    out = kernel(q, k, v, block_mask=mask, enable_gqa=case.heads != case.kv_heads)
    return AllToAll.apply(out.transpose(1, 2), case.group, False)


def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
