"""DeepSpeed-Ulysses (arXiv 2309.14509): all-to-all between sequence and heads around one kernel."""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Case, Layer


@contextmanager
def layer(case: Case, inner: str) -> Iterator[Layer]:
    if case.heads % case.world or case.kv_heads % case.world:
        raise ValueError(
            f"{case.heads} query and {case.kv_heads} key/value heads are not divisible by {case.world} ranks"
        )
    attend = fa4(case) if inner == "fa4" else lambda *qkv: sdpa(case, *(x.transpose(1, 2) for x in qkv)).transpose(1, 2)

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (AllToAll.apply(x, case.group, True) for x in (q, k, v))
        return AllToAll.apply(attend(q, k, v), case.group, False)

    yield Layer(
        attend=around,
        positions=case.positions("contiguous"),
        ranks=case.world,
        facts={"kernel": inner, "transport": "nccl" if case.on_gpu else "gloo"},
    )


def sdpa(case: Case, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    grouped = case.heads != case.kv_heads
    return F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped)


def fa4(case: Case) -> Callable[..., Tensor]:
    case.needs_cuda("fa4 attention")
    window = None if case.window is None else case.window - 1
    # Compilation prints pages of harmless warnings on every rank.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted", category=UserWarning)
    function = importlib.import_module("flash_attn.cute.interface").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=True, window_size=(window, None))
        return out[0] if isinstance(out, tuple) else out

    return attend


class AllToAll(torch.autograd.Function):
    """All-to-all between (B, local S, all H, D) and (B, whole S, local H, D). The backward pass is the inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return exchange(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return exchange(grad, ctx.group, not ctx.to_heads), None, None


def exchange(x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    world = dist.get_world_size(group)
    b, s, h, d = x.shape
    if to_heads:
        out = all_to_all(x.reshape(b, s, world, h // world, d).permute(2, 0, 1, 3, 4), group)
        return out.transpose(0, 1).reshape(b, world * s, h // world, d)
    out = all_to_all(x.reshape(b, world, s // world, h, d).transpose(0, 1), group)
    return out.permute(1, 2, 0, 3, 4).reshape(b, s // world, world * h, d)


def all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out
