"""Distributed attention against whole-sequence attention in float64: every schedule, world, head count and length."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from operators import Operators
from schedules import fitting
from torch import Tensor
from torch.profiler import profile
from worlds import GPU_WORLDS, NCCL_WORLDS, spawn

from lightseq.attention import executor
from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import Progress, SequenceContext, make_context
from lightseq.attention.operator import LONG_FLOPS, _advance, attention
from lightseq.comm.transport import Exchange, Outbox, Receive, SendRecvTransport
from lightseq.comm.transport_choice import NoTransport
from lightseq.kernels.attention.base import Kernel, KernelSpec, Saved
from lightseq.kernels.attention.registry import KERNELS
from lightseq.kernels.attention.tile import backward_tile, forward_tile
from lightseq.schedule.algorithms import SCHEDULES, make_schedule
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.layout import shard, unshard
from lightseq.schedule.table import Mask

WORLDS = [1, 2, 3, 4, 5, 8]


def _context(
    schedule: str,
    kernel: str,
    dtype: torch.dtype,
    dim: int,
    device: str = "cpu",
    transport: str = "auto",
    heads: tuple[int, int] = (8, 2),
    **sizes: Any,
) -> SequenceContext:
    target = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    config = AttentionConfig(schedule, kernel, transport, dtype=dtype, device=target, **sizes)
    return make_context(dist.group.WORLD, AttentionShape(1024, *heads, dim), config)


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return (scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def _whole(length: int, heads: tuple[int, int], dim: int, batch: int = 2, value_dim: int | None = None) -> list[Tensor]:
    value_dim = value_dim or dim
    g = torch.Generator().manual_seed(length + heads[0])
    query, key = heads
    shapes = ((query, dim), (key, dim), (key, value_dim), (query, value_dim))
    return [torch.randn(batch, length, *shape, generator=g, dtype=torch.float64) for shape in shapes]


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


class Variant(NamedTuple):
    """A schedule and what it is run on."""

    name: str
    ulysses_size: int
    head_groups: int
    heads: tuple[tuple[int, int], ...]  # query and key/value heads
    kernels: tuple[str, ...]
    lengths: tuple[int, ...]


def _heads(groups: int) -> tuple[tuple[int, int], ...]:
    """One head a group; several query heads to a key/value head; key/value heads that several groups share."""
    if groups == 1:
        return (4, 4), (6, 2)
    shared = max(d for d in range(1, groups) if groups % d == 0)
    return (groups, groups), (2 * groups, groups), (2 * groups, shared)


def _variants(world: int) -> list[Variant]:
    """Every schedule with causal masks of both alignments; composed with others in every way; in big worlds fewer."""
    lengths = (1, 4 * world, 4 * world + 3) if world <= 5 else (1, 4 * world + 3)
    kernels = ("reference", "cpu") if world <= 5 else ("cpu",)
    found = []
    for name, algorithm in SCHEDULES.items():
        plain = {"ulysses": world, "usp": world // 2}.get(name, 1)
        if name == "usp" and (world < 4 or world % 2):
            continue
        found.append(Variant(name, plain, 1, _heads(plain), kernels, lengths))
        sizes = [u for u in range(1, world + 1) if world % u == 0]
        if name in ("ulysses", "usp"):
            sizes = [plain] if name == "ulysses" or world <= 4 else sizes[1:-1]
        elif world > 5:
            sizes = [1, 2]
        for ulysses, groups in product(sizes, (1, 2) if algorithm.has_head_groups else (1,)):
            if (ulysses, groups) != (plain, 1):
                kernel = "reference" if groups == 2 else "cpu"
                composed = _heads(ulysses * groups)[-1:]
                found.append(Variant(name, ulysses, groups, composed, (kernel,), lengths[-1:]))
    return found


def _parity(rank: int) -> float:
    world = dist.get_world_size()
    worst = 0.0
    wanted: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}
    for v in _variants(world):
        for kernel in v.kernels:
            sizes = {"ulysses_size": v.ulysses_size, "head_groups": v.head_groups}
            context = _context(v.name, kernel, torch.float64, 8, heads=v.heads[0], **sizes)
            for heads, length in product(v.heads, v.lengths):
                if (heads, length) not in wanted:  # narrower values, as multi-head latent attention has, in most cases
                    inputs = _whole(length, heads, 8, value_dim=8 if length == 1 else 6)
                    wanted[heads, length] = inputs, _expected(inputs)
                whole, expected = wanted[heads, length]
                for got, want in zip(_distributed(context, whole), expected, strict=True):
                    error = (got - want).abs().max().item()
                    assert error < 1e-12, f"{v}: {heads} heads, length {length}, kernel {kernel}: off by {error}"
                    worst = max(worst, error)
    return worst


def _kept_or_gathered_twice(rank: int) -> None:
    heads, dim, value_dim, length = (8, 2), 8, 6, 48
    whole = _whole(length, heads, dim, value_dim=value_dim)
    expected = _expected(whole)
    for groups, kernel in product((1, 2), ("reference", "cpu")):
        sent = {}
        for keep in (True, False):
            context = _context("ulysses", kernel, torch.float64, dim, head_groups=groups, keep_gathered=keep)
            assert context.keeps_gathered == keep
            for got, want in zip(_distributed(context, whole), expected, strict=True):
                assert (got - want).abs().max() < 1e-12, (groups, kernel, keep)
            sent[keep] = context.transport.bytes_sent
            leaves = [shard(x, context.layout, rank).requires_grad_() for x in whole[:3]]
            own = [2 * x for x in leaves]
            places = [weakref.ref(x.untyped_storage()) for x in own]
            out, _ = attention(*own, context)
            del own
            gc.collect()
            assert [place() is None for place in places] == [keep] * 3, "what was gathered takes their place"
            out.sum().backward()
        kv = max(heads[1], groups * context.schedule.world)  # shared heads are sent to each rank that has them
        width = heads[0] * dim + kv * (dim + value_dim)
        away = 2 * length * 8 * width / 2 / 2  # half of the heads of half of the tokens
        assert sent[False] - sent[True] == away, (groups, sent)


def test_gathered_tensors_kept_for_the_backward_pass_are_right_and_sent_once() -> None:
    spawn(2, _kept_or_gathered_twice)


@pytest.mark.parametrize("world", slow_except([1, 3], WORLDS))
def test_output_and_gradients_equal_whole_sequence_attention(world: int) -> None:
    assert max(spawn(world, _parity)) < 1e-12


def _half_precision_errors(
    rank: int, device: str, kernels: tuple[str, ...], dim: int, length: int, transport: str = "auto"
) -> dict:
    """Relative errors against float64 of every kernel: by itself ("one rank"), and under every schedule."""
    dtype = torch.bfloat16
    whole = [x.to(dtype).double().to(device) for x in _whole(length, (8, 2), dim, batch=1)]
    want = _expected(whole)
    narrow = [x.to(dtype) for x in whole]

    def errors(got: list[Tensor]) -> list[float]:
        return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]

    result: dict[str, dict[str, list[float]]] = {}
    for name in kernels:
        spec = KernelSpec(device, torch.cuda.get_device_capability() if device == "cuda" else (0, 0), dtype, dim)
        if (kernel := KERNELS[name].make(spec)).why_unavailable(spec) is None:
            result[name] = {"one rank": errors(_by_itself(kernel, narrow))}
            for schedule in fitting(dist.get_world_size(), 8, 2):
                context = _context(schedule, name, dtype, dim, device, transport)
                result[name][schedule] = errors(_distributed(context, narrow))
    return result


def _by_itself(kernel: Kernel, whole: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence in one call of the kernel."""
    (q, k, v, dout), scale = whole, whole[0].shape[-1] ** -0.5
    out, lse = forward_tile(kernel, q, k, v, Mask.CAUSAL, scale)
    return [out, *backward_tile(kernel, dout, Saved(q, k, v, out, lse), Mask.CAUSAL, scale)]


