"""Short causal convolutions over a sequence that ranks share.

Shape suffixes: B batch, S local sequence, F fragments, C channels, W taps.
"""

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from lightseq.kernels.convolution import convolve
from lightseq.schedule.layout import Layout
from lightseq.sequence.documents import Documents, without_repeats
from lightseq.sequence.group import SequenceGroup, find_group
from lightseq.sequence.halo import tokens_before
from lightseq.utils.tensors import upload

ACTIVATIONS: Final = (None, "silu", "swish")  # two names of one function


def causal_convolution(
    group: SequenceGroup,
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    documents: Documents | None = None,
    activation: str | None = None,
) -> Tensor:
    """Returns a causal depthwise convolution (B, S, C) of this rank's part of a sequence.

    Tap W - 1 reads the token itself. Tokens before the start of the sequence, or of a document, are zeros. Every rank
    of the group must call it, forward and backward. Products are summed in float32 or wider. `activation` is one of
    `ACTIVATIONS`, applied to the sums.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; use None, silu or swish, and apply others to the result")
    before_BFWC = tokens_before(group, x_BSC, weight_CW.shape[1] - 1, documents)
    inside_S = None if documents is None else _tokens_inside(x_BSC, group.name, documents.boundaries)
    return convolve(x_BSC, before_BFWC, weight_CW, bias_C, inside_S, activation is not None)


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
