"""Tokens before a rank's own, for layers that look a few tokens back, such as short convolutions.

A rank holds its part of a sequence in fragments, runs of neighbouring tokens: the chunks of the layout. The tokens
before a fragment are mostly on another rank. Which rows travel where follows from the layout, on every rank alike.

Shape suffixes: B batch, S local sequence, F fragments, C count; further dims are left as they are.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.schedule.layout import Layout
from lightseq.schedule.nodes import ROOT, Nodes
from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup, find_group
from lightseq.utils.checkpoint_context import reuse_or_compute
from lightseq.utils.tensors import upload

MAX_PLANS = 16  # cached; each keeps index tensors on the device, and packed sequences rarely repeat


def tokens_before(group: SequenceGroup, x_BS: Tensor, count: int, documents: Documents | None = None) -> Tensor:
    """Returns the `count` tokens directly before each of this rank's fragments: (B, F, C, ...).

    x is this rank's part (B, S, ...) of a sequence in the group's layout, or in the documents' layout. Tokens before
    the start of the sequence, or of the document in which a fragment starts, are zeros. Every rank of the
    group must call it, forward and backward. Raises ValueError for a part that does not fit the layout, and for trees.
    """
    _check(group, x_BS, count, documents)
    if documents is not None and documents.are_trees:
        raise ValueError(
            "in a row of trees nodes begin inside fragments, too; use previous_tokens or causal_convolution"
        )
    layout = group.layout if documents is None else documents.layout
    return _tokens_before(x_BS, group.name, _boundaries(documents), count, layout.fragments_per_rank(x_BS.shape[1]))


def previous_tokens(group: SequenceGroup, x_BS: Tensor, count: int, documents: Documents | None = None) -> Tensor:
    """Returns the `count` tokens before each of this rank's tokens, without the token itself: (B, S, C, ...).

    Like `tokens_before`, with every token as a fragment of its own, and in a row of trees those of its path. The
    result takes `count` times the memory of x.
    """
    _check(group, x_BS, count, documents)
    return _previous_tokens(x_BS, group.name, _boundaries(documents), count, x_BS.shape[1])


def _check(group: SequenceGroup, x: Tensor, count: int, documents: Documents | None) -> None:
    if count < 0:
        raise ValueError(f"count is {count}; give the tokens to look back")
    layout = group.layout
    if x.ndim < 2 or (documents is None and x.shape[1] % layout.chunks_per_rank):
        raise ValueError(
            f"{tuple(x.shape)} is no part of a sequence in {layout.chunks_per_rank} chunks; shard (batch, length, ...)"
        )
    if documents is not None and not torch.compiler.is_compiling():
        whole, found = documents.length, x.shape[1] * layout.world
        if whole != found:
            raise ValueError(f"the documents have {whole} tokens, but the ranks hold {found}; shard x with them")


def _boundaries(documents: Documents | None) -> Tensor | None:
    return None if documents is None else documents.boundaries


# ---- plan ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookBack:
    """Rows that travel between ranks, and where rows go in the result, whose slots are (token looking back, C).

    Received rows are in the order of their rank and position, and so are sent ones.
    """

    lookers: int  # tokens that look back
    own_slots: Tensor  # rows of the result that come from this rank
    own_rows: Tensor  # rows of x, one for each own slot
    received_slots: Tensor
    received_rows: Tensor  # rows received, one for each received slot
    sent_rows: Tensor  # rows of x
    rows: Tensor  # rows of x in own_rows or sent_rows, sorted
    own_places: Tensor  # places of own_rows in `rows`
    sent_places: Tensor  # places of sent_rows in `rows`
    sent_counts: list[int]  # by rank
    received_counts: list[int]
    communicates: bool  # the same on all ranks

    def gather(self, x: Tensor, count: int, group: SequenceGroup) -> Tensor:
        """Returns the `count` slots of each token that looks back: (B, lookers, C, ...)."""
        received = self._exchange(x.index_select(1, self.sent_rows), group, self.sent_counts, self.received_counts)
        out = x.new_zeros(len(x), self.lookers * count, *x.shape[2:])
        out.index_copy_(1, self.own_slots, x.index_select(1, self.own_rows))
        out.index_copy_(1, self.received_slots, received.index_select(1, self.received_rows))
        return out.view(len(x), self.lookers, count, *x.shape[2:])

    def add_gradient(self, dx: Tensor, dslots: Tensor, group: SequenceGroup) -> None:
        """Adds the gradient of gathered slots (B, lookers, C, ...) to the gradient of x (B, S, ...), in place.

        Each token's gradients, from all ranks, are added in float32 or wider.
        """
        flat = dslots.flatten(1, 2).to(torch.promote_types(dx.dtype, torch.float32))
        dreceived = flat.new_zeros(len(flat), sum(self.received_counts), *flat.shape[2:])
        dreceived.index_add_(1, self.received_rows, flat.index_select(1, self.received_slots))
        total = dx.index_select(1, self.rows).to(flat.dtype)
        total.index_add_(1, self.own_places, flat.index_select(1, self.own_slots))
        dsent = self._exchange(dreceived, group, self.received_counts, self.sent_counts)
        total.index_add_(1, self.sent_places, dsent)
        dx.index_copy_(1, self.rows, total.to(dx.dtype))

    def _exchange(self, rows: Tensor, group: SequenceGroup, sends: list[int], receives: list[int]) -> Tensor:
        if not self.communicates:
            return rows
        sent = rows.transpose(0, 1).contiguous()
        received = sent.new_empty(sum(receives), *sent.shape[1:])
        dist.all_to_all_single(received, sent, receives, sends, group=group.process_group)
        return received.transpose(0, 1)


def _plan_for(group: SequenceGroup, x: Tensor, boundaries: Tensor | None, count: int, lookers: int) -> LookBack:
    layout, nodes = group.layout_and_nodes(x.shape[1], boundaries)
    return _evenly_spaced(layout, group.rank, nodes, count, lookers, x.device)


@lru_cache(maxsize=MAX_PLANS)  # serves all layers, forward and backward
def _evenly_spaced(layout: Layout, rank: int, nodes: Nodes, count: int, lookers: int, device: torch.device) -> LookBack:
    """Makes the plan of one rank. `lookers` evenly spaced tokens look back, beginning with the first."""
    looking = layout.positions(rank, nodes.length).unflatten(0, (lookers, -1))[:, 0].contiguous()
    return look_back(layout, rank, nodes, count, positions_before(looking, count, nodes), device)


def look_back(layout: Layout, rank: int, nodes: Nodes, count: int, slots: Tensor, device: torch.device) -> LookBack:
    """Makes the plan of one rank whose slots (lookers, C) are positions of the row, or -1 for zeros.

    Slots may hold this rank's own tokens, and the `count` tokens before each of its pieces.
    """
    length, world = nodes.length, layout.world
    positions = [layout.positions(r, length) for r in range(world)]
    home, row = torch.empty(length, dtype=torch.int64), torch.empty(length, dtype=torch.int64)
    for r, mine in enumerate(positions):
        home[mine], row[mine] = r, torch.arange(len(mine))

    # Only tokens before a piece are ever needed from another rank.
    wanted = [positions_before(_first_of_pieces(layout, mine, nodes), count, nodes) for mine in positions]
    wanted = [found[found >= 0] for found in wanted]
    away = [found[home[found] != r] for r, found in enumerate(wanted)]
    sent = [found[home[found] == rank].unique() for found in away]
    received = [away[rank][home[away[rank]] == r].unique() for r in range(world)]
    sent_rows, arrivals = row[torch.cat(sent)], torch.cat(received)
    row[arrivals] = torch.arange(len(arrivals))  # from here on, a row of another rank is a received one

    flat = slots.flatten()
    own = (flat >= 0) & (home[flat] == rank)
    other = (flat >= 0) & (home[flat] != rank)
    own_rows = row[flat[own]]
    rows, places = torch.cat([own_rows, sent_rows]).unique(return_inverse=True)
    return LookBack(
        lookers=len(slots),
        own_slots=upload(own.nonzero().flatten(), device),
        own_rows=upload(own_rows, device),
        received_slots=upload(other.nonzero().flatten(), device),
        received_rows=upload(row[flat[other]], device),
        sent_rows=upload(sent_rows, device),
        rows=upload(rows, device),
        own_places=upload(places[: len(own_rows)], device),
        sent_places=upload(places[len(own_rows) :], device),
        sent_counts=[len(x) for x in sent],
        received_counts=[len(x) for x in received],
        communicates=any(map(len, away)),
    )


def _first_of_pieces(layout: Layout, mine: Tensor, nodes: Nodes) -> Tensor:
    """Returns the first token of each piece, the run of a path's tokens in a fragment, among a rank's positions."""
    return mine[tokens_inside_piece(layout, mine, nodes) == 0]


def tokens_inside_piece(layout: Layout, mine: Tensor, nodes: Nodes) -> Tensor:
    """Returns how many tokens of its piece lie before each of a rank's tokens (S,)."""
    edges, size = torch.from_numpy(nodes.path_edges), len(mine) // layout.fragments_per_rank(len(mine))
    inside_path = mine - edges[torch.searchsorted(edges, mine, right=True) - 1]
    return torch.minimum(inside_path, torch.arange(len(mine)) % size)


