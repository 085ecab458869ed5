"""lightseq's own attention as a benchmark runs it: distributed, and one GPU's kernel alone as the ceiling."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Case, Layer
from lightseq.attention import attention, make_context, release
from lightseq.kernels import Kernel, select
from lightseq.schedule_cost import AttentionShape


@dataclass(frozen=True)
class Choice:
    """What is asked of lightseq; None leaves the choice to it."""

    schedule: str = "auto"
    kernel: str = "auto"
    transport: str = "auto"
    ulysses_size: int | None = None
    head_groups: int | None = None

    @property
    def silent(self) -> "Choice":
        """The same tiles, nothing sent: what remains of the time is arithmetic."""
        return replace(self, transport="none")


def resolved(layer: Layer) -> Choice:
    """What lightseq chose, to be asked for again by name."""
    facts = dict(layer.facts)
    if facts["ulysses_size"] == 1:  # only schedules that have one take the argument
        facts["ulysses_size"] = None
    if facts["head_groups"] == 1:
        facts["head_groups"] = None
    return Choice(**facts)


@contextmanager
def lightseq_layer(case: Case, choice: Choice) -> Iterator[Layer]:
    shape = AttentionShape(
        case.length, case.heads, case.kv_heads, case.head_dim, case.batch, torch.empty(0, dtype=case.dtype).itemsize
    )
    context = make_context(
        case.group, case.device, case.spec, shape, choice.schedule, choice.kernel, choice.transport,
        choice.ulysses_size, choice.head_groups,
    )  # fmt: skip
    try:
        yield Layer(
            attend=lambda q, k, v: attention(q, k, v, context)[0],
            positions=context.layout.positions(context.rank, context.layout.padded_length(case.length)),
            ranks=case.world,
            facts={
                "schedule": context.schedule.name,
                "head_groups": context.schedule.turns,
                "ulysses_size": context.schedule.ulysses_size,
                "kernel": context.selection.kernel.name,
                "transport": context.transport.name,
            },
            buffer_bytes=lambda: context.transport.buffer_bytes,
        )
    finally:
        release(context)  # and with it the transport's buffers


class _Whole(torch.autograd.Function):
    """One kernel over a whole causal sequence."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
        out, lse = kernel.forward(q, k, v, True, q.shape[-1] ** -0.5)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        return (*ctx.kernel.backward(dout, q, k, v, out, lse, True, q.shape[-1] ** -0.5), None)


@contextmanager
def single_gpu_layer(case: Case, kernel: str) -> Iterator[Layer]:
    """Every rank computes the whole sequence by itself: what the kernel does where nothing is distributed."""
    chosen = select(kernel, case.spec).kernel
    yield Layer(
        attend=lambda q, k, v: _Whole.apply(q, k, v, chosen),
        positions=torch.arange(case.length),
        ranks=1,
        facts={"kernel": chosen.name},
    )
