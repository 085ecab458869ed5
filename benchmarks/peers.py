"""Other implementations of distributed attention, each as a layer to be measured beside lightseq's.

A peer that cannot run raises what it has to say (an ImportError, a ValueError, ...), which becomes the reason it is
skipped with. To add one, write a context manager that yields a `Layer`, and name it in `PEERS`.
"""

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import flash_attn_stand_in
from benchmarks.measure import Case, Layer
from lightseq.schedule.layout import Layout

ZIGZAG, CONTIGUOUS, STRIPED = ("zigzag", 2), ("contiguous", 1), ("striped", 1)
SDPA_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SDPA_KERNELS = {"flash": "aten", "cudnn": "cudnn", "sdpa": "sdpa", "fa4": "fa4"}  # as lightseq calls the same kernels


def positions(case: Case, layout: tuple[Any, int]) -> Tensor:
    """Where this rank's tokens lie in the sequence, which is padded to what every layout here divides."""
    unit = 2 * case.world
    return Layout(layout[0], case.world, layout[1]).positions(case.rank, -(-case.length // unit) * unit)


def needs_cuda(case: Case, name: str) -> None:
    if case.device.type != "cuda":
        raise ValueError(f"{name} needs a CUDA device")


# ---- ring-flash-attn ------------------------------------------------------------------------------------------------


@contextmanager
def ring_flash_attn(case: Case, function: str, layout: tuple[Any, int]) -> Iterator[Layer]:
    """https://github.com/zhuzilin/ring-flash-attention over FlashAttention-2."""
    package = import_ring_flash_attn()
    needs_cuda(case, "ring-flash-attn")
    attend = getattr(package, function)
    yield Layer(
        attend=lambda q, k, v: attend(q, k, v, causal=True, group=case.group),
        positions=positions(case, layout),
        ranks=case.world,
        facts={"kernel": flash_attention_2(), "transport": "nccl"},
    )


def flash_attention_2() -> str:
    """Whose FlashAttention-2 it is: the package's, or torch's own build."""
    return "aten" if flash_attn_stand_in.is_needed() else "fa2"


def import_ring_flash_attn() -> ModuleType:
    """Its adapters ask transformers for names that version 5 dropped; nothing here needs them, so they stay out."""
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.__dict__.update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault(adapters.__name__, adapters)
    with flash_attn_stand_in.in_place() if flash_attn_stand_in.is_needed() else contextlib.nullcontext():
        return importlib.import_module("ring_flash_attn")


# ---- torch's context parallel ---------------------------------------------------------------------------------------


@contextmanager
def torch_context_parallel(case: Case, rotation: str, backend: str) -> Iterator[Layer]:
    """torch.distributed.tensor.experimental.context_parallel: SDPA over its own zigzag layout."""
    needs_cuda(case, "torch's context parallel")
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    local = positions(case, ZIGZAG)
    # It picks the layout by the length of the buffers it is given. One of a token a place does: q, k and v are made
    # local from the start, so that memory does not count whole copies that it would keep to restore.
    marker = torch.zeros(1, 1, len(local) * case.world, 1, device=case.device)
    mesh = DeviceMesh.from_group(case.group, "cuda")
    sharded = context_parallel(mesh, buffers=[marker], buffer_seq_dims=[2], no_restore_buffers={marker})
    with sdpa_kernel(SDPA_BACKENDS[backend]), sharded:
        yield Layer(
            attend=partial(sdpa, case),
            positions=local,
            ranks=case.world,
            facts={"kernel": SDPA_KERNELS[backend], "transport": "nccl"},
            heads_first=True,
        )


def sdpa(case: Case, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    grouped = case.heads != case.kv_heads
    return F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped)


# ---- Ulysses --------------------------------------------------------------------------------------------------------


class AllToAll(torch.autograd.Function):
    """Between (B, S local, all heads, D) and (B, S whole, local heads, D); its own inverse backward."""

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


@contextmanager
def ulysses(case: Case, inner: str) -> Iterator[Layer]:
    """DeepSpeed-Ulysses (arXiv 2309.14509): heads for sequence by all-to-all, around one kernel."""
    if case.heads % case.world or case.kv_heads % case.world:
        raise ValueError(f"{case.heads} query and {case.kv_heads} key/value heads do not divide by {case.world} ranks")
    if inner != "sdpa":
        needs_cuda(case, f"{inner} attention")
    attend = fa4() if inner == "fa4" else lambda q, k, v: sdpa(case, *map(_swap, (q, k, v))).transpose(1, 2)

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (AllToAll.apply(x, case.group, True) for x in (q, k, v))
        return AllToAll.apply(attend(q, k, v), case.group, False)

    with sdpa_kernel(SDPA_BACKENDS[inner]) if inner in SDPA_BACKENDS else contextlib.nullcontext():
        yield Layer(
            attend=around,
            positions=positions(case, CONTIGUOUS),
            ranks=case.world,
            facts={"kernel": SDPA_KERNELS[inner], "transport": "nccl" if case.device.type == "cuda" else "gloo"},
        )


def _swap(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def fa4() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    # It compiles with an argument its own compiler warns about, pages of it on every rank, to no effect.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted", category=UserWarning)
    function = importlib.import_module("flash_attn.cute.interface").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return attend


# ---- ringmaster -----------------------------------------------------------------------------------------------------


@contextmanager
def ringmaster(case: Case, module: str, function: str, layout: tuple[Any, int]) -> Iterator[Layer]:
    """https://github.com/axolotl-ai-cloud/ringmaster (package axolotl-ringmaster) over FlashAttention-2."""
    ring = importlib.import_module(module)
    needs_cuda(case, "ringmaster's flash attention")
    # It asks transformers for the flash-attn package; where that is not installed it is given the same kernels.
    ops = flash_attn_stand_in._flash_attn_forward, flash_attn_stand_in._flash_attn_backward
    missing = flash_attn_stand_in.is_needed()
    with mock.patch.object(ring, "_flash_ops", lambda *_: ops) if missing else contextlib.nullcontext():
        yield Layer(
            attend=lambda q, k, v: getattr(ring, function)(q, k, v, group=case.group, scaling=None).transpose(1, 2),
            positions=positions(case, layout),
            ranks=case.world,
            facts={"kernel": flash_attention_2(), "transport": "nccl"},
            heads_first=True,
        )


Peer = Callable[[Case], AbstractContextManager[Layer]]

PEERS: dict[str, Peer] = {
    "ulysses-fa4": partial(ulysses, inner="fa4"),
    "ulysses-cudnn": partial(ulysses, inner="cudnn"),
    "ulysses-sdpa": partial(ulysses, inner="sdpa"),
    "torch-cp-allgather-cudnn": partial(torch_context_parallel, rotation="allgather", backend="cudnn"),
    "torch-cp-allgather-flash": partial(torch_context_parallel, rotation="allgather", backend="flash"),
    "torch-cp-alltoall-cudnn": partial(torch_context_parallel, rotation="alltoall", backend="cudnn"),
    "torch-cp-alltoall-flash": partial(torch_context_parallel, rotation="alltoall", backend="flash"),
    "ring-flash-attn-ring": partial(ring_flash_attn, function="ring_flash_attn_func", layout=CONTIGUOUS),
    "ring-flash-attn-zigzag": partial(ring_flash_attn, function="zigzag_ring_flash_attn_func", layout=ZIGZAG),
    "ring-flash-attn-stripe": partial(ring_flash_attn, function="stripe_flash_attn_func", layout=STRIPED),
    "ringmaster-zigzag": partial(
        ringmaster, module="ringmaster.ring.zigzag", function="zigzag_ring_attention", layout=ZIGZAG
    ),
    "ringmaster-distflash": partial(
        ringmaster, module="ringmaster.ring.distflash", function="distflash_attention", layout=CONTIGUOUS
    ),
}
