"""FlashAttention 2, 3 and 4, called below their autograd functions so that the backward gets the global lse.

fa2: package flash-attn (https://github.com/Dao-AILab/flash-attention). fa3: its `hopper` folder, module
flash_attn_interface. fa4: package flash-attn-4 (CuTe DSL), module flash_attn.cute. All align causal masks bottom-right.
"""

import importlib
import textwrap
import warnings
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from lightseq.kernels.attention.base import GradientMemory, KernelSpec, Saved, gradient_memory
from lightseq.kernels.attention.padded_values import with_padding
from lightseq.kernels.attention.segment_calls import Lengths
from lightseq.kernels.attention.tile import backward_tile
from lightseq.kernels.attention.torch_native import (
    CUDNN_FOR_256,
    NEEDS_EQUAL_DIMS,
    NO_SOFTCAP,
    CudnnKernel,
    why_no_flash_kernel,
)
from lightseq.schedule.table import Mask

CUDNN_LENGTH = 1024  # other lengths are treated as one batch


@dataclass(frozen=True)
class _FlashAttention:
    """Base of the three generations. `deterministic` trades some backward speed for bit-identical gradients."""

    deterministic: bool = False
    softcap: float = 0.0  # 0: none
    name: ClassVar[str]
    module: ClassVar[str]
    package: ClassVar[str]
    min_capability: ClassVar[tuple[int, int]]  # compute capability
    max_capability_exclusive: ClassVar[tuple[int, int]] = (99, 0)
    causal_alignment: ClassVar[Literal["bottom_right"]] = "bottom_right"
    has_windows: ClassVar[bool] = True
    takes_narrower_values: ClassVar[bool] = False  # values may have fewer elements than keys

    def with_softcap(self, softcap: float) -> Self:
        return replace(self, softcap=softcap)

    def why_unsupported(self, spec: KernelSpec) -> str | None:
        if reason := why_no_flash_kernel(spec):
            return reason
        if not self.min_capability <= spec.capability < self.max_capability_exclusive:
            return f"does not run on compute capability {'.'.join(map(str, spec.capability))}"
        if spec.widest > 256 or (self.name == "fa4" and spec.capability >= (10, 0) and spec.widest > 128):
            return f"does not support head dimension {spec.widest}"
        if spec.has_other_values and not (self.takes_narrower_values and spec.widest == spec.head_dim):
            return NEEDS_EQUAL_DIMS
        return None

    def why_unavailable(self, spec: KernelSpec) -> str | None:
        if reason := self.why_unsupported(spec):
            return reason
        try:
            self._load()
        except Exception as error:  # a broken installation raises any error: fa4 a RuntimeError, others an OSError
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            return f"{self.package} cannot be imported ({textwrap.shorten(reason, 160, placeholder=' ...')})"
        return None

    def _load(self) -> ModuleType:
        return importlib.import_module(self.module)


