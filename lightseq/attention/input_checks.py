"""Checks of the tensors that attention gets: that they fit together, and are alike on all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.attention.context import SequenceContext
from lightseq.comm.transport import base_transport_name
from lightseq.schedule.algorithms import check_heads
from lightseq.sequence.documents import Documents, nodes_of


def check_shapes(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, documents: Documents | None) -> None:
    """Raises ValueError for tensors that do not fit together, or that the context's schedule cannot split."""
    if (
        k.shape[:-1] != v.shape[:-1]
        or q.ndim != 4
        or k.ndim != 4
        or q.shape[0] != k.shape[0]
        or q.shape[3] != k.shape[3]
    ):
        shapes = _shapes(q, k, v)
        raise ValueError(f"q, k and v do not fit together: {shapes}; expected (batch, sequence, heads, head_dim)")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; cast them to one dtype")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"attention needs as many keys as queries, not {_shapes(q, k, v)}; pass use_cache=False")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads")
    check_heads(context.schedule, q.shape[2], k.shape[2])
    if documents is not None:
        _check_packed(q, context, documents)
    elif q.shape[1] % context.layout.chunks_per_rank:
        raise ValueError(
            f"{q.shape[1]} local tokens do not divide into {context.layout.chunks_per_rank} chunks; "
            "shard the padded sequence with lightseq.schedule.layout.shard"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _check_packed(q: Tensor, context: SequenceContext, documents: Documents) -> None:
    if q.shape[0] != 1:
        raise ValueError(
            f"the batch has {q.shape[0]} packed sequences; documents need a batch of 1, so use one longer sequence"
        )
    expected = context.layout.world * q.shape[1]
    if not torch.compiler.is_compiling() and documents.length != expected:
        raise ValueError(
            f"{q.shape[1]} local tokens on {context.layout.world} ranks do not add up to the documents' "
            f"{documents.length}; shard the sequence by their layout"
        )


def compare_shapes(context: SequenceContext, q: Tensor, v: Tensor, boundaries: Tensor | None) -> None:
    """Raises ValueError if ranks pass different shapes, which would deadlock. Compares each shape once.

    Comparing waits for all ranks, so a rank skips it for a shape that it knows. If only some ranks skip it, the group
    hangs until the watchdog or the process group's timeout ends it.
    """
    shape = (*q.shape, *v.shape[2:], int(boundaries is not None))
    waits_for_ranks = base_transport_name(context.transport.name) != "none"
    if shape in context.shapes or not waits_for_ranks:
        return
    mine = (shape, None if boundaries is None else nodes_of(boundaries))
    everyone = [mine] * context.schedule.world
    dist.all_gather_object(everyone, mine, group=context.group)
    if len({theirs for theirs, _ in everyone}) > 1:
        found = ", ".join(f"rank {rank} {x[0]} x {x[1]} tokens" for rank, (x, _) in enumerate(everyone))
        raise ValueError(
            f"the ranks pass different shapes to attention: {found}; shard the same padded sequence on all of them"
        )
    if len({theirs for _, theirs in everyone}) > 1:
        raise ValueError("the ranks pass different documents to attention; pack the same sequence on all of them")
    context.shapes.add(shape)
