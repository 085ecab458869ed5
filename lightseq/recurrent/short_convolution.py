"""Short causal convolutions over a sequence that ranks share.

Shape suffixes: B batch, S local sequence, F fragments, C channels, W taps.
"""

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from lightseq.kernels.fragment_convolution import convolve, convolve_backward
from lightseq.recurrent.operators import register_convolution
from lightseq.recurrent.tree_convolution import tree_convolution
from lightseq.schedule.layout import Layout
from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup, find_group
from lightseq.sequence.halo import add_gradient, tokens_before
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

    Tap W - 1 reads the token itself. Tokens before the start of the sequence, or of a document, are zeros, and in a
    row of trees taps read the path to a token. Every rank of the group must call it, forward and backward. Products
    are summed in float32 or wider. `activation` is one of `ACTIVATIONS`, applied to the sums.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; use None, silu or swish, and apply others to the result")
    if documents is not None and documents.are_trees:
        return tree_convolution(x_BSC, weight_CW, bias_C, documents.boundaries, group.name, activation is not None)
    boundaries = None if documents is None else documents.boundaries
    # Its gradient goes back to the tokens' ranks in the operator's backward pass.
    before_BFWC = tokens_before(group, x_BSC.detach(), weight_CW.shape[1] - 1, documents)
    return _convolution(x_BSC, before_BFWC, weight_CW, bias_C, boundaries, group.name, activation is not None)


@torch.library.custom_op("lightseq::convolution", mutates_args=())
def _convolution(
    x_BSC: Tensor,
    before_BFWC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    boundaries: Tensor | None,
    group_name: str,
    silu: bool,
) -> Tensor:
    """Returns the convolution (B, S, C) of a rank's fragments with the tokens before them."""
    inside_S = _tokens_inside(x_BSC, find_group(group_name), boundaries)
    return convolve(x_BSC, before_BFWC, weight_CW, bias_C, inside_S, silu)


@torch.library.custom_op("lightseq::convolution_backward", mutates_args=())
def _convolution_backward(
    dout_BSC: Tensor,
    x_BSC: Tensor,
    before_BFWC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    boundaries: Tensor | None,
    group_name: str,
    silu: bool,
) -> list[Tensor]:
    """Returns the gradients of x, weight and, if given, bias. Adds what other fragments contribute to x."""
    group = find_group(group_name)
    inside_S = _tokens_inside(x_BSC, group, boundaries)
    dx_BSC, dbefore_BFWC, *gradients = convolve_backward(
        dout_BSC, x_BSC, before_BFWC, weight_CW, bias_C, inside_S, silu
    )
    add_gradient(dx_BSC, dbefore_BFWC, group, boundaries)
    return [dx_BSC, *gradients]


register_convolution(_convolution, _convolution_backward)


def _tokens_inside(x_BSC: Tensor, group: SequenceGroup, boundaries: Tensor | None) -> Tensor | None:
    """Returns how many tokens of its document lie before each of this rank's tokens (S,); None without documents."""
    if boundaries is None:
        return None
    layout, nodes = group.layout_and_nodes(x_BSC.shape[1], boundaries)
    return _positions(layout, group.rank, nodes.boundaries, x_BSC.device)


@lru_cache(maxsize=16)  # serves all layers of a batch
def _positions(layout: Layout, rank: int, boundaries: tuple[int, ...], device: torch.device) -> Tensor:
    edges, tokens = torch.tensor(boundaries), layout.positions(rank, boundaries[-1])
    return upload((tokens - edges[torch.searchsorted(edges, tokens, right=True) - 1]).int(), device)
