"""DeepSpeed-Ulysses (arXiv 2309.14509): all-to-all between sequence and heads around one kernel."""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import Case, Layer

SDPA_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
KERNEL_NAMES = {"flash": "aten", "cudnn": "cudnn", "sdpa": "sdpa", "fa4": "fa4"}  # lightseq's names of the kernels


@contextmanager
def layer(case: Case, inner: str) -> Iterator[Layer]:
    check_heads(case)
    if inner != "sdpa":
        case.needs_cuda(f"{inner} attention")
    attend = (
        fa4(case.window)
        if inner == "fa4"
        else lambda *qkv: sdpa(case, *(x.transpose(1, 2) for x in qkv)).transpose(1, 2)
    )

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (AllToAll.apply(x, case.group, True) for x in (q, k, v))
        return AllToAll.apply(attend(q, k, v), case.group, False)

    with sdpa_kernel(SDPA_BACKENDS[inner]) if inner in SDPA_BACKENDS else nullcontext():
        yield Layer(
            attend=around,
            positions=case.positions("contiguous"),
            ranks=case.world,
            facts={"kernel": KERNEL_NAMES[inner], "transport": "nccl" if case.on_gpu else "gloo"},
        )


def check_heads(case: Case) -> None:
    """Raises ValueError if the heads are not divisible by the ranks."""
    if case.heads % case.world or case.kv_heads % case.world:
        raise ValueError(
            f"{case.heads} query and {case.kv_heads} key/value heads are not divisible by {case.world} ranks"
        )


def sdpa(case: Case, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    grouped = case.heads != case.kv_heads
    return F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped)


def fa4(window: int | None = None) -> Callable[..., Tensor]:
    # Compilation prints pages of harmless warnings on every rank.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted", category=UserWarning)
    function = importlib.import_module("flash_attn.cute.interface").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=True, window_size=(None if window is None else window - 1, None))
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
