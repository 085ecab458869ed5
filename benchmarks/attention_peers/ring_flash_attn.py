"""https://github.com/zhuzilin/ring-flash-attention with FlashAttention-2, for packed documents.

Its variants cut every document into one piece (ring) or two pieces (zigzag) per rank, or gather all keys (llama3).
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Case, Layer

aten = torch.ops.aten


def flash_attn_is_missing() -> bool:
    """Imports a module, because flash-attn-4 has the same top-level name."""
    try:
        import flash_attn.flash_attn_interface  # noqa: F401
    except ImportError:
        return True
    return False


def import_package() -> ModuleType:
    """Imports ring-flash-attn without its adapters, which need names that transformers 5 removed.

    If the flash-attn package is missing, the same FlashAttention-2 kernels are called through torch. They take the
    package's place only during the import, because other kernels look for the real package.
    """
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.__dict__.update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault(adapters.__name__, adapters)
    if not flash_attn_is_missing():
        return importlib.import_module("ring_flash_attn")
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface.__dict__.update(
        _flash_attn_varlen_forward=_varlen_forward,
        _flash_attn_varlen_backward=_varlen_backward,
        _flash_attn_forward=None,  # imported, but called for single documents only
        _flash_attn_backward=None,
    )
    sys.modules[interface.__name__] = interface
    try:
        return importlib.import_module("ring_flash_attn")
    finally:
        del sys.modules[interface.__name__]


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
) -> tuple[Tensor, Tensor, None, Tensor]:  # fmt: skip
    """Replaces flash-attn's function for causal attention without dropout."""
    out, lse, random_state, *_ = aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, False, scale=softmax_scale
    )
    return out, lse, None, random_state


def _varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    """Replaces flash-attn's function. Copies each gradient once more, because the package writes into given tensors."""
    no_dropout, nothing = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    grads = aten._flash_attention_backward(
        dout, q, k, v, out, softmax_lse.contiguous(), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, causal, no_dropout, nothing, scale=softmax_scale,
    )  # fmt: skip
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)
    return nothing


@contextmanager
def layer(case: Case, function: str, pieces: int) -> Iterator[Layer]:
    attend = getattr(package_for(case), function)
    edges = torch.tensor(case.boundaries, dtype=torch.int32)
    if (edges.diff() % (pieces * case.world)).any():
        raise ValueError(f"a document's length is not a multiple of {pieces * case.world}")
    mine = [case.rank, 2 * case.world - 1 - case.rank][:pieces]  # the second piece mirrors the first
    documents = [torch.arange(a, b).chunk(pieces * case.world) for a, b in pairwise(case.boundaries)]
    local = torch.cat([document[piece] for document in documents for piece in mine])
    edges = edges // case.world
    longest, edges = int(edges.diff().max()), edges.to(case.device)
    yield packed_layer(case, local, lambda q, k, v: attend(q, k, v, edges, longest, causal=True, group=case.group))


@contextmanager
def llama3_layer(case: Case, all_heads: bool) -> Iterator[Layer]:
    package = package_for(case)
    edges = torch.tensor(case.boundaries, dtype=torch.int32, device=case.device)
    *four, keys = package.llama3_flash_attn_prepare_cu_seqlens(edges, True, case.rank, case.world)
    stride = case.kv_heads if all_heads else 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return package.llama3_flash_attn_varlen_func(
            q, k, v, *four, heads_k_stride=stride, local_k_slice=keys, causal=True, group=case.group
        )

    yield packed_layer(case, torch.arange(case.length).chunk(case.world)[case.rank], attend)


def package_for(case: Case) -> Any:
    package = import_package()
    case.needs_cuda("ring-flash-attn")
    return package


def packed_layer(case: Case, local: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Layer:
    return Layer(
        attend=lambda q, k, v: attend(q[0], k[0], v[0]).unsqueeze(0),
        positions=local,
        ranks=case.world,
        facts={"kernel": "aten" if flash_attn_is_missing() else "fa2", "transport": "nccl"},
    )
