"""A linear recurrence for which ranks exchange tokens for heads, as DeepSpeed-Ulysses does for attention.

An all-to-all gives each rank all tokens of some heads, in the order of the sequence. A kernel runs once over the whole
documents, and another all-to-all returns the outputs. The backward pass exchanges the inputs again instead of saving
them. Messages grow with the length, and every layout will do.

Shape suffixes: W ranks, T tokens of the whole sequence, N heads of one rank; others as in kernels/recurrent/base.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.kernels.recurrent.base import ScanInputs
from lightseq.kernels.recurrent.scan_kernel_choice import select_kernel
from lightseq.recurrent.fragments import MAX_PLANS
from lightseq.recurrent.operators import scan_operator
from lightseq.recurrent.tree_plan import TreePlan, tree_plan
from lightseq.recurrent.tree_scan import tree_gradients, tree_outputs
from lightseq.schedule.layout import Layout
from lightseq.sequence.group import SequenceGroup
from lightseq.utils.tensors import upload

WHOLE: Final = Layout("contiguous", 1)  # a rank then has all tokens of some heads
ALIGNMENT: Final = 16  # bytes, of each tensor's part of a message, so that copies move many bytes at a time


# ---- exchange --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """All-to-alls between the ranks of a sequence. Tensors of all dtypes travel in one message to each rank."""

    group: SequenceGroup
    order_T: Tensor | None  # on the device: each token's row among the tokens of rank 0, 1, ...; None: the same
    edges: tuple[int, ...]  # where documents begin, and the end
    trees: TreePlan | None  # pieces of the whole row, whose states stay on each rank

    @property
    def world(self) -> int:
        return self.group.layout.world

    def heads_for_tokens(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Exchanges this rank's tokens of all heads (B, S, W x N, ...) for all tokens of its heads (B, T, N, ...).

        Returned tokens are in the order of the sequence.
        """
        if self.world == 1:
            return list(parts)
        by_rank = [part.unflatten(2, (self.world, -1)) for part in parts]  # (B, S, W, N, ...)
        likes = [part[:, 0, 0] for part in by_rank]
        message = self._new_message(likes, parts[0].shape[1])
        for column, part in zip(_columns(message, likes), by_rank, strict=True):
            column.copy_(part.movedim((2, 1), (0, 1)))
        return [self._in_order(column.flatten(0, 1)) for column in _columns(self._all_to_all(message), likes)]

    def tokens_for_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Exchanges all tokens of this rank's heads (B, T, N, ...) for its tokens of all heads (B, S, W x N, ...).

        Inverse of `heads_for_tokens`.
        """
        if self.world == 1:
            return list(parts)
        likes = [part[:, 0] for part in parts]
        message = self._new_message(likes, parts[0].shape[1] // self.world)
        for column, part in zip(_columns(message, likes), parts, strict=True):
            rows = column.flatten(0, 1)  # (T, B, N, ...)
            if self.order_T is None:
                rows.copy_(part.transpose(0, 1))
            else:
                rows.index_copy_(0, self.order_T, part.transpose(0, 1))
        received = _columns(self._all_to_all(message), likes)
        return [column.movedim((0, 1), (2, 1)).flatten(2, 3).contiguous() for column in received]

    def _in_order(self, rows: Tensor) -> Tensor:
        """Returns all ranks' tokens (T, B, N, ...) in the order of the sequence: (B, T, N, ...)."""
        rows = rows if self.order_T is None else rows.index_select(0, self.order_T)
        return rows.transpose(0, 1).contiguous()

    def _new_message(self, likes: Sequence[Tensor], tokens: int) -> Tensor:
        size = sum(map(_padded_bytes, likes))
        return torch.empty(self.world, tokens, size, dtype=torch.uint8, device=likes[0].device)

    def _all_to_all(self, message: Tensor) -> Tensor:
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=self.group.process_group)
        return received


def _padded_bytes(like: Tensor) -> int:
    return -(-like.numel() * like.itemsize // ALIGNMENT) * ALIGNMENT


def _columns(message: Tensor, likes: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields each tensor's part of a message (W, S, bytes) as (W, S, B, N, ...); `likes` are (B, N, ...)."""
    first = 0
    for like in likes:
        column = message[..., first : first + like.numel() * like.itemsize].view(like.dtype)
        yield column.unflatten(-1, like.shape)
        first += _padded_bytes(like)


def _exchange_for(group: SequenceGroup, local: int, boundaries: Tensor | None, device: torch.device) -> HeadExchange:
    layout, nodes = group.layout_and_nodes(local, boundaries)
    trees = None if nodes.parents is None else tree_plan(WHOLE, 0, nodes, device)
    return HeadExchange(group, _order(layout, nodes.length, device), nodes.boundaries, trees)


@lru_cache(maxsize=MAX_PLANS)  # serves all layers, forward and backward
def _order(layout: Layout, length: int, device: torch.device) -> Tensor | None:
    order = torch.cat([layout.positions(rank, length) for rank in range(layout.world)]).argsort()
    return None if bool((order.diff() == 1).all()) else upload(order, device)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Repeats the heads of queries or keys until there are `heads`."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def _gather_up(gradient: Tensor, groups: int) -> Tensor:
    """Sums the gradients of repeated heads in float32 or wider: the backward pass of `_spread`."""
    if gradient.shape[2] == groups:
        return gradient
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.unflatten(2, (groups, -1)).sum(3, dtype=wide).to(gradient.dtype)


# ---- operator --------------------------------------------------------------------------------------------------------


def _compute(x: ScanInputs, scale: float, group: SequenceGroup, boundaries: Tensor | None) -> tuple[Tensor]:
    group.check_documents(boundaries)
    exchange = _exchange_for(group, x.v.shape[1], boundaries, x.v.device)
    x = ScanInputs(*exchange.heads_for_tokens(_to_exchange(x, exchange.world)))
    if exchange.trees is not None:
        out = tree_outputs(x, scale, exchange.trees, group)
    else:
        out = select_kernel(x).forward(x, scale, exchange.edges).run(None)
    return (exchange.tokens_for_heads([out])[0],)


def _to_exchange(x: ScanInputs, world: int) -> list[Tensor]:
    """Returns the given inputs, with query and key heads that divide by the ranks."""
    q, k, *others = (part for part in x if part is not None)
    heads = lcm(q.shape[2], world)  # divides the value heads
    return [_spread(q, heads), _spread(k, heads), *others]


def _gradients(
    dout: Tensor, x: ScanInputs, _saved: Sequence[Tensor], scale: float, group: SequenceGroup, boundaries: Tensor | None
) -> list[Tensor]:
    exchange, groups = _exchange_for(group, dout.shape[1], boundaries, dout.device), x.q.shape[2]
    *parts, dout = exchange.heads_for_tokens([*_to_exchange(x, exchange.world), dout])
    x = ScanInputs(*parts)
    if exchange.trees is not None:
        found = tree_gradients(x, scale, exchange.trees, group, dout)
    else:
        every = select_kernel(x).backward(x, scale, exchange.edges, None, dout).run(None)
        found = [gradient for gradient in every if gradient is not None]
        del every
    del x, parts, dout
    dq, dk, *others = exchange.tokens_for_heads(found)
    return [_gather_up(dq, groups), _gather_up(dk, groups), *others]


scan_heads = scan_operator("scan_heads", _compute, _gradients)  # value heads must divide by the ranks
SCAN_HEADS_OP = torch.ops.lightseq.scan_heads.default  # for checkpointing policies
