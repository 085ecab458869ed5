"""Attention in which tokens of an image also see the later tokens of that image, as in Gemma 3.

The causal part is the same as in all models. The other pairs lie within an image of a few hundred tokens; they are
computed on the rank of the query, and merged by log-sum-exp. Only images across the border of ranks are exchanged.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightseq.attention.context import SequenceContext
from lightseq.attention.module_attention import attention_function, context_of
from lightseq.attention.operator import attention, attention_backward
from lightseq.kernels.attention.base import Saved
from lightseq.schedule.layout import shard
from lightseq.schedule.reach import sliding
from lightseq.sequence.documents import Documents

IMAGE_BLOCKS: Final = "image_blocks"  # keyword of `ImageBlocks` in an attention call
IMPLEMENTATION: Final = "lightseq_images"


@dataclass(frozen=True, eq=False)
class ImageBlocks:
    """Image tokens of a batch, as one rank sees them. A block is a run of image tokens in a row.

    `queries` and `keys` index tokens: this rank's (batch * local), then the gathered ones of blocks that several ranks
    hold, `most` of each rank. `sees` says which keys a query sees that the causal mask hides.
    """

    queries: Tensor  # int64 (blocks, queries), padded with the first token
    keys: Tensor  # int64 (blocks, keys)
    sees: Tensor  # bool (blocks, queries, keys); False for padding
    rows: Tensor  # int64: indices of the real queries in `queries`, flattened
    exchanged: Tensor  # int64: this rank's tokens that others need
    most: int

    def to(self, device: torch.device) -> "ImageBlocks":
        """Returns the blocks on a device."""
        if self.queries.device == device:
            return self
        return ImageBlocks(
            queries=self.queries.to(device),
            keys=self.keys.to(device),
            sees=self.sees.to(device),
            rows=self.rows.to(device),
            exchanged=self.exchanged.to(device),
            most=self.most,
        )


def image_blocks(
    context: SequenceContext, is_image: Tensor, documents: Documents | None, boundaries: tuple[int, ...] | None
) -> ImageBlocks:
    """Returns the image blocks of a whole batch. `is_image` (batch, length) marks the image tokens."""
    before = torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    if boundaries is not None:
        before[:, [start for start in boundaries if start < is_image.shape[1]]] = False
    numbers = (is_image & ~before).flatten().cumsum(0).view_as(is_image).sub(1).masked_fill(~is_image, -1)
    places = torch.arange(is_image.shape[1]).expand_as(is_image)
    ranks = range(context.layout.world)
    if documents is None:
        part = partial(_part, context)
    else:
        part = partial(_part_of_documents, documents)
    parts = [part(numbers, rank).flatten() for rank in ranks]
    at = [part(places, rank).flatten() for rank in ranks]
    count = int(numbers.max()) + 1
    held = torch.stack([torch.bincount(x[x >= 0], minlength=count) > 0 for x in parts]).sum(0)
    exchanged = [((x >= 0) & (held[x.clamp_min(0)] > 1)).nonzero().flatten() for x in parts]
    most = max(map(len, exchanged))
    own, own_at, local = parts[context.rank], at[context.rank], len(parts[context.rank])
    pool = torch.full((len(ranks), most), -1)
    pool_at = pool.clone()
    for rank, tokens in enumerate(exchanged):
        pool[rank, : len(tokens)], pool_at[rank, : len(tokens)] = parts[rank][tokens], at[rank][tokens]
    of_keys = torch.cat([torch.where(held[own.clamp_min(0)] > 1, -1, own), pool.flatten()])
    places_of_keys = torch.cat([own_at, pool_at.flatten()])
    mine = own[own >= 0].unique().tolist()
    q_lists = [(own == block).nonzero().flatten() for block in mine]
    k_lists = [(of_keys == block).nonzero().flatten() for block in mine]
    queries, keys = (
        torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=-1) if x else torch.zeros(0, 0).long()
        for x in (q_lists, k_lists)
    )
    real = (queries >= 0)[:, :, None] & (keys >= 0)[:, None, :]
    queries, keys, rows = queries.clamp_min(0), keys.clamp_min(0), (queries >= 0).flatten().nonzero().flatten()
    assert not queries.numel() or int(queries.max()) < local
    sees = real & (places_of_keys[keys][:, None, :] > own_at[queries][:, :, None])
    return ImageBlocks(queries, keys, sees, rows, exchanged[context.rank], most)


def _part(context: SequenceContext, whole: Tensor, rank: int) -> Tensor:
    return shard(whole, context.layout, rank, fill=-1)


def _part_of_documents(documents: Documents, whole: Tensor, rank: int) -> Tensor:
    return documents.shard(whole, rank, -1)


def image_attention_function(
    module: nn.Module,
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Runs `attention_function`. With image blocks, image tokens also see later tokens of their image."""
    blocks = others.pop(IMAGE_BLOCKS, None)
    if blocks is None:
        return attention_function(module, query_BHSD, key_BKSD, value_BKSD, attention_mask, dropout, scaling, **others)
    if others.get("softcap") is not None or others.get("s_aux") is not None or dropout:
        raise ValueError(f"{type(module).__name__} caps scores, has sinks or drops out, which images do not support")
    return _with_blocks(module, query_BHSD, key_BKSD, value_BKSD, scaling, blocks, others), None


