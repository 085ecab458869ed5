"""lightseq's attention layer for benchmarks: distributed, and the kernel on one GPU as the ceiling."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_flags import Choice
from benchmarks.measure import Case, Layer
from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import SequenceContext, make_context, release
from lightseq.attention.operator import attention
from lightseq.comm.transport import BLOCKING, WITHOUT_CUDA_GRAPHS
from lightseq.kernels.attention.base import Kernel, Saved
from lightseq.kernels.attention.selection import select
from lightseq.kernels.attention.tile import backward_tile, forward_tile
from lightseq.schedule.algorithms import make_schedule
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.documents import balance, packed_schedule
from lightseq.schedule.segments import Segments
from lightseq.schedule.table import Mask
from lightseq.schedule.windows import windowed_schedule
from lightseq.sequence.documents import Documents


def without_exchange(layer: Layer) -> Choice:
    """Returns the settings with the same tiles and no communication, which times computation and launches."""
    facts = {field.name: layer.facts[field.name] for field in fields(Choice)}
    for name in ("ulysses_size", "head_groups"):  # other schedules do not accept the argument
        facts[name] = None if facts[name] == 1 else facts[name]
    alike = facts["transport"] in ("symmetric", "symmetric" + BLOCKING)
    return replace(Choice(**facts), transport="none" if alike else "none" + WITHOUT_CUDA_GRAPHS)


@contextmanager
def lightseq_layer(case: Case, choice: Choice) -> Iterator[Layer]:
    shape = AttentionShape(
        case.length, case.heads, case.kv_heads, case.head_dim, element_bytes=torch.empty(0, dtype=case.dtype).itemsize
    )
    config = AttentionConfig(
        choice.schedule, choice.kernel, choice.transport, choice.ulysses_size, choice.head_groups, case.dtype,
        case.device, deterministic=case.spec.deterministic, packed=case.spec.packed,
        keep_gathered=choice.keep_gathered, windows=case.spec.windows,
    )  # fmt: skip
    context = make_context(case.group, shape, config)
    documents = context.sequence.pack(case.boundaries, case.length) if case.boundaries else None
    layout = documents.layout if documents else context.layout
    padded = documents.padded_boundaries[-1] if documents else layout.padded_length(case.length)
    try:
        yield Layer(
            attend=lambda q, k, v: attention(q, k, v, context, documents=documents, window=case.window)[0],
            positions=layout.positions(context.rank, padded),
            ranks=case.world,
            facts={
                "schedule": context.schedule.name,
                "head_groups": context.schedule.head_groups_per_rank,
                "ulysses_size": context.schedule.ulysses_size,
                "keep_gathered": context.keeps_gathered,
                "kernel": context.selection.kernel.name,
                "transport": context.transport.name,
                **(packing(context, documents, case.boundaries[-1]) if documents else {}),
                **({"fetched_tokens": fetched_in_window(context, padded, case.window)} if case.window else {}),
            },
            buffer_bytes=lambda: context.transport.buffer_bytes + context.transport.graph_bytes,
        )
    finally:
        release(context)  # frees the transport's buffers too


def packing(context: SequenceContext, documents: Documents, tokens: int) -> dict[str, Any]:
    """Returns the balance of work on packed documents, fetched tokens, and padding beyond `tokens`."""
    boundaries = documents.padded_boundaries
    table = packed_schedule(context.schedule, boundaries)
    rows = boundaries[-1] // table.layout.chunk_count
    fetched = Counter(m.dst for step in table.forward for m in step.moves if m.item == "kv")
    return {
        "chunks_per_rank": table.layout.chunks_per_rank,
        "area_balance": balance(table),
        "padding_tokens": boundaries[-1] - tokens,
        "fetched_tokens": max(fetched.values(), default=0) * rows // table.total_head_groups,
    }


def fetched_in_window(context: SequenceContext, length: int, window: int) -> int:
    """Returns the tokens whose keys and values the fullest rank fetches from others in a forward pass."""
    table = windowed_schedule(context.schedule, (0, length), window, packed=False)
    rows = length // table.layout.chunk_count
    fetched = Counter(m.dst for step in table.forward for m in step.moves if m.item == "kv")
    return max(fetched.values(), default=0) * rows // table.total_head_groups


@contextmanager
def single_gpu_layer(case: Case, kernel: str) -> Iterator[Layer]:
    """Computes the whole sequence on every rank without communication."""
    chosen = select(kernel, case.spec).kernel
    mask: Mask | Segments = Mask.CAUSAL
    if case.window:
        table = windowed_schedule(make_schedule("ulysses", 1), (0, case.length), case.window, packed=False)
        mask = table.forward[0].tiles[0][0].mask
    elif case.boundaries:
        mask = packed_schedule(make_schedule("prefix", 1), case.boundaries).forward[0].tiles[0][0].mask
    yield Layer(
        attend=lambda q, k, v: WholeSequence.apply(q, k, v, chosen, mask),
        positions=torch.arange(case.length),
        ranks=1,
        facts={"kernel": chosen.name},
    )


class WholeSequence(torch.autograd.Function):
    """Autograd function of one kernel over a whole causal sequence or packed documents."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, mask: Mask | Segments) -> Tensor:
        out, lse = forward_tile(kernel, q, k, v, mask, q.shape[-1] ** -0.5)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.mask = kernel, mask
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = Saved(*ctx.saved_tensors)
        return (*backward_tile(ctx.kernel, dout, saved, ctx.mask, saved.q.shape[-1] ** -0.5), None, None)
