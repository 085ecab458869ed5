"""Distributed attention against whole-sequence attention in float64: every schedule, world, head count and length."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from worlds import spawn

from lightseq.attention import SequenceContext, attention, make_context
from lightseq.kernels import KernelSpec
from lightseq.layout import shard, unshard
from lightseq.schedule import SCHEDULES
from lightseq.schedule_cost import AttentionShape

WORLDS = [1, 2, 3, 4, 5, 8]
HEADS = [(4, 4), (6, 2)]  # query and key/value heads


def _context(schedule: str, kernel: str, dtype: torch.dtype, dim: int, device: str = "cpu") -> SequenceContext:
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    spec = KernelSpec(device, capability, dtype, dim)
    shape = AttentionShape(1024, 4, 2, dim)
    target = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    return make_context(dist.group.WORLD, target, spec, shape, schedule, kernel)


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return (scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def _whole(length: int, heads: tuple[int, int], dim: int, batch: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(length + heads[0])
    shapes = [(batch, length, heads[0], dim), *[(batch, length, heads[1], dim)] * 2, (batch, length, heads[0], dim)]
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def _expected(whole: list[Tensor]) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in whole[:3])
    out = _dense(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3])]


def _distributed(context: SequenceContext, whole: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence, computed by all ranks and joined."""
    length, layout = whole[0].shape[1], context.layout
    q, k, v, dout = (shard(x, layout, context.rank) for x in whole)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out, _ = attention(q, k, v, context)
    local = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    gathered = []
    for x in local:
        parts = [torch.empty_like(x) for _ in range(layout.world)]
        dist.all_gather(parts, x.contiguous(), group=context.group)
        gathered.append(unshard(parts, layout, length))
    return gathered


def _parity(rank: int) -> float:
    world = dist.get_world_size()
    worst = 0.0
    for name in SCHEDULES:
        for kernel in ("reference", "cpu"):
            context = _context(name, kernel, torch.float64, 8)
            for heads in HEADS:
                for length in (1, 4 * world, 4 * world + 3):
                    whole = _whole(length, heads, 8)
                    for got, want in zip(_distributed(context, whole), _expected(whole), strict=True):
                        worst = max(worst, (got - want).abs().max().item())
    return worst


@pytest.mark.parametrize("world", WORLDS)
def test_output_and_gradients_equal_whole_sequence_attention(world: int) -> None:
    assert max(spawn(world, _parity)) < 1e-12


def _half_precision_errors(rank: int, device: str, kernels: tuple[str, ...], dim: int, length: int) -> dict:
    """Relative errors against float64 of every schedule and kernel, and of plain attention in bfloat16 on one rank."""
    dtype = torch.bfloat16
    whole = [x.to(dtype).double().to(device) for x in _whole(length, (8, 2), dim, batch=1)]
    want = _expected(whole)
    narrow = [x.to(dtype) for x in whole]
    plain = _expected(narrow)

    def errors(got: list[Tensor]) -> list[float]:
        return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]

    result = {"plain": errors(plain)}
    for kernel in kernels:
        spec = KernelSpec(device, torch.cuda.get_device_capability() if device == "cuda" else (0, 0), dtype, dim)
        from lightseq.kernels import KERNELS

        if KERNELS[kernel](spec).why_not(spec) is None:
            for name in SCHEDULES:
                result[f"{kernel} {name}"] = errors(_distributed(_context(name, kernel, dtype, dim, device), narrow))
    return result


def _check_half_precision(results: dict) -> None:
    plain = results.pop("plain")
    for label, errors in results.items():
        for what, error, baseline in zip(("out", "dq", "dk", "dv"), errors, plain, strict=True):
            assert error <= 2 * baseline, f"{label}, {what}: {error} against {baseline} of plain bfloat16 attention"


def test_bfloat16_error_does_not_grow_with_the_ring() -> None:
    for world in (2, 5):
        _check_half_precision(spawn(world, _half_precision_errors, "cpu", ("cpu",), 32, 160)[0])


@pytest.mark.gpu(4)
@pytest.mark.parametrize("dim", [64, 128])
def test_gpu_schedules_match_float64_over_nccl(dim: int) -> None:
    kernels = ("fa4", "fa3", "fa2", "cudnn", "aten")
    _check_half_precision(spawn(4, _half_precision_errors, "cuda", kernels, dim, 2048 + 5, device="cuda")[0])


def _refusals(rank: int) -> None:
    context = _context("zigzag", "auto", torch.float32, 8)
    x, kv = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 2, 8)
    cases = [
        ((x, kv[:, :2], kv[:, :2]), "use_cache=False"),
        ((x, kv, kv[..., :4]), "do not fit together"),
        ((x[:, :3], kv[:, :3], kv[:, :3]), "3 local tokens do not divide"),
        ((x[:, :, :5], kv, kv), "5 query heads do not divide among 2"),
    ]
    for tensors, words in cases:
        with pytest.raises(ValueError, match=words):
            attention(*tensors, context)
    q = x.clone().requires_grad_()
    with pytest.raises(ValueError, match="log-sum-exp"):
        attention(q, kv, kv, context)[1].sum().backward()
    with pytest.raises(ValueError, match="transport nccl does not run on cpu"):
        make_context(
            dist.group.WORLD, torch.device("cpu"), KernelSpec("cpu", (0, 0), torch.float32, 8),
            AttentionShape(16, 2, 2, 8), transport="nccl",
        )  # fmt: skip


def test_shapes_that_cannot_be_right_are_refused() -> None:
    spawn(1, _refusals)


def _opcheck(rank: int) -> None:
    context = _context("zigzag", "cpu", torch.float32, 8)
    q = torch.randn(1, 4, 4, 8, requires_grad=True)
    kv = torch.randn(1, 4, 2, 8, requires_grad=True)
    torch.library.opcheck(
        torch.ops.lightseq.attention.default, (q, kv, kv.clone(), 0.3, context.name),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


def test_the_operator_keeps_torchs_contract() -> None:
    spawn(1, _opcheck)