def positions_before(tokens: Tensor, count: int, nodes: Nodes) -> Tensor:
    """Returns the `count` positions before each token on its path (tokens, C), in rising order; -1 where it begins."""
    edges, parents = torch.tensor(nodes.boundaries), torch.tensor([*nodes.all_parents, ROOT])
    back = torch.arange(count, 0, -1)
    found = tokens.unsqueeze(-1) - back
    node = (torch.searchsorted(edges, tokens, right=True) - 1).unsqueeze(-1).expand_as(found)
    while bool((outside := (node != ROOT) & (found < edges[node])).any()):
        above = parents[node]
        in_parent = edges[above + 1] - (edges[node] - found)
        found = torch.where(outside, torch.where(above != ROOT, in_parent, -1), found)
        node = torch.where(outside, above, node)
    return found


# ---- operators -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("lightseq::previous_tokens", mutates_args=())
def _previous_tokens(x: Tensor, group_name: str, boundaries: Tensor | None, count: int, lookers: int) -> Tensor:
    return _look_back(x, group_name, boundaries, count, lookers)


@torch.library.custom_op("lightseq::tokens_before", mutates_args=())
def _tokens_before(x: Tensor, group_name: str, boundaries: Tensor | None, count: int, lookers: int) -> Tensor:
    (out,) = reuse_or_compute(lambda: (_look_back(x, group_name, boundaries, count, lookers),))
    return out


