"""Attention kernels that come with torch: CPU flash attention, a build of FlashAttention-2, and cuDNN.

They are called at the aten level, where the backward accepts an lse over more keys than the tile's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from lightseq.kernels.attention.base import GradientMemory, KernelSpec, Saved
from lightseq.kernels.attention.reference import ReferenceKernel
from lightseq.kernels.attention.segment_calls import Lengths

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
NO_SOFTCAP = "has no soft cap of attention scores"
NEEDS_EQUAL_DIMS = "needs keys and values of one dimension"
CUDNN_FOR_256 = 90501  # version whose backward pass takes heads of 256 on Hopper


def _swap(x: Tensor) -> Tensor:
    """Converts between (B, S, H, D) and (B, H, S, D), without a copy."""
    return rearrange(x, "b s h d -> b h s d")


def why_no_flash_kernel(spec: KernelSpec) -> str | None:
    """Returns the first unmet requirement that all GPU flash kernels share; None if all are met."""
    if spec.device_type != "cuda":
        return "needs a CUDA device"
    if spec.dtype not in HALF:
        return f"needs bfloat16 or float16, not {str(spec.dtype).removeprefix('torch.')}"
    if spec.head_dim % 8 or (spec.value_dim or 0) % 8:
        odd = spec.head_dim if spec.head_dim % 8 else spec.value_dim
        return f"needs a head dimension that is a multiple of 8, not {odd}"
    return None


class CpuKernel:
    """torch's flash attention for CPU, float16 to float64."""

    name = "cpu"
    causal_alignment: Literal["square"] = "square"  # aligned upper-left
    has_windows = False

    def why_unavailable(self, spec: KernelSpec) -> str | None:
        if spec.device_type != "cpu":
            return "needs a CPU"
        if spec.has_other_values:
            return NEEDS_EQUAL_DIMS
        return NO_SOFTCAP if spec.softcap else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            _swap(q), _swap(k), _swap(v), 0.0, causal, scale=scale
        )
        return _swap(out), lse

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, out, lse = saved
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _swap(dout), _swap(q), _swap(k), _swap(v), _swap(out), lse.contiguous(), 0.0, causal, scale=scale
        )
        dq, dk, dv = map(_swap, grads)
        return dq, dk, dv


class AtenKernel:
    """The FlashAttention-2 kernels inside torch."""

    name = "aten"
    causal_alignment: Literal["bottom_right"] = "bottom_right"
    has_windows = True

    def __init__(self, deterministic: bool = False) -> None:
        self._deterministic = deterministic

    def why_unavailable(self, spec: KernelSpec) -> str | None:
        if reason := why_no_flash_kernel(spec):
            return reason
        if spec.capability < (8, 0):
            return f"needs compute capability 8.0, this GPU has {'.'.join(map(str, spec.capability))}"
        if spec.widest > 256:
            return f"needs a head dimension of at most 256, not {spec.widest}"
        if spec.has_other_values:
            return NEEDS_EQUAL_DIMS
        return NO_SOFTCAP if spec.softcap else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale, **_sides(window)
        )
        return out, lse

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return self._backward(dout, saved, (None, None, saved.q.shape[1], saved.k.shape[1]), causal, scale, window)

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool, scale: float,
        into: Tensor | None = None, window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, causal, False, scale=scale, **_sides(window)
        )
        return out, lse

    def backward_varlen(
        self, dout: Tensor, saved: Saved, lengths: Lengths, causal: bool, scale: float,
        into: GradientMemory = (None, None, None), window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return self._backward(dout, saved, lengths, causal, scale, window)

    def _backward(
        self, dout: Tensor, saved: Saved, lengths: Sequence[Tensor | int | None], causal: bool, scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, out, lse = saved
        state = (torch.zeros(2, dtype=torch.uint64, device=lse.device), torch.empty(0, device=lse.device))  # no dropout
        with _deterministic(self._deterministic):
            return aten._flash_attention_backward(
                dout, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, *state, scale=scale, **_sides(window)
            )


def _sides(window: int | None) -> dict[str, int]:
    """Converts a window to the form of aten's kernels: visible keys to the left and right."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


@contextmanager
def _deterministic(asked: bool) -> Iterator[None]:
    """Turns on deterministic algorithms inside the block; torch has one switch for the whole process."""
    if not asked or torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class CudnnKernel:
    """cuDNN's fused attention, for Ampere and newer GPUs."""

    name = "cudnn"
    causal_alignment: Literal["square"] = "square"  # aligned upper-left
    has_windows = False

    def why_unavailable(self, spec: KernelSpec) -> str | None:
        if reason := self.why_unsupported(spec):
            return reason
        version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        if version is None:
            return "cuDNN is not available"
        return "needs cuDNN 9.5.1 for heads of 256" if spec.widest > 128 and version < CUDNN_FOR_256 else None

    def why_unsupported(self, spec: KernelSpec) -> str | None:
        if reason := why_no_flash_kernel(spec):
            return reason
        if spec.capability < (8, 0):
            return f"needs compute capability 8.0, this GPU has {'.'.join(map(str, spec.capability))}"
        widest = 256 if spec.capability == (9, 0) else 128
        if spec.widest > widest:
            return f"needs a head dimension of at most {widest}, not {spec.widest}"
        if spec.has_other_values:
            return NEEDS_EQUAL_DIMS
        if spec.deterministic:
            return "its backward is not deterministic"
        if spec.windows:
            return "has no sliding windows"
        return NO_SOFTCAP if spec.softcap else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if q.shape[1] == k.shape[1] == 1:  # the one shape that cuDNN refuses
            return ReferenceKernel().forward(q, k, v, causal, scale)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            _swap(q), _swap(k), _swap(v), None, True, 0.0, causal, False, scale=scale
        )
        return _swap(out), lse.reshape(q.shape[0], q.shape[2], q.shape[1])  # cuDNN: (B, H, S, 1)

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, out, lse = saved
        if q.shape[1] == k.shape[1] == 1:
            return ReferenceKernel().backward(dout, saved, causal, scale)
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        lse_BHS1 = rearrange(lse, "b h s -> b h s 1").contiguous()
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            _swap(dout), _swap(q), _swap(k), _swap(v), _swap(out), lse_BHS1, no_dropout, no_dropout,
            None, None, None, q.shape[1], k.shape[1], 0.0, causal, scale=scale,
        )  # fmt: skip
        dq, dk, dv = map(_swap, grads)
        return dq, dk, dv
