"""Distributed attention for models of your own, without transformers. This interface is stable.

group = sequence_parallel.make_group(heads=32, kv_heads=8, head_dim=128, length=2**17)
ids, targets = sequence_parallel.shard(group, input_ids), sequence_parallel.shard(group, shifted, fill=-100)
positions = sequence_parallel.positions(group, length)       # for RoPE
out = sequence_parallel.attention(q, k, v, group)            # in every layer, on this rank's tokens

Everything but attention runs on a rank's own tokens. Shift labels on the whole sequence, before it is split. Divide the
sum of losses by the targets of the whole sequence, and sum losses and gradients over the ranks of the group:
examples/plain_torch.py is a whole training loop. To pack documents into one sequence, pass what `pack(group,
boundaries)` returns to `shard`, `positions` and `attention`.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightseq.attention import operator
from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import SequenceContext, make_context, release
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.reach import sliding
from lightseq.sequence.documents import Documents
from lightseq.utils.formatting import check_names

OPTIONS: Final = tuple(f.name for f in fields(AttentionConfig) if f.name not in ("dtype", "device", "length"))
__all__ = ["attention", "make_group", "pack", "positions", "release", "shard"]


def make_group(
    ranks: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    heads: int,
    head_dim: int,
    length: int,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    **options: Any,
) -> SequenceContext:
    """Makes a group of ranks that share a sequence (default: all ranks); every rank of it passes the same arguments.

    `heads`, `kv_heads` (default: as many), `head_dim` and `value_dim` (default: as large) describe the model's
    attention; layers may differ from it, if the schedule allows their heads. The schedule is chosen for
    sequences of `length` tokens, but other lengths run too. `device` (default: the current GPU, else the CPU) and
    `dtype` describe q, k and v. `options` are fields of `AttentionConfig`, such as `schedule`, `packed` (most
    sequences hold several documents) or `windows` (some layers have a window shorter than a row, padding included).

    Raises TypeError for an unknown option, and ValueError for heads or ranks that the schedule does not support.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    check_names("make_group", options, OPTIONS)
    config = AttentionConfig(dtype=dtype, device=torch.device(device), length=length, **options)
    shape = AttentionShape(
        length, heads, kv_heads or heads, head_dim, element_bytes=dtype.itemsize, value_dim=value_dim
    )
    return make_context(process_group(ranks), shape, config)


def process_group(ranks: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the process group of a mesh with one axis, or of all ranks for None. Raises ValueError for more axes."""
    if isinstance(ranks, DeviceMesh):
        if ranks.ndim != 1:
            raise ValueError(f"the mesh has {ranks.ndim} axes {ranks.mesh_dim_names}; pass only the sequence axis")
        return ranks.get_group()
    if ranks is None:
        if dist.group.WORLD is None:
            raise ValueError("torch.distributed is not initialised; call init_process_group first")
        return dist.group.WORLD
    return ranks


def shard(group: SequenceContext, x: Tensor, fill: float = 0, documents: Documents | None = None) -> Tensor:
    """Returns this rank's part of a whole tensor (batch, length, ...), padded with `fill`: (batch, local, ...)."""
    return group.sequence.shard(x, fill, documents)


def pack(
    group: SequenceContext,
    boundaries: Sequence[int],
    length: int | None = None,
    parents: Sequence[int] | None = None,
) -> Documents:
    """Packs documents into a sequence of `length` tokens (default: the end of the last document).

    `boundaries` are the first token of each document and the end of the last. With `parents`, an index or -1 for each,
    they are nodes of trees, depth first: a token sees its own node up to itself, and all ancestors of the node. The
    sequence is padded to `length`, and further if the schedule needs it. Raises ValueError if boundaries do not rise
    from 0, or exceed `length`, and for nodes out of order.
    """
    return group.sequence.pack(boundaries, length, parents)


def positions(
    group: SequenceContext,
    length: int,
    documents: Documents | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Returns the position of each of this rank's tokens in the sequence, or in its document: int64 (1, local)."""
    if documents is not None:
        return documents.positions(group.rank).to(device)
    return group.sequence.positions(length, torch.device(device))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: SequenceContext,
    scale: float | None = None,
    documents: Documents | None = None,
    window: int | None = None,
) -> Tensor:
    """Computes causal attention of this rank's queries over the whole sequence.

    q is (batch, local, heads, head_dim), k is (batch, local, kv_heads, head_dim) and v (batch, local, kv_heads,
    value_dim), with positions already rotated in. Returns (batch, local, heads, value_dim) in q's dtype. `scale`
    defaults to head_dim ** -0.5. With `window` a query sees that many keys, its own included. Every rank of the group
    must call it, forward and backward. Raises ValueError for shapes that do not fit together.
    """
    out, _ = operator.attention(q, k, v, group, scale, documents, sliding(window))
    return out