def _check_half_precision(results: dict[str, dict[str, list[float]]]) -> None:
    assert results, "no kernel ran"
    for kernel, by_schedule in results.items():
        alone = by_schedule["one rank"]
        for schedule, errors in by_schedule.items():
            for what, error, allowed in zip(("out", "dq", "dk", "dv"), errors, alone, strict=True):
                assert error <= 2 * allowed, f"{schedule}, {kernel}, {what}: {error} against {allowed} of one call"


@pytest.mark.slow
def test_bfloat16_error_does_not_grow_with_the_ring() -> None:
    """On 8 ranks as on 2. Partial gradients that add up in bfloat16 would be 1.2 to 1.4 times as far off."""
    few, more, most = (spawn(n, _half_precision_errors, "cpu", ("cpu",), 32, 160)[0] for n in (2, 5, 8))
    for results in (few, more, most):
        _check_half_precision(results)
    for schedule, errors in few["cpu"].items():
        for what, error, before in zip(("out", "dq", "dk", "dv"), most["cpu"][schedule], errors, strict=True):
            assert error <= 1.15 * before, f"{schedule}, {what}: {error} on 8 ranks, {before} on 2"


ON_GPU = "fa4", "fa3", "fa2", "cudnn", "aten"


@pytest.mark.parametrize("world", NCCL_WORLDS)
def test_gpu_schedules_match_float64(world: int) -> None:
    _check_half_precision(spawn(world, _half_precision_errors, "cuda", ON_GPU, 64, 2053, "nccl", device="cuda")[0])


