"""Stand-in for the functions of FlashAttention-2 that ring-flash-attn calls, in plain torch on a CPU.

They have its parameters, by name and in order, because ring-flash-attn reads them. Those that are not used say nothing
of dropout, windows and soft caps, which no caller here asks for.
"""

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Lets `flash_attn` be imported, and transformers take `flash_attention_2` on a CPU."""
    import transformers.modeling_utils
    from transformers import PreTrainedModel

    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__spec__ = ModuleSpec("flash_attn", loader=None)  # by which axolotl looks for it
    for function in (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    ):
        setattr(interface, function.__name__, function)
    sys.modules |= {package.__name__: package, interface.__name__: interface}
    PreTrainedModel._flash_attn_can_dispatch = lambda self, **_: True
    transformers.modeling_utils.lazy_import_flash_attention = lambda *_, **__: None


def scores_of(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """Returns the scores (heads, queries, keys) of one segment; a causal mask is aligned bottom-right."""
    scores = torch.einsum("shd,thd->hst", q, k) * scale
    queries, keys = scores.shape[1:]
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return scores.masked_fill(hidden, -torch.inf) if causal else scores


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns the output (queries, heads, dim) and the lse (heads, queries) of one segment."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = scores_of(q, k, scale, causal)
    return torch.einsum("hst,thd->shd", scores.softmax(-1), v), scores.logsumexp(-1)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v of one segment; `out` and `lse` may cover more keys."""
    groups = q.shape[1] // k.shape[1]
    all_k, all_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    p = torch.exp(scores_of(q, all_k, scale, causal) - lse[..., None])
    delta = (dout * out).sum(-1).T[..., None]
    ds = p * (torch.einsum("shd,thd->hst", dout, all_v) - delta) * scale
    dq = torch.einsum("hst,thd->shd", ds, all_k)
    dk, dv = torch.einsum("hst,shd->thd", ds, q), torch.einsum("hst,shd->thd", p, dout)
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: None, return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    found = [forward(*row, softmax_scale, causal) for row in zip(q, k, v, strict=True)]
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found]), None, None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: None, deterministic: bool, rng_state: Any = None,
) -> None:  # fmt: skip
    for row, inputs in enumerate(zip(dout, q, k, v, out, softmax_lse, strict=True)):
        for target, gradient in zip((dq, dk, dv), backward(*inputs, softmax_scale, causal), strict=True):
            target[row] = gradient


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    parts = segments(cu_seqlens_q, cu_seqlens_k)
    found = [forward(q[queries], k[keys], v[keys], softmax_scale, causal) for queries, keys in parts]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1), None, None


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: None, deterministic: bool, rng_state: Any = None,
) -> None:  # fmt: skip
    for queries, keys in segments(cu_seqlens_q, cu_seqlens_k):
        given = dout[queries], q[queries], k[keys], v[keys], out[queries], softmax_lse[:, queries]
        dq[queries], dk[keys], dv[keys] = backward(*given, softmax_scale, causal)


def segments(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """Returns the queries and the keys of each segment."""
    queries, keys = ([slice(a, b) for a, b in pairwise(x.tolist())] for x in (cu_seqlens_q, cu_seqlens_k))
    return list(zip(queries, keys, strict=True))
