"""Short causal convolutions over a row of trees that ranks share: taps read the path to a token, not its neighbours.

Pieces are convolved as if nothing lay before them. Then the first tokens of each piece that has tokens before it on its
path, W - 1 at most, are computed again from those, which may be on other ranks and in several short nodes.

Shape suffixes: B batch, S local sequence, N tokens computed again, C channels, W taps.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from lightseq.kernels.fragment_convolution import convolve, convolve_backward
from lightseq.recurrent.operators import register_convolution
from lightseq.schedule.layout import Layout
from lightseq.schedule.nodes import Nodes
from lightseq.sequence.group import SequenceGroup, find_group
from lightseq.sequence.halo import MAX_PLANS, LookBack, look_back, positions_before, tokens_inside_piece
from lightseq.utils.tensors import upload


@dataclass(frozen=True, eq=False)
class TreeTaps:
    """Tokens of one rank that taps read, which are on the device."""

    fragments: int
    inside_S: Tensor  # tokens of its piece before each token, int32
    again_N: Tensor  # local tokens that are recomputed with the taps of their path
    paths: LookBack  # places of the taps' tokens


def _taps_for(group: SequenceGroup, x: Tensor, taps: int, nodes: Tensor) -> TreeTaps:
    layout, found = group.layout_and_nodes(x.shape[1], nodes)
    return tree_taps(layout, group.rank, found, taps, x.device)


@lru_cache(maxsize=MAX_PLANS)  # serves all layers, forward and backward
def tree_taps(layout: Layout, rank: int, nodes: Nodes, taps: int, device: torch.device) -> TreeTaps:
    """Makes the plan of one rank for a row of trees in a layout."""
    mine = layout.positions(rank, nodes.length)
    inside = tokens_inside_piece(layout, mine, nodes)
    before = positions_before(mine, taps - 1, nodes)
    again = ((before >= 0).sum(1) > inside.clamp_max(taps - 1)).nonzero().flatten()
    slots = torch.cat([before[again], mine[again, None]], 1)
    paths = look_back(layout, rank, nodes, taps - 1, slots, device)
    fragments = layout.fragments_per_rank(len(mine))
    return TreeTaps(fragments, upload(inside.int(), device), upload(again, device), paths)


def _convolve_paths(taken_BNWC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, silu: bool) -> Tensor:
    """Returns the convolution (B, N, C) of gathered tokens, summed in float32 or wider."""
    wide = torch.promote_types(taken_BNWC.dtype, torch.float32)
    out = (taken_BNWC.to(wide) * weight_CW.T.to(wide)).sum(2)
    if bias_C is not None:
        out = out + bias_C.to(wide)
    out = out.to(taken_BNWC.dtype)
    return F.silu(out) if silu else out


def _nothing_before(x_BSC: Tensor, fragments: int, taps: int) -> Tensor:
    return x_BSC.new_zeros(len(x_BSC), fragments, taps - 1, x_BSC.shape[2])


@torch.library.custom_op("lightseq::tree_convolution", mutates_args=())
def tree_convolution(
    x_BSC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, nodes: Tensor, group_name: str, silu: bool
) -> Tensor:
    """Returns the convolution (B, S, C) as `causal_convolution` does, for the trees of a `node_tensor`."""
    group, taps = find_group(group_name), weight_CW.shape[1]
    plan = _taps_for(group, x_BSC, taps, nodes)
    before = _nothing_before(x_BSC, plan.fragments, taps)
    out = convolve(x_BSC, before, weight_CW, bias_C, plan.inside_S, silu)
    taken = plan.paths.gather(x_BSC, taps, group)
    return out.index_copy_(1, plan.again_N, _convolve_paths(taken, weight_CW, bias_C, silu))


@torch.library.custom_op("lightseq::tree_convolution_backward", mutates_args=())
def _tree_convolution_backward(
    dout_BSC: Tensor,
    x_BSC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    nodes: Tensor,
    group_name: str,
    silu: bool,
) -> list[Tensor]:
    """Returns the gradients of x, weight and, if given, bias. Adds what other ranks contribute to x."""
    group, taps = find_group(group_name), weight_CW.shape[1]
    plan = _taps_for(group, x_BSC, taps, nodes)
    dagain = dout_BSC.index_select(1, plan.again_N)
    dout_BSC = dout_BSC.index_fill(1, plan.again_N, 0)
    before = _nothing_before(x_BSC, plan.fragments, taps)
    dx_BSC, _, *gradients = convolve_backward(dout_BSC, x_BSC, before, weight_CW, bias_C, plan.inside_S, silu)

    parameters = (weight_CW,) if bias_C is None else (weight_CW, bias_C)

    def again(taken: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _convolve_paths(taken, weight, bias, silu)

    taken = plan.paths.gather(x_BSC, taps, group)
    dtaken, *more = torch.func.vjp(again, taken, *parameters)[1](dagain)
    plan.paths.add_gradient(dx_BSC, dtaken, group)
    return [dx_BSC, *(a + b for a, b in zip(gradients, more, strict=True))]


register_convolution(tree_convolution, _tree_convolution_backward)