class FlashAttention2(_FlashAttention):
    name = "fa2"
    module = "flash_attn.flash_attn_interface"
    package = "flash-attn"
    min_capability = (8, 0)

    def _features(self, window: int | None) -> dict[str, Any]:
        return {**_sides(window), "softcap": self.softcap, "alibi_slopes": None}  # all are required

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse, *_ = self._load()._flash_attn_forward(
            q, k, v, 0.0, scale, causal, **self._features(window), return_softmax=False
        )
        return out, lse

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, out, lse = saved
        dq, dk, dv = gradient_memory(into, saved)
        self._load()._flash_attn_backward(
            dout, q, k, v, out, lse.contiguous(), dq, dk, dv, 0.0, scale, causal, **self._features(window),
            deterministic=self.deterministic,
        )  # fmt: skip
        return dq, dk, dv

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool, scale: float,
        into: Tensor | None = None, window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse, *_ = self._load()._flash_attn_varlen_forward(
            q, k, v, *lengths, 0.0, scale, causal, **self._features(window), return_softmax=False
        )
        return out, lse

    def backward_varlen(
        self, dout: Tensor, saved: Saved, lengths: Lengths, causal: bool, scale: float,
        into: GradientMemory = (None, None, None), window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, out, lse = saved
        dq, dk, dv = gradient_memory(into, saved)
        self._load()._flash_attn_varlen_backward(
            dout, q, k, v, out, lse.contiguous(), dq, dk, dv, *lengths, 0.0, scale, causal, **self._features(window),
            deterministic=self.deterministic,
        )  # fmt: skip
        return dq, dk, dv


class FlashAttention3(_FlashAttention):
    name = "fa3"
    module = "flash_attn_interface"
    package = "flash-attn-3"
    min_capability, max_capability_exclusive = (9, 0), (10, 0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse, *_ = self._load()._flash_attn_forward(
            q, k, v, softmax_scale=scale, causal=causal, **_sides(window), softcap=self.softcap
        )
        return out, lse

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, out, lse = saved
        dq, dk, dv = gradient_memory(into, saved)
        self._load()._flash_attn_backward(
            dout, q, k, v, out, lse.contiguous(), dq=dq, dk=dk, dv=dv, softmax_scale=scale, is_causal=causal,
            **_sides(window), softcap=self.softcap, deterministic=self.deterministic,
        )  # fmt: skip
        return dq, dk, dv


class FlashAttention4(_FlashAttention):
    name = "fa4"
    module = "flash_attn.cute.interface"
    package = "flash-attn-4"
    min_capability = (9, 0)
    takes_narrower_values = True

    def why_unsupported(self, spec: KernelSpec) -> str | None:
        if spec.softcap and spec.capability >= (12, 0):
            return f"{NO_SOFTCAP} on compute capability {'.'.join(map(str, spec.capability))}"
        return super().why_unsupported(spec)

    def why_unavailable(self, spec: KernelSpec) -> str | None:
        if (reason := super().why_unavailable(spec)) is not None or not spec.softcap:
            return reason
        # Versions without this function cap scores by another formula.
        is_new = hasattr(importlib.import_module("flash_attn.cute.utils"), "create_softcap_scoremod_bwd")
        return None if is_new else f"{NO_SOFTCAP} in this version of flash-attn-4; install 4.0.0b36"

    def _load(self) -> ModuleType:
        _silence_fa4()
        return super()._load()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return self.forward_varlen(q, k, v, None, causal, scale, into, window)

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if window is None and not self.softcap and not self.deterministic and cudnn_is_faster(saved):
            return backward_tile(CudnnKernel(), dout, saved, Mask.CAUSAL if causal else Mask.FULL, scale, into)
        return self.backward_varlen(dout, saved, None, causal, scale, into, window)

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, causal: bool, scale: float,
        into: Tensor | None = None, window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Computes segments, or a dense batch if `lengths` is None."""
        out, lse, *_ = self._load()._flash_attn_fwd(
            q, k, v, softmax_scale=scale, causal=causal, return_lse=True, out=into, softcap=self.softcap,
            **_named(lengths), **_left_side(window),
        )  # fmt: skip
        return out, lse

    def backward_varlen(
        self, dout: Tensor, saved: Saved, lengths: Lengths | None, causal: bool, scale: float,
        into: GradientMemory = (None, None, None), window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, out, lse = saved
        if k.shape[-1] != v.shape[-1] and q.shape[-2] != k.shape[-2]:  # its backward pass takes only one of the two
            padded = with_padding(self, k.shape[-1], v.shape[-1])
            return padded.backward_varlen(dout, saved, lengths, causal, scale, into, window)
        dq, dk, dv = gradient_memory(into, saved)
        self._load()._flash_attn_bwd(
            q, k, v, out, dout, lse.contiguous(), softmax_scale=scale, causal=causal, dq=dq, dk=dk, dv=dv,
            softcap=self.softcap, deterministic=self.deterministic, **_named(lengths), **_left_side(window),
        )  # fmt: skip
        return dq, dk, dv


def cudnn_is_faster(saved: Saved) -> bool:
    """Returns whether cuDNN's backward pass is faster than FlashAttention-4's: 1.25 times for heads of 256 on Hopper.

    cuDNN takes 70 ms to set up each new length, so that only lengths that a run is likely to repeat count.
    """
    (_, queries, _, dim), keys = saved.q.shape, saved.k.shape[1]
    repeats = min(queries, keys) >= CUDNN_LENGTH and queries % CUDNN_LENGTH == keys % CUDNN_LENGTH == 0
    return repeats and dim == saved.v.shape[-1] == 256 and _has_cudnn_for_256(saved.q.device)


@cache
def _has_cudnn_for_256(device: torch.device) -> bool:
    version = torch.backends.cudnn.version() or 0
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and version >= CUDNN_FOR_256


def _sides(window: int | None) -> dict[str, int]:
    """Converts a window to FA2's and FA3's form: visible keys to the left and right; -1: all."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": -1 if window is None else 0}


def _left_side(window: int | None) -> dict[str, int]:
    """Converts a causal mask's window to FA4's form: visible keys to the left."""
    return {} if window is None else {"window_size_left": window - 1}


def _named(lengths: Lengths | None) -> dict[str, Any]:
    """Converts lengths of segments to keyword arguments of FA4; none for a dense batch."""
    if lengths is None:
        return {}
    return {
        "cu_seqlens_q": lengths.q, "cu_seqlens_k": lengths.k,
        "max_seqlen_q": lengths.longest_q, "max_seqlen_k": lengths.longest_k,
    }  # fmt: skip


@cache  # each call would make Python repeat warnings that it shows once
def _silence_fa4() -> None:
    """Silences a harmless warning of FlashAttention-4's compiler, which would fill pages on every rank."""
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted", category=UserWarning)
