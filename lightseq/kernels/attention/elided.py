"""Kernel without arithmetic, which allocates the memory of the real one and returns zeros."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightseq.kernels.attention.base import GradientMemory, Kernel, KernelSpec, Saved, gradient_memory


@dataclass(frozen=True)
class Elided:
    """Stand-in for a kernel, for rehearsals.

    Its workspace is that of flash kernels: dq in float32, and dk and dv too if query heads share key/value heads.
    """

    kernel: Kernel

    @property
    def name(self) -> str:
        return f"{self.kernel.name}, elided"

    @property
    def causal_alignment(self) -> Literal["bottom_right", "square"]:
        return self.kernel.causal_alignment

    @property
    def has_windows(self) -> bool:
        return self.kernel.has_windows

    def with_softcap(self, softcap: float) -> "Elided":
        return self

    def why_unavailable(self, spec: KernelSpec) -> str | None:
        return self.kernel.why_unavailable(spec)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if into is None else into
        batch, length, heads, _ = q.shape
        lse = q.new_zeros((batch, heads, length), dtype=torch.promote_types(q.dtype, torch.float32))
        return out.zero_(), lse

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, *_ = saved
        summed = [q] if q.shape[2] == k.shape[2] else [q, k, v]
        workspace = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in summed]
        memory = gradient_memory(into, saved)
        del workspace
        dq, dk, dv = (x.zero_() for x in memory)
        return dq, dk, dv