@pytest.mark.parametrize("world", [*GPU_WORLDS, pytest.param(3, marks=pytest.mark.gpu(1))])
def test_gpu_schedules_over_mapped_memory_match_float64(world: int) -> None:
    results = spawn(world, _half_precision_errors, "cuda", ON_GPU, 128, 2053, "symmetric", device="cuda")
    _check_half_precision(results[0])


def test_only_the_oldest_of_too_many_lengths_is_forgotten() -> None:
    table = make_schedule("prefix", 2)
    shapes = [(torch.Size((1, n, 4, 8)), torch.Size((1, n, 2, 8))) for n in (4, 8, 12)]
    passes = [executor._forward_spec(table, 0, q, v, torch.float32) for q, v in shapes]
    outbox = Outbox(torch.empty(max(x.outbox_bytes for x in passes), dtype=torch.uint8))
    prepared = partial(executor.program_and_launches, transport=NoTransport(torch.device("cpu")), outbox=outbox)
    with patch.object(executor, "MAX_PROGRAMS", 2):
        found = [prepared(asked) for asked in passes]
        assert all(prepared(asked) is x for asked, x in zip(passes[1:], found[1:], strict=True))
        assert prepared(passes[0]) is not found[0]


def _refusals(rank: int) -> None:
    context = _context("zigzag", "auto", torch.float32, 8, heads=(6, 2))
    x, kv = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 2, 8)
    cases = [
        ((x, kv[:, :2], kv[:, :2]), "use_cache=False"),
        ((x, kv, kv[:, :, :1]), "do not fit together"),
        ((x[:, :3], kv[:, :3], kv[:, :3]), "3 local tokens do not divide"),
        ((x[:, :, :5], kv, kv), "5 query heads are not a multiple of 2"),
    ]
    for tensors, words in cases:
        with pytest.raises(ValueError, match=words):
            attention(*tensors, context)
    q = x.clone().requires_grad_()
    with pytest.raises(ValueError, match="log-sum-exp"):
        attention(q, kv, kv, context)[1].sum().backward()
    with pytest.raises(ValueError, match="transport nccl does not run on cpu"):
        _context("auto", "auto", torch.float32, 8, transport="nccl")


def test_shapes_that_cannot_be_right_are_refused() -> None:
    spawn(1, _refusals)


def _seen_and_unseen(rank: int) -> None:
    context = _context("zigzag", "auto", torch.float64, 8)
    q, k, v, dout = (shard(x, context.layout, rank) for x in _whole(16, (8, 2), 8))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    made, mode, profiler = {}, Operators(), profile()
    for how, watch in (("unseen", nullcontext()), ("mode", mode), ("profile", profiler)):
        with watch:  # type: ignore[attr-defined]
            out, _ = attention(q, k, v, context)
            made[how] = [out, *torch.autograd.grad(out, (q, k, v), dout, create_graph=True)]
        assert (type(out.grad_fn).__name__ == "_AttentionBackward") == (how == "unseen")
        with pytest.raises(ValueError, match="distributed attention has no second derivatives"):
            made[how][1].sum().backward()
    operators = {"attention", "attention_backward"}
    assert {f"lightseq.{name}.default" for name in operators} <= {*mode.ran}
    assert {f"lightseq::{name}" for name in operators} <= {event.name for event in profiler.events()}
    for how in ("mode", "profile"):
        assert all(torch.equal(a, b) for a, b in zip(made[how], made["unseen"], strict=True)), how