@torch.compiler.disable
def _with_blocks(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, blocks: ImageBlocks, others: dict
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    options = (context_of(module), scale, others.get("documents"), sliding(others.get("sliding_window")))
    with torch.autocast(device, enabled=False):
        out: Tensor = _BlockAttention.apply(q, k, v, blocks.to(q.device), options)
    return out


class _BlockAttention(torch.autograd.Function):
    """Causal attention over ranks, in which image queries also see their image's later tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: ImageBlocks, options: tuple) -> Tensor:  # type: ignore[override]
        context, scale, documents, reach = options
        causal, causal_lse = attention(q, k, v, context, scale, documents, reach)
        out, lse = causal.clone(), causal_lse.clone()
        pool = [_pool(context, x, blocks) for x in (k, v)]
        if blocks.queries.numel():
            flat_out, flat_lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
            q_blocks = q.flatten(0, 1)[blocks.queries].float()
            k_blocks, v_blocks = (_of_heads(x[blocks.keys], q.shape[2]) for x in pool)
            scores = _scores(q_blocks, k_blocks, blocks, scale)
            rows = blocks.queries.flatten()[blocks.rows]
            before = flat_lse[rows]
            total = torch.logaddexp(
                before, scores.logsumexp(-1).transpose(1, 2).flatten(0, 1)[blocks.rows].to(lse.dtype)
            )
            of_blocks = flat_lse[blocks.queries].clone()
            of_blocks.flatten(0, 1)[blocks.rows] = total
            weights = (scores - of_blocks.transpose(1, 2).unsqueeze(-1)).exp()
            more = torch.einsum("nhqk,nkhd->nqhd", weights, v_blocks.to(weights.dtype)).flatten(0, 1)[blocks.rows]
            merged = flat_out[rows] * (before - total).exp().unsqueeze(-1) + more
            flat_out[rows] = merged.to(out.dtype)
            flat_lse[rows] = total
            out, lse = flat_out.view_as(out), flat_lse.view(*q.shape[:3]).transpose(1, 2).contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.options = blocks, options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        blocks, (context, scale, documents, reach) = ctx.blocks, ctx.options
        dq, dk, dv = attention_backward(dout, Saved(q, k, v, out, lse), context, scale, documents, reach)
        pool = [_pool(context, x, blocks) for x in (k, v)]
        gradients = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in pool]
        if blocks.queries.numel():
            heads, groups = k.shape[2], q.shape[2] // k.shape[2]
            q_blocks, do, o = (x.flatten(0, 1)[blocks.queries].float() for x in (q, dout, out))
            k_blocks, v_blocks = (_of_heads(x[blocks.keys], q.shape[2]).float() for x in pool)
            of_blocks = lse.transpose(1, 2).flatten(0, 1)[blocks.queries].transpose(1, 2).unsqueeze(-1)
            weights = (_scores(q_blocks, k_blocks, blocks, scale) - of_blocks).exp()
            delta = (do * o).sum(-1).transpose(1, 2).unsqueeze(-1)
            ds = weights * (torch.einsum("nqhd,nkhd->nhqk", do, v_blocks) - delta) * scale
            more_q = torch.einsum("nhqk,nkhd->nqhd", ds, k_blocks)
            made = torch.einsum("nhqk,nqhd->nkhd", ds, q_blocks), torch.einsum("nhqk,nqhd->nkhd", weights, do)
            rows = blocks.queries.flatten()[blocks.rows]
            dq = dq.clone()
            dq.view(-1, *dq.shape[2:])[rows] += more_q.flatten(0, 1)[blocks.rows].to(dq.dtype)
            for gradient, x in zip(gradients, made, strict=True):
                gradient.index_add_(0, blocks.keys.flatten(), x.unflatten(2, (heads, groups)).sum(3).flatten(0, 1))
        return dq, *(_add_pool(context, x, g, blocks) for x, g in zip((dk, dv), gradients, strict=True)), None, None


def _scores(q: Tensor, k: Tensor, blocks: ImageBlocks, scale: float) -> Tensor:
    """Returns the scores of each block (blocks, heads, queries, keys), -inf where a query does not see a key."""
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k.to(q.dtype)) * scale
    return scores.masked_fill(~blocks.sees.unsqueeze(1), -torch.inf)


def _of_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _pool(context: SequenceContext, x: Tensor, blocks: ImageBlocks) -> Tensor:
    """Appends all ranks' tokens of blocks that several ranks hold to this rank's tokens."""
    own = x.flatten(0, 1)
    if not blocks.most:
        return own
    given = own.new_zeros(blocks.most, *own.shape[1:])
    given[: len(blocks.exchanged)] = own[blocks.exchanged]
    everyone = [torch.empty_like(given) for _ in range(context.layout.world)]
    dist.all_gather(everyone, given, group=context.group)
    return torch.cat([own, *everyone])


def _add_pool(context: SequenceContext, gradient: Tensor, pool: Tensor, blocks: ImageBlocks) -> Tensor:
    """Sums the gradients of a pool over ranks, and adds them to the gradients of this rank's tokens."""
    local = gradient.shape[0] * gradient.shape[1]
    total = pool[:local]
    if blocks.most:
        others = pool[local:].contiguous()
        dist.all_reduce(others, group=context.group)
        mine = others.view(context.layout.world, blocks.most, *others.shape[1:])[context.rank]
        total = total.index_add(0, blocks.exchanged, mine[: len(blocks.exchanged)])
    return (gradient + total.view(gradient.shape)).to(gradient.dtype)