def _look_back(x: Tensor, group_name: str, boundaries: Tensor | None, count: int, lookers: int) -> Tensor:
    """Returns the `count` tokens before each of `lookers` evenly spaced local tokens: (B, lookers, C, ...)."""
    group = find_group(group_name)
    group.check_documents(boundaries)
    return _plan_for(group, x, boundaries, count, lookers).gather(x, count, group)


def _fake(x: Tensor, group_name: str, boundaries: Tensor | None, count: int, lookers: int) -> Tensor:
    return x.new_empty(len(x), lookers, count, *x.shape[2:])


def add_gradient(dx: Tensor, dbefore: Tensor, group: SequenceGroup, boundaries: Tensor | None) -> None:
    """Adds the gradient of the fetched tokens (B, lookers, C, ...) to the gradient of x (B, S, ...), in place.

    Every rank of the group must call it.
    """
    _, lookers, count, *_ = dbefore.shape
    _plan_for(group, dx, boundaries, count, lookers).add_gradient(dx, dbefore, group)


@torch.library.custom_op("lightseq::look_back_backward", mutates_args=())
def _look_back_backward(dout: Tensor, group_name: str, boundaries: Tensor | None, local: int) -> Tensor:
    """Returns the gradient of x (B, S, ...)."""
    dx = dout.new_zeros(len(dout), local, *dout.shape[3:])
    add_gradient(dx, dout, find_group(group_name), boundaries)
    return dx


@_look_back_backward.register_fake
def _(dout: Tensor, group_name: str, boundaries: Tensor | None, local: int) -> Tensor:
    return dout.new_empty(len(dout), local, *dout.shape[3:])


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, ctx.group_name, boundaries, _, _ = inputs
    ctx.local = x.shape[1]
    ctx.save_for_backward(boundaries)


def _backward(ctx, dout: Tensor):  # type: ignore[no-untyped-def]
    (boundaries,) = ctx.saved_tensors
    return _look_back_backward(dout, ctx.group_name, boundaries, ctx.local), None, None, None, None


for _operator in (_previous_tokens, _tokens_before):
    _operator.register_fake(_fake)
    _operator.register_autograd(_backward, setup_context=_setup_context)
TOKENS_BEFORE_OP = torch.ops.lightseq.tokens_before.default  # for checkpointing policies