def test_dispatch_modes_and_profilers_see_the_operators_and_results_stay_equal() -> None:
    spawn(2, _seen_and_unseen)


def _unusual_inputs(rank: int, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Views of a joint projection, and a gradient of one number expanded, as `out.sum().backward()` brings it."""
    heads = (8, 2)
    for name in fitting(dist.get_world_size(), *heads):
        context = _context(name, "auto", dtype, 8, device, heads=heads)
        q, k, v, dout = (x.to(device) for x in _whole(16, heads, 8))
        want = _expected([q, k, v, torch.ones_like(dout)])
        joint = torch.cat([shard(x.to(dtype), context.layout, rank) for x in (q, k, v)], 2)
        q, k, v = (x.requires_grad_() for x in joint.split([heads[0], heads[1], heads[1]], 2))
        out, _ = attention(q, k, v, context)
        out.sum().backward()
        for x, whole in zip((out, q.grad, k.grad, v.grad), want, strict=True):
            assert x is not None
            assert (x - shard(whole, context.layout, rank)).abs().max() < tolerance, name


def test_inputs_and_gradients_may_have_any_strides() -> None:
    spawn(4, _unusual_inputs, "cpu", torch.float64, 1e-12)


@pytest.mark.gpu(1)
def test_inputs_and_gradients_on_gpus_may_have_any_strides() -> None:
    spawn(2, _unusual_inputs, "cuda", torch.float32, 1e-4, device="cuda")


def _with_and_without_overlap(rank: int) -> None:
    heads, events = (8, 4), []

    def noted(start: Callable[..., Any]) -> Callable[..., Any]:
        def exchange(*args: Any, **kwargs: Any) -> Callable[[], None]:
            wait = start(*args, **kwargs)
            events.append("start")
            return lambda: (wait(), events.append("end"))[0]

        return exchange

    def tile(*args: Any, **kwargs: Any) -> Any:
        events.append("tile")
        return forward_tile(*args, **kwargs)

    whole = _whole(24, heads, 8)
    expected, orders = _expected(whole), {}
    with patch.object(SendRecvTransport, "exchange", noted(SendRecvTransport.exchange)), patch.object(
        executor, "forward_tile", tile
    ):  # fmt: skip
        for name, transport in product(fitting(dist.get_world_size(), *heads), ("gloo", "gloo-blocking")):
            context = _context(name, "auto", torch.float64, 8, transport=transport, heads=heads)
            events.clear()
            for got, want in zip(_distributed(context, whole), expected, strict=True):
                assert (got - want).abs().max() < 1e-12, (name, transport)
            orders[name, transport] = " ".join(events), context.transport.bytes_sent
            assert context.transport.name == transport
    for (name, transport), (order, sent) in orders.items():
        assert sent == orders[name, "gloo"][1] > 0, name
        if transport == "gloo-blocking":
            assert order.count("start end") == order.count("start"), f"{name} computes before an exchange has ended"
    assert "start tile end" in orders["zigzag", "gloo"][0], "with overlap it computes beside one"


def test_without_overlap_every_exchange_ends_before_anything_is_computed() -> None:
    spawn(4, _with_and_without_overlap)


def _without_transport(rank: int) -> None:
    heads = (8, 2)
    made = _context("ring", "cpu", torch.float32, 8, heads=heads)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something moved")

    for operation in ("batch_isend_irecv", "isend", "irecv", "send", "recv", "all_reduce", "all_to_all"):
        setattr(dist, operation, refuse)
    for name in fitting(made.layout.world, *heads):
        for groups in (1, 2) if SCHEDULES[name].has_head_groups else (1,):
            context = _context(name, "cpu", torch.float32, 8, transport="none", heads=heads, head_groups=groups)
            length = context.layout.padded_length(37) // context.layout.world
            q, k, v = (torch.randn(2, length, n, 8, requires_grad=True) for n in (heads[0], heads[1], heads[1]))
            for _ in range(1 + rank):  # ranks do not wait for one another
                out, lse = attention(q, k, v, context)
                out.sum().backward()
            assert out.shape == q.shape and lse.shape == (2, heads[0], length)
            assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))
            assert (context.transport.name, context.transport.bytes_sent) == ("none", 0), name
            assert context.progress.passes == 2 * (1 + rank)  # forward and backward
    if rank == 0:  # what needs nothing from others is right
        context = _context("ring", "cpu", torch.float64, 8, transport="none", heads=heads)
        whole = _whole(16, heads, 8)
        q, k, v = (shard(x, context.layout, rank) for x in whole[:3])
        assert (attention(q, k, v, context)[0] - _expected(whole)[0][:, :4]).abs().max() < 1e-12


def test_a_transport_that_moves_nothing_fills_in_nonzero_values() -> None:
    """Kernels are faster on zeros, and the time that communication takes would seem longer."""
    transport = NoTransport(torch.device("cpu"))
    there, into = torch.randn(3, 4), torch.zeros(3, 4)
    transport.exchange(Exchange([], [Receive(1, there, into), Receive(1, there, None)]))()
    assert torch.equal(into, there)
    into.zero_()
    transport.exchange(Exchange([], [Receive(1, there, into)]))()
    assert not into.any(), "once is enough: a copy takes time"


def test_a_schedule_without_a_transport_runs_and_moves_nothing() -> None:
    spawn(4, _without_transport)


def _heads_that_do_not_divide(rank: int) -> None:
    world = dist.get_world_size()
    words = f"over {world} ranks cuts heads in {world}, which 5 query and 5 key/value heads do not allow"
    with pytest.raises(ValueError, match=f"schedule zigzag {words}"):
        _context("zigzag", "cpu", torch.float32, 8, heads=(5, 5), ulysses_size=world)
    with pytest.raises(ValueError, match="cuts heads in 3, which 8 query and 2"):
        _context("prefix", "cpu", torch.float32, 8, heads=(8, 2), head_groups=3)
    context = _context("ulysses", "cpu", torch.float32, 8, heads=(8, 2))
    x = torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match=f"schedule ulysses {words}"):
        attention(x, x, x, context)


def test_heads_that_ranks_cannot_split_are_refused_before_anything_moves() -> None:
    spawn(2, _heads_that_do_not_divide)


@pytest.mark.parametrize(("tokens", "world", "waits"), [(2**16, 4, 0), (2**18, 4, 1), (2**18, 1, 0), (2**20, 1, 1)])
def test_the_host_waits_for_attention_that_takes_seconds_alone(
    tokens: int, world: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    q = SimpleNamespace(is_cuda=True, shape=(1, tokens, 32, 128))
    context = SimpleNamespace(progress=Progress(), schedule=SimpleNamespace(world=world))
    _advance(context, q)  # type: ignore[arg-type]
    assert (len(waited), context.progress.passes) == (waits, 1)
    assert (4 * (tokens * world) ** 2 / 2 / world * 32 * 128 >= LONG_FLOPS) == bool(waits)


def _opcheck(rank: int, schedule: str) -> None:
    context = _context(schedule, "reference", torch.float32, 8)
    q = torch.randn(1, 4, 4, 8, requires_grad=True)
    kv = torch.randn(1, 4, 2, 8, requires_grad=True)
    torch.library.opcheck(
        torch.ops.lightseq.attention.default, (q, kv, kv.clone(), None, None, f"{context.name}|0.3|5.0||"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


@pytest.mark.parametrize(("schedule", "world"), [("zigzag", 1), ("ulysses", 2)])
def test_the_operator_keeps_torchs_contract(schedule: str, world: int) -> None:
    spawn(world, _opcheck, schedule)


def _different_lengths(rank: int) -> str:
    context = _context("prefix", "cpu", torch.float32, 8)
    q, kv = torch.randn(1, 4 + 2 * rank, 8, 8), torch.randn(1, 4 + 2 * rank, 2, 8)
    with pytest.raises(ValueError) as refusal:
        attention(q, kv, kv, context)
    return str(refusal.value)


def test_different_lengths_on_ranks_are_one_clear_error_on_each() -> None:
    said = spawn(3, _different_lengths)
    assert len(set(said)) == 1 and "rank 0 1 x 4 tokens, rank 1 1 x 6 tokens, rank 2 1 x 8 tokens" in said[0], said
