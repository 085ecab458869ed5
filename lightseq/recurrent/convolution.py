"""Short causal convolutions over a sequence that ranks share.

Shape suffixes: B batch, S local sequence, F fragments, L tokens of a fragment, C channels, W taps.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from lightseq.schedule.layout import Layout
from lightseq.sequence.documents import Documents, without_repeats
from lightseq.sequence.group import SequenceGroup, find_group
from lightseq.sequence.halo import tokens_before
from lightseq.utils.tensors import upload


def causal_convolution(
    group: SequenceGroup, x_BSC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, documents: Documents | None = None
) -> Tensor:
    """Returns a causal depthwise convolution (B, S, C) of this rank's part of a sequence.

    Tap W - 1 reads the token itself. Tokens before the start of the sequence, or of a document, are zeros. Every rank
    of the group must call it, forward and backward. Products are summed in float32 or wider.
    """
    taps = weight_CW.shape[1]
    before_BFWC = tokens_before(group, x_BSC, taps - 1, documents)
    fragments = before_BFWC.shape[1]
    x_BFLC = torch.cat([before_BFWC, x_BSC.unflatten(1, (fragments, -1))], 2)
    tokens = x_BSC.shape[1] // fragments
    if documents is None and x_BSC.device.type != "cuda":
        columns = x_BFLC.flatten(0, 1).transpose(1, 2).to(weight_CW.dtype)
        out = F.conv1d(columns, weight_CW.unsqueeze(1), bias_C, groups=weight_CW.shape[0])
        return out.transpose(1, 2).reshape(x_BSC.shape).to(x_BSC.dtype)
    wide = torch.promote_types(x_BSC.dtype, torch.float32)
    inside_FL = None
    if documents is not None:
        inside_FL = _tokens_inside(x_BSC, group.name, documents.boundaries).unflatten(0, (fragments, -1))
    total = None
    for tap in range(taps):
        part = x_BFLC[:, :, tap : tap + tokens].to(wide) * weight_CW[:, tap].to(wide)
        if inside_FL is not None and tap < taps - 1:
            part = part * (inside_FL >= taps - 1 - tap)[..., None]
        total = part if total is None else total + part
    assert total is not None
    if bias_C is not None:
        total = total + bias_C.to(wide)
    return total.flatten(1, 2).to(x_BSC.dtype)


@torch.library.custom_op("lightseq::tokens_inside", mutates_args=())
def _tokens_inside(x_BSC: Tensor, group_name: str, boundaries: Tensor) -> Tensor:
    """Returns how many tokens of its document lie before each of this rank's tokens (S,)."""
    group, edges = find_group(group_name), without_repeats(boundaries)
    return _positions(group.packed_layout(edges), group.rank, edges, x_BSC.device).clone()


@_tokens_inside.register_fake
def _(x_BSC: Tensor, group_name: str, boundaries: Tensor) -> Tensor:
    return x_BSC.new_empty(x_BSC.shape[1], dtype=torch.int32)


@lru_cache(maxsize=16)  # serves all layers of a batch
def _positions(layout: Layout, rank: int, boundaries: tuple[int, ...], device: torch.device) -> Tensor:
    edges, tokens = torch.tensor(boundaries), layout.positions(rank, boundaries[-1])
    return upload((tokens - edges[torch.searchsorted(edges, tokens, right=True) - 1]).int(), device)
