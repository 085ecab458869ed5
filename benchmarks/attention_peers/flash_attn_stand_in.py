"""Replacement for a missing flash-attn package: the same FlashAttention-2 kernels, called through torch.

Contains only functions that ring-flash-attn 0.1.8 and ringmaster 0.2 call, for causal attention without dropout. Costs
one extra copy of each gradient, because the package writes into given tensors.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
) -> tuple[Tensor, Tensor, None, Tensor]:  # fmt: skip
    out, lse, random_state, *_ = aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, False, scale=softmax_scale
    )
    return out, lse, None, random_state


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    no_dropout, nothing = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    grads = aten._flash_attention_backward(
        dout, q, k, v, out, softmax_lse.contiguous(), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, causal, no_dropout, nothing, scale=softmax_scale,
    )  # fmt: skip
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)
    return nothing


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, None, Tensor]:
    whole = None, None, q.shape[1], k.shape[1]
    return _flash_attn_varlen_forward(q, k, v, *whole, dropout_p, softmax_scale, causal)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    tensors, whole = (dout, q, k, v, out, softmax_lse, dq, dk, dv), (None, None, q.shape[1], k.shape[1])
    return _flash_attn_varlen_backward(*tensors, *whole, dropout_p, softmax_scale, causal)


def is_needed() -> bool:
    """Returns True if flash-attn is missing. Imports a module, because flash-attn-4 has the same top-level name."""
    try:
        import flash_attn.flash_attn_interface  # noqa: F401
    except ImportError:
        return True
    return False


def kernel() -> str:
    """Returns the name of the FlashAttention-2 build in use: the package's or torch's."""
    return "aten" if is_needed() else "fa2"


@contextmanager
def in_place() -> Iterator[None]:
    """Replaces flash-attn only while a peer is imported, because other kernels look for the real package."""
    if not is_needed():
        yield
        return
    made = ModuleType("flash_attn.flash_attn_interface")
    functions = _flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward
    made.__dict__.update({function.__name__: function for function in functions})
    sys.modules[made.__name__] = made
    try:
        yield
    finally:
        del sys.modules[made.__name__]
