"""lightseq's attention layer for benchmarks: distributed, and the kernel on one GPU as the ceiling."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_flags import Choice
from benchmarks.measure import Case, Layer
from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import make_context, release
from lightseq.attention.operator import attention
from lightseq.kernels.attention.base import Kernel, Saved
from lightseq.kernels.attention.tile import backward_tile, forward_tile
from lightseq.kernels.attention.tile_kernel_choice import select
from lightseq.schedule.algorithms import make_schedule
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.documents import packed_schedule
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.reach import sliding
from lightseq.schedule.segments import Segments
from lightseq.schedule.table import Mask
from lightseq.schedule.windows import windowed_schedule


@contextmanager
def lightseq_layer(case: Case, choice: Choice) -> Iterator[Layer]:
    shape = AttentionShape(
        case.length, case.heads, case.kv_heads, case.head_dim, element_bytes=case.dtype.itemsize,
        value_dim=case.value_dim,
    )  # fmt: skip
    config = AttentionConfig(
        choice.schedule, choice.kernel, choice.transport, choice.ulysses_size, choice.head_groups, case.dtype,
        case.device, deterministic=case.spec.deterministic, packed=case.spec.packed, windows=case.spec.windows,
    )  # fmt: skip
    context = make_context(case.group, shape, config)
    documents = context.sequence.pack(case.boundaries, case.length, case.parents) if case.boundaries else None
    layout = documents.layout if documents else context.layout
    padded = documents.padded_boundaries[-1] if documents else layout.padded_length(case.length)
    try:
        yield Layer(
            attend=lambda q, k, v: attention(q, k, v, context, documents=documents, reach=sliding(case.window))[0],
            positions=layout.positions(context.rank, padded),
            ranks=case.world,
            facts={
                "schedule": context.schedule.name,
                "head_groups": context.schedule.head_groups_per_rank,
                "ulysses_size": context.schedule.ulysses_size,
                "kernel": context.selection.kernel.name,
                "transport": context.transport.name,
                "keep_gathered": context.keeps_gathered,
            },
            buffer_bytes=lambda: context.transport.buffer_bytes + context.transport.graph_bytes,
        )
    finally:
        release(context)  # frees the transport's buffers too


@contextmanager
def single_gpu_layer(case: Case, kernel: str) -> Iterator[Layer]:
    """Computes the whole sequence on every rank without communication."""
    chosen = select(kernel, case.spec).kernel
    mask: Mask | Segments = Mask.CAUSAL
    if case.window:
        table = windowed_schedule(make_schedule("ulysses", 1), Nodes((0, case.length)), case.window, packed=False)
        mask = table.forward[0].tiles[0][0].mask
    elif case.boundaries:
        mask = packed_schedule(make_schedule("prefix", 1), case.nodes).forward[0].tiles[0][0].mask
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
